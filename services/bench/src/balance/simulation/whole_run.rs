//! Whole runs: verifiers, a trainer and evaluators beside the generators. Their work takes virtual
//! time that varies from job to job, from cycle to cycle and from run to run.

use anyhow::ensure;
use wire::{FactBody, FactKey, Record, derive_seed, v1};

use super::{MILLISECOND, PhaseSimulation, SimulationEvent, to_nanoseconds};
use crate::{memory_log::RaftWorkload, stub_agents};

/// Standard deviation of the logarithms of speeds and amounts between two runs.
const RUN_DEVIATION: f64 = 0.04;
/// The same between two cycles of a run.
const CYCLE_DEVIATION: f64 = 0.03;
/// The same between two jobs.
const JOB_DEVIATION: f64 = 0.06;

/// Tokens of a prompt.
const PROMPT_TOKENS: f64 = 24.0;

/// The boxes of a simulated fleet.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimulatedFleet {
    /// Tokens per second of each generator with full slots.
    pub(crate) speeds: Vec<f64>,
    pub(crate) verifiers: usize,
    pub(crate) verify_sample_s: f64,
    pub(crate) evaluators: usize,
    pub(crate) evaluation_s: f64,
    pub(crate) trained_tokens_per_s: f64,
    pub(crate) training_start_s: f64,
    /// Probability that a sample passes.
    pub(crate) pass_share: f64,
}

/// A simulated run with all its facts.
#[derive(Debug)]
pub(crate) struct SimulatedRun {
    pub(crate) records: Vec<Record>,
    pub(crate) seconds: f64,
}

/// The roles besides the generators, in one run.
pub(super) struct OtherRoles {
    fleet: SimulatedFleet,
    random: fastrand::Rng,
    length_factor: f64,
    /// The times at which each verifier and each evaluator is idle again, in nanoseconds.
    verifiers: Vec<u64>,
    evaluators: Vec<u64>,
    /// The facts that are to be written.
    answers: Vec<(FactKey, FactBody)>,
    history: Vec<Record>,
}

/// Simulates a run from its submission to its end.
pub(crate) fn simulate_run(
    name: &str,
    workload: RaftWorkload,
    fleet: &SimulatedFleet,
) -> anyhow::Result<SimulatedRun> {
    let roles = OtherRoles::new(fleet, workload.seed);
    let speeds = roles.fleet.speeds.clone();
    let mut simulation = PhaseSimulation::start(name, workload, (&speeds, true), Some(roles))?;
    simulation.run_until_complete()?;
    ensure!(simulation.log.is_run_done(), "the simulation ended before the run");
    ensure!(simulation.log.run_state().anomalies.is_empty(), "the log contradicts itself");
    let records = simulation.roles.map_or_else(Vec::new, |roles| roles.history);
    let end_ms = records.last().map_or(0, |record| record.time_ms);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let seconds = end_ms as f64 / 1000.0;
    Ok(SimulatedRun { records, seconds })
}

impl OtherRoles {
    fn new(fleet: &SimulatedFleet, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(derive_seed(seed, &["roles"]));
        let mut vary = |value: f64| value * draw_factor(RUN_DEVIATION, &mut random);
        let fleet = SimulatedFleet {
            speeds: fleet.speeds.iter().map(|speed| vary(*speed)).collect(),
            verify_sample_s: vary(fleet.verify_sample_s),
            evaluation_s: vary(fleet.evaluation_s),
            trained_tokens_per_s: vary(fleet.trained_tokens_per_s),
            training_start_s: vary(fleet.training_start_s),
            pass_share: vary(fleet.pass_share),
            ..*fleet
        };
        let length_factor = vary(1.0);
        Self {
            random,
            length_factor,
            verifiers: vec![0; fleet.verifiers],
            evaluators: vec![0; fleet.evaluators],
            answers: Vec::new(),
            history: Vec::new(),
            fleet,
        }
    }

