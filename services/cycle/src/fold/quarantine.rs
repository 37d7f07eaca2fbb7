//! What becomes of samples that were drawn with something else than was ordered.

use wire::{JobId, v1};

use crate::state::{Cycle, Job, Run};

impl Run {
    /// Samples of something else than was ordered count no more, and are drawn again.
    pub(super) fn quarantine(
        &mut self,
        number: u32,
        quarantine: &v1::Quarantine,
        sequence: u64,
    ) -> Result<(), String> {
        self.quarantines.push(quarantine.clone());
        let mut outcome = self.proofs.note(&quarantine.agent, number, sequence);
        for named in &quarantine.jobs {
            // One that is wrong says nothing of the others.
            outcome = outcome.and(self.draw_again(named, &quarantine.agent));
        }
        outcome
    }

    fn draw_again(&mut self, named: &v1::quarantine::Job, agent: &str) -> Result<(), String> {
        let id = JobId::new(named.job.as_str()).map_err(|error| error.to_string())?;
        let (purpose, round) = (self.job(named.cycle, &id)?.purpose, self.round);
        let cycle = self.cycle(named.cycle)?;
        if cycle.is_past(purpose) {
            return Ok(());
        }
        let again = JobId::new(named.again.as_str()).ok();
        let again =
            again.filter(|again| !cycle.jobs.contains_key(again) && !cycle.redrawn.contains(again));
        let samples = cycle.jobs.get_mut(&id).and_then(|job| job.samples.as_mut());
        let samples = samples.filter(|samples| samples.agent == agent);
        let samples = samples.ok_or_else(|| format!("samples of job {id} are not its agent's"))?;
        match again {
            Some(again) => cycle.draw_again(&id, again, round),
            None => samples.void = Some("of something else than was ordered".into()),
        }
        Ok(())
    }
}

impl Cycle {
    /// Another job takes a job's place.
    fn draw_again(&mut self, id: &JobId, again: JobId, round: u32) {
        if let Some(job) = self.strike(id) {
            self.redrawn.insert(id.clone());
            self.jobs.insert(again.clone(), Job::new(job.purpose, job.suite, job.draws));
            self.book(&again, round);
        }
    }
}
