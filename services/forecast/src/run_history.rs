//! The times and amounts in the facts of an earlier run.

use std::collections::{BTreeMap, BTreeSet};

use wire::{FactBody, FactKey, Record, v1};

use crate::{
    duration_model::PhaseObservation,
    fleet_agent::{FleetAgent, finite_or_zero},
    run_progress::RunProgress,
};

/// Jobs that begin at most this long after the last one ended belong to the same period, in
/// milliseconds.
const PERIOD_GAP_MS: u64 = 200;

/// Longest wait for a generator that counts as part of sampling, in milliseconds. Longer ones are
/// those of a fleet without generators.
const START_WAIT_MAX_MS: u64 = 60_000;

/// The amounts that an earlier run drew, judged, trained and measured, and their times.
#[derive(Debug, Clone)]
pub struct RunHistory {
    pub(crate) run: String,
    pub(crate) spec: v1::Spec,
    pub(crate) submitted_ms: u64,
    pub(crate) cycles: BTreeMap<u32, CycleHistory>,
    /// Pauses and resumes.
    controls_ms: Vec<u64>,
}

/// One cycle of an earlier run. Lists are empty once the facts have left the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct CycleHistory {
    planned_ms: Option<u64>,
    pub(crate) drawn: Vec<DrawnJob>,
    judged: Vec<FinishedJob>,
    pub(crate) selected: Option<v1::Selected>,
    train_ordered_ms: Option<u64>,
    train_orders: u32,
    pub(crate) trained: Option<(u64, v1::Checkpoint)>,
    evals_ms: Vec<u64>,
    pub(crate) evaluators: BTreeSet<String>,
    done_ms: Option<u64>,
    done: v1::CycleDone,
}

/// A generate job with its samples.
#[derive(Debug, Clone)]
pub(crate) struct DrawnJob {
    pub(crate) agent: String,
    pub(crate) purpose: v1::Purpose,
    begin_ms: u64,
    end_ms: u64,
    pub(crate) samples: u32,
    pub(crate) tokens: u64,
    /// Samples that reached the limit of tokens.
    pub(crate) cut: u32,
    pub(crate) joules: f64,
}

/// The energy of the samples of a cycle.
#[derive(Debug, Clone, Copy, Default)]
struct SamplingEnergy {
    joules: f64,
    /// The samples whose energy this is.
    metered: f64,
    samples: f64,
}

/// A verify or score job.
#[derive(Debug, Clone)]
struct FinishedJob {
    purpose: v1::Purpose,
    end_ms: u64,
}

/// A time in which generators worked without a pause, from the fact that made their work possible.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SamplingPeriod {
    pub(crate) tokens_by_agent: BTreeMap<String, f64>,
    pub(crate) joules_by_agent: BTreeMap<String, f64>,
    pub(crate) seconds: f64,
    /// Median duration of a job on the agent whose jobs take longest.
    pub(crate) job_s: f64,
}

impl RunHistory {
    /// Reads the facts of one run, in log order. `None` without its spec.
    pub fn from_records(records: &[Record]) -> Option<Self> {
        let mut records = records.iter();
        let mut history = records.by_ref().find_map(Self::start)?;
        records.for_each(|record| history.apply_record(record));
        Some(history)
    }

    fn start(record: &Record) -> Option<Self> {
        let FactBody::Spec(spec) = &record.fact.body else { return None };
        Some(Self {
            run: record.fact.subject.run.to_string(),
            spec: spec.clone(),
            submitted_ms: record.time_ms,
            cycles: BTreeMap::new(),
            controls_ms: Vec::new(),
        })
    }

    fn apply_record(&mut self, record: &Record) {
        let at = record.time_ms;
        match &record.fact.body {
            FactBody::Control(_) => self.controls_ms.push(at),
            body => {
                let Some(number) = record.fact.subject.key.cycle_number() else { return };
                let cycle = self.cycles.entry(number).or_default();
                cycle.apply_body(&record.fact.subject.key, body, at);
            }
        }
    }