    pub(super) fn scale_length(&self, tokens: u32) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive number of tokens"
        )]
        let scaled = (f64::from(tokens) * self.length_factor).round() as u32;
        scaled.max(1)
    }

    fn draw_seconds(&mut self, seconds: f64) -> f64 {
        seconds * draw_factor(JOB_DEVIATION, &mut self.random)
    }

    fn judge_samples(&mut self, record: &Record, samples: &v1::Samples) -> v1::Verdicts {
        let mut verdicts = stub_agents::make_verdicts(record.sequence, samples);
        for verdict in &mut verdicts.verdicts {
            let passes = self.random.f64() < self.fleet.pass_share;
            let outcome =
                if passes { v1::verdicts::Outcome::Pass } else { v1::verdicts::Outcome::Fail };
            verdict.outcome = outcome.into();
            verdict.reward = f64::from(u8::from(passes));
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let count = samples.samples.len() as f64;
        verdicts.wall_s = self.draw_seconds(self.fleet.verify_sample_s * count);
        verdicts
    }

    /// Returns the mean length of the samples that a cycle is trained on.
    fn mean_length(&self, cycle: u32) -> f64 {
        let drawn = self.history.iter().filter_map(|record| match &record.fact.body {
            FactBody::Samples(it) if it.cycle == cycle && it.purpose() == v1::Purpose::Train => {
                Some(&it.samples)
            }
            _ => None,
        });
        let lengths: Vec<f64> = drawn.flatten().map(|it| f64::from(it.tokens)).collect();
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let count = lengths.len().max(1) as f64;
        lengths.iter().sum::<f64>() / count
    }

    fn kept_samples(&self, cycle: u32) -> u32 {
        let selected = self.history.iter().rev().find_map(|record| match &record.fact.body {
            FactBody::Selected(selected) if selected.cycle == cycle => Some(selected.kept),
            _ => None,
        });
        selected.unwrap_or(0)
    }

    /// Returns a checkpoint with the tokens and the time of its training.
    fn train_order(&mut self, order: &v1::TrainOrder) -> v1::Checkpoint {
        let each = PROMPT_TOKENS + self.mean_length(order.cycle);
        let tokens = f64::from(self.kept_samples(order.cycle)) * each;
        let wall_s = self.draw_seconds(tokens / self.fleet.trained_tokens_per_s);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive number of tokens"
        )]
        let tokens = tokens as u64;
        v1::Checkpoint { tokens, wall_s, ..stub_agents::make_checkpoint(order) }
    }
}

impl PhaseSimulation {
    /// Starts the work that a fact asks of roles other than generators.
    pub(super) fn note_record(&mut self, record: &Record) {
        let now = self.now;
        let Some(roles) = &mut self.roles else { return };
        roles.history.push(record.clone());
        match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let verdicts = roles.judge_samples(record, samples);
                let end = occupy_worker(&mut roles.verifiers, now, verdicts.wall_s).1;
                let key = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
                self.schedule_answer(end, key, FactBody::Verdicts(verdicts));
            }
            (_, FactBody::TrainOrder(order)) => {
                let checkpoint = roles.train_order(order);
                let start = roles.draw_seconds(roles.fleet.training_start_s);
                let end = now + to_nanoseconds(start + checkpoint.wall_s);
                let key = FactKey::Checkpoint { cycle: order.cycle, step: checkpoint.step };
                for (machine, speed) in self.machines.iter_mut().zip(&roles.fleet.speeds) {
                    machine.set_speed(speed * draw_factor(CYCLE_DEVIATION, &mut roles.random));
                }
                self.schedule_answer(end, key, FactBody::Checkpoint(checkpoint));
            }
            (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => {
                let mut eval = stub_agents::make_eval(checkpoint);
                let suites = &self.log.run_state().spec.suites;
                let Some(suite) = suites.first().and_then(|it| it.name.parse().ok()) else {
                    return;
                };
                let wall_s = roles.draw_seconds(roles.fleet.evaluation_s);
                let (worker, end) = occupy_worker(&mut roles.evaluators, now, wall_s);
                eval.agent = format!("evaluator-{worker}");
                let key = FactKey::Eval { cycle: *cycle, step: *step, suite };
                self.schedule_answer(end, key, FactBody::Eval(eval));
            }
            _ => {}
        }
    }

    fn schedule_answer(&mut self, at: u64, key: FactKey, body: FactBody) {
        let Some(roles) = &mut self.roles else { return };
        roles.answers.push((key, body));
        let answer = roles.answers.len() - 1;
        self.schedule_event(at - self.now, SimulationEvent::Answered { answer });
    }

    pub(super) fn write_answer(&mut self, answer: usize) {
        let Some(roles) = &self.roles else { return };
        let (key, body) = roles.answers[answer].clone();
        self.log.advance_time(self.now / MILLISECOND);
        self.log.append_fact(key, body);
        self.run_planner(false);
    }
}

/// Gives work to the worker that is idle first, and returns it with the time of its end.
fn occupy_worker(idle_at: &mut [u64], now: u64, seconds: f64) -> (usize, u64) {
    let first = (0..idle_at.len()).min_by_key(|worker| idle_at[*worker]).unwrap_or(0);
    let end = idle_at[first].max(now) + to_nanoseconds(seconds);
    idle_at[first] = end;
    (first, end)
}

/// Draws a lognormal factor of median 1, from the sum of twelve uniform numbers.
fn draw_factor(deviation: f64, random: &mut fastrand::Rng) -> f64 {
    let normal = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
    (deviation * normal).exp()
}
