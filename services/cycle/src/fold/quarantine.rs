//! Applies quarantines: samples drawn with wrong weights become void and their jobs are replaced.

use wire::{JobId, v1};

use crate::state::{Cycle, PlannedJob, Run};

impl Run {
    /// Replaces the listed jobs. An invalid entry does not affect the others.
    pub(super) fn apply_quarantine(
        &mut self,
        number: u32,
        quarantine: &v1::Quarantine,
        sequence: u64,
    ) -> Result<(), String> {
        self.quarantines.push(quarantine.clone());
        let mut outcome = self.canary_votes.record_quarantine(&quarantine.agent, number, sequence);
        for named in &quarantine.jobs {
            outcome = outcome.and(self.replace_listed_job(named, &quarantine.agent));
        }
        outcome
    }

    /// Marks the samples void if no replacement is listed or its id is taken. Fails if the samples
    /// are not the agent's.
    fn replace_listed_job(
        &mut self,
        named: &v1::quarantine::Job,
        agent: &str,
    ) -> Result<(), String> {
        let id = JobId::new(named.job.as_str()).map_err(|error| error.to_string())?;
        let (purpose, round) = (self.require_job(named.cycle, &id)?.purpose, self.round);
        let cycle = self.require_cycle(named.cycle)?;
        if cycle.is_closed_for(purpose) {
            return Ok(());
        }
        let replacement = JobId::new(named.again.as_str()).ok();
        let replacement = replacement.filter(|replacement| {
            !cycle.jobs.contains_key(replacement) && !cycle.replaced_jobs.contains(replacement)
        });
        let samples = cycle.jobs.get_mut(&id).and_then(|job| job.samples.as_mut());
        let samples = samples.filter(|samples| samples.agent == agent);
        let samples = samples.ok_or_else(|| format!("samples of job {id} are not its agent's"))?;
        match replacement {
            Some(replacement) => cycle.replace_job(&id, replacement, round),
            None => samples.void_reason = Some("of other weights than were ordered".into()),
        }
        Ok(())
    }
}

impl Cycle {
    fn replace_job(&mut self, id: &JobId, replacement: JobId, round: u32) {
        if let Some(job) = self.remove_job(id) {
            self.replaced_jobs.insert(id.clone());
            let again = PlannedJob::new(job.purpose, job.suite, job.draws, job.needs);
            self.jobs.insert(replacement.clone(), again);
            self.reindex_job(&replacement, round);
        }
    }
}
