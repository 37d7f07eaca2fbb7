//! The progress of a run's current phase, from its facts and the active jobs of agents.

use std::collections::BTreeMap;

use cycle::{Cycle, Run, RunPhase};
use wire::{TrainPart, train_part_name, v1};

/// The active jobs of one run by agent, as agents report them.
#[derive(Debug, Default)]
pub struct ActiveJobs(BTreeMap<String, Vec<v1::ActiveJob>>);

/// The progress of a phase, in samples, jobs or steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhaseProgress {
    pub done: u64,
    pub total: u64,
    pub note: String,
}

impl ActiveJobs {
    /// Returns the active jobs of a run from all statuses.
    pub fn from_statuses<'a>(
        run: &Run,
        statuses: impl IntoIterator<Item = &'a v1::AgentStatus>,
    ) -> Self {
        let mut jobs = Self::default();
        statuses.into_iter().for_each(|status| jobs.update_agent(run, status));
        jobs
    }

    /// Replaces the jobs of one agent with those of its new status.
    pub fn update_agent(&mut self, run: &Run, status: &v1::AgentStatus) {
        let ours = status.jobs.iter().filter(|job| job.run == run.id.as_str()).cloned();
        self.0.insert(status.agent.clone(), ours.collect());
    }

    /// Returns the progress of the run's current phase.
    pub fn phase_progress(&self, run: &Run) -> PhaseProgress {
        let (number, phase) = (run.active_cycle(), run.current_phase());
        let Some(cycle) = run.cycles.get(&number) else { return self.training_progress(phase) };
        match phase {
            RunPhase::Generate => self.sampling_progress(cycle, v1::Purpose::Train),
            RunPhase::Evaluate => {
                let notes = self.0.values().flatten().map(|job| job.note.as_str());
                let note = notes.into_iter().find(|note| !note.is_empty()).unwrap_or_default();
                let progress = self.sampling_progress(cycle, v1::Purpose::Heldout);
                PhaseProgress { note: note.to_owned(), ..progress }
            }
            RunPhase::Verify => {
                let all = cycle.jobs_for(v1::Purpose::Train);
                let finished = all.filter(|(_, job)| job.is_settled()).count() as u64;
                let total = cycle.jobs_for(v1::Purpose::Train).count() as u64;
                PhaseProgress { done: finished, total, note: "jobs".into() }
            }
            RunPhase::Train if run.is_watched() => watched_progress(cycle),
            RunPhase::Train if !cycle.split_training.outer_steps.is_empty() => {
                self.shared_progress(number, cycle)
            }
            RunPhase::Plan | RunPhase::Select | RunPhase::Train | RunPhase::Done => {
                self.training_progress(phase)
            }
        }
    }

    /// Phases without training have no progress.
    fn training_progress(&self, phase: RunPhase) -> PhaseProgress {
        let job = self.0.values().flatten().find(|job| job.role == "trainer");
        match job {
            Some(job) if matches!(phase, RunPhase::Plan | RunPhase::Train) => PhaseProgress {
                done: job.done.into(),
                total: job.total.max(1).into(),
                note: job.note.clone(),
            },
            _ => PhaseProgress { done: 0, total: 1, note: String::new() },
        }
    }

    /// Samples of finished jobs plus those of active generators.
    fn sampling_progress(&self, cycle: &Cycle, purpose: v1::Purpose) -> PhaseProgress {
        let planned = cycle.jobs_for(purpose).flat_map(|(_, job)| &job.draws);
        let total: u64 = planned.map(|draw| u64::from(draw.count)).sum();
        let accepted = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
        let mut done: u64 = accepted.map(|samples| u64::from(samples.count)).sum();
        let active: Vec<&v1::ActiveJob> =
            self.0.values().flatten().filter(|job| job.role == "generator").collect();
        done += active.iter().map(|job| u64::from(job.done)).sum::<u64>();
        let jobs = if active.len() == 1 { "job" } else { "jobs" };
        let note = format!("samples, {} {jobs} running", active.len());
        PhaseProgress { done: done.min(total), total: total.max(1), note }
    }

    /// Steps that count, of a training on several boxes, plus those of the open outer step that are
    /// in the log or that boxes report of their slices.
    fn shared_progress(&self, number: u32, cycle: &Cycle) -> PhaseProgress {
        let training = &cycle.split_training;
        let is_ours = |job: &&v1::ActiveJob| job.role == "trainer" && job.cycle == number;
        let jobs = || self.0.values().flatten().filter(is_ours);
        // Boxes know the number of steps before the first result names it.
        let reported = || jobs().map(|job| job.total).max();
        let total = training.total_steps.or_else(reported).unwrap_or(1).max(1);
        let mut planned = training.outer_steps.iter().rev();
        let planned = planned.find_map(|(outer, step)| Some((*outer, step, step.plan.as_ref()?)));
        let mut done = training.counted_steps();
        let mut note = String::new();
        if let Some((outer, step, plan)) = planned {
            note = format!("outer step {outer}");
            if plan.slices.len() > 1 {
                note = format!("{note} on {} boxes", plan.slices.len());
            }
            let slices = plan.slices.iter().filter(|_| step.closed.is_none());
            for (slice, planned) in (1..).zip(slices) {
                let name = train_part_name(outer, TrainPart::Slice(slice));
                // The boxes count from the beginning of the training.
                let trained = jobs().filter(|job| job.job == name);
                let trained = trained.map(|job| job.done.saturating_sub(planned.first)).max();
                let delta = step.slices.get(&slice).and_then(|slice| slice.delta.as_ref());
                let trained = delta.map(|delta| delta.steps).or(trained).unwrap_or(0);
                done = done.saturating_add(trained.min(planned.steps));
            }
        }
        PhaseProgress { done: done.min(total).into(), total: total.into(), note }
    }
}

/// A watched training is known only by its checkpoints.
fn watched_progress(cycle: &Cycle) -> PhaseProgress {
    let last = cycle.checkpoints.values().next_back();
    let (done, total) = last.map_or((0, 0), |last| (last.step, last.steps));
    PhaseProgress { done: done.into(), total: total.max(1).into(), note: "steps published".into() }
}