    /// Returns the agents whose work counted, with the roles in which it did.
    pub fn list_participants(&self) -> Vec<FleetAgent> {
        let mut roles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for cycle in self.cycles.values() {
            let drawn = cycle.drawn.iter().map(|job| (job.agent.as_str(), "generator"));
            let trained = cycle.trained.iter().map(|(_, it)| (it.agent.as_str(), "trainer"));
            let measured = cycle.evaluators.iter().map(|agent| (agent.as_str(), "evaluator"));
            for (agent, role) in drawn.chain(trained).chain(measured) {
                roles.entry(agent).or_default().insert(role);
            }
        }
        let of = |(name, roles): (&str, BTreeSet<&str>)| FleetAgent {
            name: name.to_owned(),
            roles: roles.into_iter().map(str::to_owned).collect(),
            tokens_per_s: 0.0,
            watts: None,
        };
        roles.into_iter().filter(|(name, _)| !name.is_empty()).map(of).collect()
    }

    /// Returns the most memory that trainings took on each trainer, in bytes; without those that did
    /// not measure it.
    pub fn peak_training_memory(&self) -> BTreeMap<String, u64> {
        let mut peaks = BTreeMap::new();
        for (_, trained) in self.cycles.values().filter_map(|cycle| cycle.trained.as_ref()) {
            if trained.peak_memory_bytes > 0 {
                let peak: &mut u64 = peaks.entry(trained.agent.clone()).or_default();
                *peak = trained.peak_memory_bytes.max(*peak);
            }
        }
        peaks
    }

    /// Returns true if a training was ordered and ended.
    pub fn has_trained(&self) -> bool {
        !self.trainings().is_empty()
    }

    /// Returns the progress at `now_ms` of a run that works. Before its first cycle is done, it has
    /// worked for `worked_ms`.
    pub fn read_progress(&self, now_ms: u64, worked_ms: u64) -> RunProgress {
        let done = self.cycles.values().filter_map(|cycle| cycle.done_ms);
        let (count, Some(last_ms)) = (done.clone().count(), done.max()) else {
            let trained_cycles = self.spec.fork.is_some().then_some(0);
            return RunProgress { trained_cycles, elapsed_s: to_seconds(worked_ms) };
        };
        // Cycle 0 trains nothing, but a fork has taken it over.
        let trained = if self.spec.fork.is_some() { count } else { count - 1 };
        let controls: Vec<u64> =
            self.controls_ms.iter().copied().filter(|at| *at > last_ms).collect();
        let paused = controls.chunks_exact(2).map(|pair| pair[1].saturating_sub(pair[0]));
        let elapsed_ms = now_ms.saturating_sub(last_ms).saturating_sub(paused.sum());
        RunProgress {
            trained_cycles: u32::try_from(trained).ok(),
            elapsed_s: to_seconds(elapsed_ms),
        }
    }

    fn is_undisturbed(&self, from_ms: u64, to_ms: u64) -> bool {
        !self.controls_ms.iter().any(|at| (from_ms..=to_ms).contains(at))
    }

    /// Returns the periods of sampling whose facts are all in the log.
    pub(crate) fn sampling_periods(&self) -> Vec<SamplingPeriod> {
        let mut jobs: Vec<&DrawnJob> = self.cycles.values().flat_map(|it| &it.drawn).collect();
        jobs.sort_by_key(|job| job.begin_ms);
        let mut groups: Vec<(u64, Vec<&DrawnJob>)> = Vec::new();
        for job in jobs {
            match groups.last_mut() {
                Some((end, group)) if job.begin_ms <= *end + PERIOD_GAP_MS => {
                    *end = job.end_ms.max(*end);
                    group.push(job);
                }
                _ => groups.push((job.end_ms, vec![job])),
            }
        }
        groups.iter().filter_map(|(end, jobs)| self.sampling_period(*end, jobs)).collect()
    }

    fn sampling_period(&self, end_ms: u64, jobs: &[&DrawnJob]) -> Option<SamplingPeriod> {
        let first_ms = jobs.first()?.begin_ms;
        let begin_ms = self.trigger_ms(first_ms);
        if !self.is_undisturbed(begin_ms, end_ms) {
            return None;
        }
        let (mut tokens_by_agent, mut joules_by_agent) = (BTreeMap::new(), BTreeMap::new());
        let mut durations: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for job in jobs {
            durations.entry(&job.agent).or_default().push(job.end_ms - job.begin_ms);
            *tokens_by_agent.entry(job.agent.clone()).or_default() += job.tokens as f64;
            *joules_by_agent.entry(job.agent.clone()).or_default() += job.joules;
        }
        let seconds = to_seconds(end_ms.saturating_sub(begin_ms));
        let medians = durations.into_values().filter_map(|mut durations| {
            durations.sort_unstable();
            durations.get(durations.len() / 2).copied()
        });
        let job_s = to_seconds(medians.max().unwrap_or(0));
        let period = SamplingPeriod { tokens_by_agent, joules_by_agent, seconds, job_s };
        (seconds > 0.0).then_some(period)
    }

