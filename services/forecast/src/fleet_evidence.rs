//! The speeds, amounts and powers of a fleet, from earlier runs and from the statuses of its
//! agents, with the assumptions that replace what was never measured.

mod work_amounts;

use std::collections::BTreeMap;

use wire::v1;

use crate::{
    duration_model::{DurationModel, PhaseObservation, UncertainValue},
    fleet_agent::{FleetAgent, finite_or_zero},
    run_history::{RunHistory, SamplingPeriod},
    workload::RunWorkload,
};

/// Speeds that are assumed without any measurement, in tokens per second of one box, and the
/// logarithm of the factor by which they may be wrong.
const ASSUMED_GENERATION: f64 = 500.0;
const ASSUMED_TRAINING: f64 = 500.0;
const UNMEASURED_DEVIATION: f64 = 1.5;
/// The deviation (as above) of a speed that was measured with another base.
const OTHER_BASE_DEVIATION: f64 = 0.7;
/// The deviation of the speed of a box that is assumed to be as fast as the others.
const OTHER_BOX_DEVIATION: f64 = 0.5;

/// Seconds that are assumed for one measurement on a text, and for the verdicts after the last
/// samples.
const ASSUMED_EVALUATION_S: f64 = 20.0;
const ASSUMED_VERIFICATION_S: f64 = 2.0;
/// Seconds from an order to the first step of a training.
const ASSUMED_TRAINING_START_S: f64 = 10.0;

/// Time that a period of sampling takes longer than at full speed, as a share of the duration of a
/// job, and its deviation.
const LAST_JOBS_SHARE: f64 = 0.3;
const LAST_JOBS_DEVIATION: f64 = 0.2;

/// An amount with the relative deviation of its value in a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UncertainAmount {
    pub(crate) median: f64,
    /// Deviation of the logarithm.
    pub(crate) deviation: f64,
}

/// The models of a run's phases on the agents that are there. Work is in seconds at the measured
/// speed of these agents, if not stated otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetEvidence {
    pub(crate) runs: Vec<String>,
    /// In plain words.
    pub(crate) assumed: Vec<String>,
    /// Tokens per second of all generators, and of a trainer.
    pub(crate) generation_speed: UncertainAmount,
    pub(crate) training_speed: UncertainAmount,
    pub(crate) generation: DurationModel,
    /// By samples.
    pub(crate) verification: DurationModel,
    pub(crate) training: DurationModel,
    /// By texts for each evaluator.
    pub(crate) evaluation: DurationModel,
    pub(crate) evaluators: f64,
    pub(crate) start_s: f64,
    pub(crate) train_tokens_per_sample: UncertainAmount,
    pub(crate) heldout_tokens_per_sample: UncertainAmount,
    /// Tokens of the training of a cycle, in all passes.
    pub(crate) training_tokens: UncertainAmount,
    /// Watts of all generators while they sample, and of a trainer while it trains; `None` if no
    /// box measures them.
    pub(crate) sampling_watts: Option<f64>,
    pub(crate) training_watts: Option<f64>,
}

/// Collects evidence of one kind of base.
struct EvidenceBuilder<'a> {
    workload: &'a RunWorkload,
    histories: Vec<&'a RunHistory>,
    /// The histories are those of another base.
    is_other_base: bool,
    assumed: Vec<String>,
}

