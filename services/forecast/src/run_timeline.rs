//! One simulation of a run: the order of its phases, with durations drawn from the evidence.

use crate::{
    duration_model::{DrawnDuration, draw_factor},
    fleet_evidence::{FleetEvidence, UncertainAmount},
    workload::{CycleOverlap, RunWorkload},
};

/// Relative change of the samples that a cycle keeps, from one cycle to the next.
const CYCLE_DEVIATION: f64 = 0.03;

/// The durations of a simulated run, in seconds. Phases may overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct SimulatedDurations {
    pub(crate) total_s: f64,
    pub(crate) sampling_s: f64,
    pub(crate) training_s: f64,
    pub(crate) evaluation_s: f64,
}

/// A run whose speeds and amounts are drawn.
struct DrawnRun<'a> {
    workload: &'a RunWorkload,
    evidence: &'a FleetEvidence,
    /// Cycles that are done. The first of them trained nothing.
    trained_cycles: Option<u32>,
    generation: DrawnDuration,
    verification: DrawnDuration,
    training: DrawnDuration,
    evaluation: DrawnDuration,
    /// Work in seconds at the measured speed.
    train_sampling: f64,
    heldout_sampling: f64,
    training_work: f64,
    durations: SimulatedDurations,
}

/// The times of a cycle, in seconds since the start.
#[derive(Debug, Clone, Copy, Default)]
struct CycleTimes {
    /// The samples that were trained on were selected.
    selected: f64,
    checkpoint: f64,
    done: f64,
}

/// Simulates a run, or what is left of one after a number of trained cycles.
pub(crate) fn simulate_run(
    workload: &RunWorkload,
    evidence: &FleetEvidence,
    trained_cycles: Option<u32>,
    random: &mut fastrand::Rng,
) -> SimulatedDurations {
    let mut run = DrawnRun::draw(workload, evidence, random);
    run.trained_cycles = trained_cycles;
    if workload.cycles == 0 {
        run.draw_single_training(random);
    } else {
        run.draw_cycles(random);
    }
    run.durations
}

impl<'a> DrawnRun<'a> {
    fn draw(
        workload: &'a RunWorkload,
        evidence: &'a FleetEvidence,
        random: &mut fastrand::Rng,
    ) -> Self {
        let mut draw =
            |amount: UncertainAmount| amount.median * draw_factor(amount.deviation, random);
        let generation_speed = draw(evidence.generation_speed);
        let training_speed = draw(evidence.training_speed);
        let train_tokens = draw(evidence.train_tokens_per_sample) * workload.train_samples;
        let heldout_tokens = draw(evidence.heldout_tokens_per_sample) * workload.heldout_samples;
        let training_tokens = draw(evidence.training_tokens);
        Self {
            workload,
            evidence,
            trained_cycles: None,
            train_sampling: train_tokens / generation_speed,
            heldout_sampling: heldout_tokens / generation_speed,
            training_work: training_tokens / training_speed,
            generation: evidence.generation.draw_coefficients(random),
            verification: evidence.verification.draw_coefficients(random),
            training: evidence.training.draw_coefficients(random),
            evaluation: evidence.evaluation.draw_coefficients(random),
            durations: SimulatedDurations::default(),
        }
    }

    /// An SFT run trains once and is evaluated.
    fn draw_single_training(&mut self, random: &mut fastrand::Rng) {
        let trained = self.evidence.start_s + self.draw_training(random);
        self.durations.total_s = trained + self.draw_evaluation(random);
    }

    fn draw_cycles(&mut self, random: &mut fastrand::Rng) {
        let start = if self.trained_cycles.is_some() { 0.0 } else { self.evidence.start_s };
        let mut last = CycleTimes { selected: start, checkpoint: start, done: start };
        let mut done_before = start;
        for cycle in self.trained_cycles.unwrap_or(0)..=self.workload.cycles {
            let is_last = cycle == self.workload.cycles;
            let is_done = self.trained_cycles == Some(cycle);
            let evaluation = if is_done { 0.0 } else { self.draw_evaluation(random) };
            let evaluated = last.checkpoint + evaluation;
            let sampled = self.draw_cycle_sampling(cycle, (last, evaluated, done_before), random);
            last.done = sampled.heldout_judged.max(evaluated);
            self.durations.total_s = last.done;
            if is_last {
                break;
            }
            let selected = sampled.train_judged;
            let checkpoint = selected.max(last.checkpoint) + self.draw_training(random);
            done_before = last.done;
            last = CycleTimes { selected, checkpoint, done: last.done };
        }
    }