    /// Returns the time of the plan, the checkpoint or the end of a cycle after which the first job
    /// of a period could begin, or that of the job if the facts of samples in between have left the
    /// log.
    fn trigger_ms(&self, first_ms: u64) -> u64 {
        let expects_heldout = self.spec.kind.as_ref().is_some_and(|kind| match kind {
            v1::spec::Kind::Raft(raft) => raft.heldout_count > 0 || !raft.prompt_suites.is_empty(),
            _ => false,
        });
        let triggers = self.cycles.values().flat_map(|cycle| {
            let is_purged = expects_heldout && cycle.drawn.is_empty();
            let checkpoint = cycle.trained.as_ref().map(|(at, _)| *at);
            let times = [cycle.planned_ms, checkpoint, cycle.done_ms];
            times.into_iter().flatten().map(move |at| (at, is_purged))
        });
        // The begin of a job is computed from its duration and may be a little early.
        let before = triggers.filter(|(at, _)| *at <= first_ms + PERIOD_GAP_MS);
        match before.max() {
            Some((at, false)) if first_ms.saturating_sub(at) <= START_WAIT_MAX_MS => at,
            _ => first_ms,
        }
    }

    /// Returns the waits for verdicts and scores after the last samples, by number of samples.
    pub(crate) fn verification_tails(&self) -> Vec<PhaseObservation> {
        let sets = [v1::Purpose::Train, v1::Purpose::Heldout];
        let cycles = self.cycles.values().flat_map(|cycle| sets.map(|set| (cycle, set)));
        let tails = cycles.filter_map(|(cycle, purpose)| {
            let drawn = || cycle.drawn.iter().filter(|job| job.purpose == purpose);
            let judged = cycle.judged.iter().filter(|job| job.purpose == purpose);
            let (last, judged) =
                (drawn().map(|it| it.end_ms).max()?, judged.map(|it| it.end_ms).max()?);
            let samples = drawn().map(|job| f64::from(job.samples)).sum();
            let is_undisturbed = self.is_undisturbed(last, judged.max(last));
            let seconds = to_seconds(judged.saturating_sub(last));
            is_undisturbed.then_some(PhaseObservation::new(samples, seconds))
        });
        tails.collect()
    }

    /// Returns each training from its order to its checkpoint. Trainings that were ordered again
    /// are left out.
    pub(crate) fn trainings(&self) -> Vec<(f64, &v1::Checkpoint)> {
        let trained = self.cycles.values().filter_map(|cycle| {
            let (end, checkpoint) = cycle.trained.as_ref()?;
            let begin = cycle.train_ordered_ms?;
            let counts = cycle.train_orders == 1 && self.is_undisturbed(begin, *end);
            counts.then(|| (to_seconds(end.saturating_sub(begin)), checkpoint))
        });
        trained.collect()
    }

    /// Returns true if each training that was ordered ended, was ordered once and was not paused.
    pub(crate) fn is_training_undisturbed(&self) -> bool {
        let ordered = self.cycles.values().filter(|cycle| cycle.train_orders > 0);
        ordered.count() == self.trainings().len()
    }

    /// Returns the joules of all samples; `None` if no box measured any. Samples without a
    /// measurement count as the mean of the others.
    pub(crate) fn sampling_joules(&self) -> Option<f64> {
        let (mut joules, mut metered, mut samples) = (0.0, 0.0, 0.0);
        for cycle in self.cycles.values() {
            let sums = cycle.sum_energy();
            (joules, metered, samples) =
                (joules + sums.joules, metered + sums.metered, samples + sums.samples);
        }
        match (metered > 0.0, samples > 0.0) {
            (true, _) => Some(joules / metered * samples),
            (false, is_sampled) => (!is_sampled).then_some(0.0),
        }
    }