impl FleetEvidence {
    /// Learns from earlier runs. `is_other_base` is true if they trained another base than
    /// the workload's.
    pub fn from_histories(
        workload: &RunWorkload,
        histories: &[RunHistory],
        is_other_base: bool,
        agents: &[FleetAgent],
    ) -> Self {
        let histories = histories.iter().collect();
        let mut builder = EvidenceBuilder { workload, histories, is_other_base, assumed: vec![] };
        let periods: Vec<SamplingPeriod> =
            builder.histories.iter().flat_map(|history| history.sampling_periods()).collect();
        let known = sampling_speeds(&periods);
        let sampling_watts = sampling_watts(&periods);
        let generators: Vec<&FleetAgent> = with_role(agents, "generator");
        let trainers: Vec<&FleetAgent> = with_role(agents, "trainer");
        let (train, heldout) = (v1::Purpose::Train, v1::Purpose::Heldout);
        let samples = workload.train_samples + workload.heldout_samples > 0.0;
        let evaluators = with_role(agents, "evaluator").len().max(1) as f64;
        let watts_of =
            |agent: &&&FleetAgent| sampling_watts.get(&agent.name).copied().or(agent.watts);
        let measured_watts = |agents: &[&FleetAgent]| -> Vec<f64> {
            agents.iter().filter_map(|agent| watts_of(&agent)).collect()
        };
        let training_watts = measured_watts(&trainers);
        let of_generators = measured_watts(&generators);
        let start = builder.histories.iter().filter_map(|it| it.start_seconds());
        let start_s = median(start.collect()).unwrap_or(0.0);
        let mut evidence = Self {
            generation_speed: match samples {
                true => builder.generation_speed(&known, &generators),
                false => UncertainAmount { median: 1.0, deviation: 0.0 },
            },
            training_speed: builder.training_speed(&trainers),
            generation: fit_generation(&periods, &known),
            verification: builder.fit_verification(),
            training: builder.fit_training(),
            evaluation: builder.fit_evaluation(),
            evaluators,
            start_s,
            train_tokens_per_sample: builder.tokens_per_sample(train),
            heldout_tokens_per_sample: builder.tokens_per_sample(heldout),
            training_tokens: builder.training_tokens(),
            sampling_watts: builder.total_watts("generators", &of_generators, generators.len()),
            training_watts: builder
                .total_watts("trainers", &training_watts, trainers.len())
                .map(|sum| sum / trainers.len().max(1) as f64),
            runs: builder.histories.iter().map(|history| history.run.clone()).collect(),
            assumed: builder.assumed,
        };
        // Both sets of prompts may lack the same figure.
        evidence.assumed.dedup();
        evidence
    }
}