    /// Draws the held-out samples of a checkpoint and the training samples of the next cycle, which
    /// share the generators.
    fn draw_cycle_sampling(
        &mut self,
        cycle: u32,
        (last, evaluated, done_before): (CycleTimes, f64, f64),
        random: &mut fastrand::Rng,
    ) -> SampledTimes {
        let RunWorkload { train_samples, overlap, .. } = *self.workload;
        let (train, heldout, heldout_samples) = match self.trained_cycles {
            Some(done) if done == cycle => (self.train_sampling, 0.0, 0.0),
            _ => (self.train_sampling, self.heldout_sampling, self.workload.heldout_samples),
        };
        let has_next = cycle < self.workload.cycles && train_samples > 0.0;
        let next = if has_next { train } else { 0.0 };
        let (held_end, train_end);
        match overlap {
            CycleOverlap::WhileTraining if cycle > 0 => {
                train_end = last.selected + self.draw_sampling(next, random);
                held_end = last.checkpoint.max(train_end) + self.draw_sampling(heldout, random);
            }
            CycleOverlap::WhileTraining | CycleOverlap::AtCheckpoint => {
                let both = self.draw_sampling(heldout + next, random);
                let share = if heldout + next > 0.0 { heldout / (heldout + next) } else { 0.0 };
                held_end = last.checkpoint + if has_next { both * share } else { both };
                // The cycle after the next one waits until this one's predecessor is done.
                let waits = (done_before - held_end).max(0.0);
                train_end = last.checkpoint + both + waits;
            }
            CycleOverlap::WhenDone => {
                held_end = last.checkpoint + self.draw_sampling(heldout, random);
                let judged = held_end + self.draw_verification(heldout_samples, random);
                train_end = judged.max(evaluated) + self.draw_sampling(next, random);
                let train_judged = train_end + self.draw_verification(train_samples, random);
                return SampledTimes { heldout_judged: judged, train_judged };
            }
        }
        let heldout_judged = held_end + self.draw_verification(heldout_samples, random);
        let train_judged = train_end + self.draw_verification(train_samples, random);
        SampledTimes { heldout_judged, train_judged }
    }

    fn draw_sampling(&mut self, work: f64, random: &mut fastrand::Rng) -> f64 {
        if work <= 0.0 {
            return 0.0;
        }
        let seconds = self.generation.draw_seconds(work, random);
        self.durations.sampling_s += seconds;
        seconds
    }

    fn draw_verification(&self, samples: f64, random: &mut fastrand::Rng) -> f64 {
        if samples > 0.0 { self.verification.draw_seconds(samples, random) } else { 0.0 }
    }

    fn draw_training(&mut self, random: &mut fastrand::Rng) -> f64 {
        let work = self.training_work * draw_factor(CYCLE_DEVIATION, random);
        let seconds = self.training.draw_seconds(work, random);
        self.durations.training_s += seconds;
        seconds
    }

    /// Draws the time from a checkpoint to its last measurement on a text.
    fn draw_evaluation(&mut self, random: &mut fastrand::Rng) -> f64 {
        if self.workload.text_suites == 0.0 {
            return 0.0;
        }
        let texts = (self.workload.text_suites / self.evidence.evaluators).ceil();
        let seconds = self.evaluation.draw_seconds(texts, random);
        self.durations.evaluation_s += seconds;
        seconds
    }
}

/// The times at which the verdicts on a set of samples are complete.
#[derive(Debug, Clone, Copy)]
struct SampledTimes {
    heldout_judged: f64,
    train_judged: f64,
}