    /// Returns the time from each final checkpoint to its last measurement on a text, by texts for
    /// each evaluator.
    pub(crate) fn evaluations(&self) -> Vec<PhaseObservation> {
        let suites = self.spec.suites.len() as f64;
        let measured = self.cycles.values().filter_map(|cycle| {
            let (begin, last) = (cycle.trained.as_ref()?.0, *cycle.evals_ms.iter().max()?);
            let evaluators = cycle.evaluators.len().max(1) as f64;
            let texts = (suites / evaluators).ceil();
            let seconds = to_seconds(last.saturating_sub(begin));
            self.is_undisturbed(begin, last).then(|| PhaseObservation::new(texts, seconds))
        });
        measured.collect()
    }

    /// Returns the seconds from the submission to the plan of the first cycle.
    pub(crate) fn start_seconds(&self) -> Option<f64> {
        let planned = self.cycles.first_key_value()?.1.planned_ms?;
        let is_queued = self.spec.queue.is_some();
        let undisturbed = !is_queued && self.is_undisturbed(self.submitted_ms, planned);
        undisturbed.then(|| to_seconds(planned.saturating_sub(self.submitted_ms)))
    }
}

impl CycleHistory {
    /// Adds up the energy of the samples. After their facts have left the log, the summary of the
    /// cycle has that of the training samples.
    fn sum_energy(&self) -> SamplingEnergy {
        if self.drawn.is_empty() {
            let v1::CycleDone { joules, metered, sampled, .. } = self.done;
            let suites = self.done.suites.iter().filter_map(|suite| suite.rate.as_ref());
            let judged = self.done.heldout.iter().chain(suites).map(|rate| rate.samples);
            return SamplingEnergy {
                joules: finite_or_zero(joules),
                metered: f64::from(metered),
                samples: judged.fold(f64::from(sampled), |sum, count| sum + f64::from(count)),
            };
        }
        let mut sums = SamplingEnergy::default();
        for job in &self.drawn {
            sums.samples += f64::from(job.samples);
            if job.joules > 0.0 {
                sums.joules += job.joules;
                sums.metered += f64::from(job.samples);
            }
        }
        sums
    }

    fn apply_body(&mut self, key: &FactKey, body: &FactBody, at: u64) {
        match body {
            FactBody::Plan(_) => self.planned_ms = Some(at),
            FactBody::Samples(samples) => self.drawn.push(DrawnJob::new(samples, at)),
            FactBody::Verdicts(verdicts) => {
                self.judged.push(FinishedJob { purpose: verdicts.purpose(), end_ms: at });
            }
            FactBody::Scores(_) => {
                self.judged.push(FinishedJob { purpose: v1::Purpose::Train, end_ms: at });
            }
            FactBody::Selected(selected) => self.selected = Some(selected.clone()),
            FactBody::TrainOrder(_) => {
                self.train_ordered_ms.get_or_insert(at);
                // The parts of a training on several boxes are orders of one training.
                let is_part = matches!(key, FactKey::TrainPartOrder { .. });
                self.train_orders += u32::from(!is_part || self.train_orders == 0);
            }
            FactBody::Checkpoint(checkpoint) if checkpoint.r#final => {
                self.trained = Some((at, checkpoint.clone()));
            }
            FactBody::Eval(eval) => {
                self.evals_ms.push(at);
                self.evaluators.insert(eval.agent.clone());
            }
            FactBody::CycleDone(done) => {
                self.done_ms = Some(at);
                self.done = done.clone();
            }
            _ => {}
        }
    }
}

impl DrawnJob {
    fn new(samples: &v1::Samples, end_ms: u64) -> Self {
        let is_cut = |it: &&v1::samples::Sample| it.finish() == v1::samples::Finish::Length;
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Self {
            agent: samples.agent.clone(),
            purpose: samples.purpose(),
            begin_ms: end_ms.saturating_sub(to_millis(samples.wall_s)),
            end_ms,
            samples: count(samples.samples.len()),
            tokens: samples.samples.iter().map(|sample| u64::from(sample.tokens)).sum(),
            cut: count(samples.samples.iter().filter(is_cut).count()),
            joules: finite_or_zero(samples.joules),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a conversion saturates, and the time before 1970 is cut"
)]
fn to_millis(seconds: f64) -> u64 {
    (finite_or_zero(seconds) * 1000.0) as u64
}

fn to_seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}