impl EvidenceBuilder<'_> {
    fn speed_deviation(&self) -> f64 {
        if self.is_other_base { OTHER_BASE_DEVIATION } else { 0.0 }
    }

    /// Adds up the measured speeds of the generators. Those without any count as the mean of the
    /// others.
    fn generation_speed(
        &mut self,
        known: &BTreeMap<String, f64>,
        generators: &[&FleetAgent],
    ) -> UncertainAmount {
        let count = generators.len().max(1) as f64;
        let of = |agent: &&&FleetAgent| known.get(&agent.name).copied();
        let reported = |agent: &&&FleetAgent| Some(agent.tokens_per_s).filter(|it| *it > 0.0);
        let measured: Vec<f64> = generators.iter().filter_map(|it| of(&it)).collect();
        let speeds: Vec<f64> = match measured.is_empty() {
            true => generators.iter().filter_map(|it| reported(&it)).collect(),
            false => measured.clone(),
        };
        let missing = count - speeds.len() as f64;
        if speeds.is_empty() {
            self.assumed.push(format!(
                "{ASSUMED_GENERATION} generated tokens/s on each generator: none was measured"
            ));
            let median = ASSUMED_GENERATION * count;
            return UncertainAmount { median, deviation: UNMEASURED_DEVIATION };
        }
        if measured.is_empty() {
            self.assumed.push("the generation speeds that the agents report now".to_owned());
        } else if self.is_other_base {
            self.assumed.push("generation speeds of another base model".to_owned());
        }
        if missing > 0.0 {
            self.assumed.push(format!(
                "{missing} of {count} generators are as fast as the mean of the others"
            ));
        }
        let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
        let known_deviation =
            if measured.is_empty() { OTHER_BOX_DEVIATION } else { self.speed_deviation() };
        let unknown = OTHER_BOX_DEVIATION * missing / count;
        UncertainAmount { median: mean * count, deviation: known_deviation.hypot(unknown) }
    }

    /// Returns the speed of the trainer that takes a training: the mean over those that are there,
    /// or the sum over those that train together.
    fn training_speed(&mut self, trainers: &[&FleetAgent]) -> UncertainAmount {
        let known = training_speeds(&self.histories);
        let of = |agent: &&FleetAgent| known.get(agent.name.as_str()).copied();
        let mut speeds: Vec<f64> = trainers.iter().filter_map(of).collect();
        if speeds.is_empty() {
            speeds.extend(known.values());
            if speeds.is_empty() {
                self.assumed
                    .push(format!("{ASSUMED_TRAINING} trained tokens/s: no training was measured"));
                let deviation = UNMEASURED_DEVIATION;
                return UncertainAmount { median: ASSUMED_TRAINING, deviation };
            }
            self.assumed.push("the training speed of boxes that are not there now".to_owned());
        } else if self.is_other_base {
            self.assumed.push("the training speed of another base model".to_owned());
        }
        let together = match self.workload.trainers {
            0 => trainers.len(),
            most => trainers.len().min(most as usize),
        };
        if together > 1 {
            self.assumed.push(format!("{together} boxes train as fast as the sum of their speeds"));
        }
        let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
        let squares = speeds.iter().map(|speed| (speed / mean).ln().powi(2)).sum::<f64>();
        // Any of the trainers may take the order.
        let between = (squares / speeds.len() as f64).sqrt();
        let median = mean * together.max(1) as f64;
        UncertainAmount { median, deviation: self.speed_deviation().hypot(between) }
    }

    fn fit_verification(&mut self) -> DurationModel {
        let tails: Vec<PhaseObservation> =
            self.histories.iter().flat_map(|history| history.verification_tails()).collect();
        let needed = self.workload.is_verified || self.workload.is_taught;
        let Some(typical) = median(tails.iter().map(|tail| tail.seconds).collect()) else {
            if needed {
                self.assumed.push(format!(
                    "{ASSUMED_VERIFICATION_S} s from the last samples to their verdicts"
                ));
            }
            let seconds = if needed { ASSUMED_VERIFICATION_S } else { 0.0 };
            let constant = UncertainValue { mean: seconds, deviation: seconds };
            let none = UncertainValue { mean: 0.0, deviation: 0.0 };
            return DurationModel::fit(constant, none, &[]);
        };
        let work = median(tails.iter().map(|tail| tail.work).collect()).unwrap_or(1.0);
        let constant = UncertainValue { mean: typical / 2.0, deviation: typical / 2.0 };
        let rate = typical / work.max(1.0) / 2.0;
        let per_sample = UncertainValue { mean: rate, deviation: rate };
        DurationModel::fit(constant, per_sample, &tails)
    }

    fn fit_training(&mut self) -> DurationModel {
        let speeds = training_speeds(&self.histories);
        let trainings = self.histories.iter().flat_map(|history| history.trainings());
        let observed = trainings.filter_map(|(seconds, checkpoint)| {
            let speed = speeds.get(checkpoint.agent.as_str())?;
            Some(PhaseObservation::new(checkpoint.tokens as f64 / speed, seconds))
        });
        let observed: Vec<PhaseObservation> = observed.collect();
        let starts = observed.iter().map(|phase| (phase.seconds - phase.work).max(0.0));
        let start = median(starts.collect()).unwrap_or(ASSUMED_TRAINING_START_S);
        let constant = UncertainValue { mean: start, deviation: start.max(0.1) };
        let rate = UncertainValue { mean: 1.0, deviation: 0.1 };
        DurationModel::fit(constant, rate, &observed)
    }

    fn fit_evaluation(&mut self) -> DurationModel {
        let measured: Vec<PhaseObservation> =
            self.histories.iter().flat_map(|history| history.evaluations()).collect();
        let each = measured.iter().map(|phase| phase.seconds / phase.work.max(1.0)).collect();
        let (each, spread) = match median(each) {
            Some(each) => (each, 0.3 * each),
            None => {
                if self.workload.text_suites > 0.0 {
                    self.assumed.push(format!("{ASSUMED_EVALUATION_S} s to measure a text"));
                }
                (ASSUMED_EVALUATION_S, ASSUMED_EVALUATION_S)
            }
        };
        let constant = UncertainValue { mean: 0.1 * each, deviation: 0.1 * each };
        let rate = UncertainValue { mean: each, deviation: spread };
        DurationModel::fit(constant, rate, &measured)
    }

    /// Adds up the watts of the boxes that measure them. The others count as their mean.
    fn total_watts(&mut self, role: &str, measured: &[f64], count: usize) -> Option<f64> {
        if measured.is_empty() {
            return None;
        }
        if measured.len() < count {
            let missing = count - measured.len();
            self.assumed.push(format!(
                "{missing} of {count} {role} need as much power as the mean of the others"
            ));
        }
        Some(measured.iter().sum::<f64>() / measured.len() as f64 * count as f64)
    }
}

fn with_role<'a>(agents: &'a [FleetAgent], role: &str) -> Vec<&'a FleetAgent> {
    agents.iter().filter(|agent| agent.has_role(role)).collect()
}

/// Returns the tokens per second of each generator, in the periods in which it worked.
fn sampling_speeds(periods: &[SamplingPeriod]) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for period in periods {
        for (agent, tokens) in &period.tokens_by_agent {
            let (all, seconds) = sums.entry(agent.clone()).or_default();
            (*all, *seconds) = (*all + tokens, *seconds + period.seconds);
        }
    }
    let speeds = sums.into_iter().filter(|(_, (tokens, _))| *tokens > 0.0);
    speeds.map(|(agent, (tokens, seconds))| (agent, tokens / seconds)).collect()
}

/// Returns the mean watts of each generator that measures its energy.
pub(crate) fn sampling_watts(periods: &[SamplingPeriod]) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for period in periods {
        for (agent, joules) in period.joules_by_agent.iter().filter(|(_, joules)| **joules > 0.0) {
            let (all, seconds) = sums.entry(agent.clone()).or_default();
            (*all, *seconds) = (*all + joules, *seconds + period.seconds);
        }
    }
    sums.into_iter().map(|(agent, (joules, seconds))| (agent, joules / seconds)).collect()
}

fn fit_generation(periods: &[SamplingPeriod], speeds: &BTreeMap<String, f64>) -> DurationModel {
    let observed = periods.iter().map(|period| {
        let agents = period.tokens_by_agent.keys();
        let speed: f64 = agents.filter_map(|agent| speeds.get(agent)).sum();
        let tokens: f64 = period.tokens_by_agent.values().sum();
        // A period that is as short as its jobs shows no rate: slots are empty all the time.
        let share_of_jobs = (-period.seconds / period.job_s.max(f64::MIN_POSITIVE)).exp();
        PhaseObservation {
            work: tokens / speed.max(f64::MIN_POSITIVE),
            seconds: period.seconds,
            deviation_s: LAST_JOBS_DEVIATION * period.job_s * share_of_jobs,
        }
    });
    let observed: Vec<PhaseObservation> = observed.collect();
    // A period ends when the last samples do, which leave most slots empty.
    let job_s = median(periods.iter().map(|period| period.job_s).collect()).unwrap_or(20.0);
    let constant =
        UncertainValue { mean: LAST_JOBS_SHARE * job_s, deviation: LAST_JOBS_DEVIATION * job_s };
    let rate = UncertainValue { mean: 0.9, deviation: 0.3 };
    DurationModel::fit(constant, rate, &observed)
}

/// Returns the trained tokens per second of each trainer.
fn training_speeds<'a>(histories: &[&'a RunHistory]) -> BTreeMap<&'a str, f64> {
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    let trained = histories.iter().flat_map(|history| history.cycles.values());
    for (_, checkpoint) in trained.filter_map(|cycle| cycle.trained.as_ref()) {
        let (tokens, seconds) = (checkpoint.tokens as f64, finite_or_zero(checkpoint.wall_s));
        if tokens > 0.0 && seconds > 0.0 {
            let sum = sums.entry(checkpoint.agent.as_str()).or_default();
            *sum = (sum.0 + tokens, sum.1 + seconds);
        }
    }
    sums.into_iter().map(|(agent, (tokens, seconds))| (agent, tokens / seconds)).collect()
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
