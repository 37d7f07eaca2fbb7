use wire::{Fact, FactBody, FactKey, JobId, RunId, Subject};

use super::*;
use crate::{FleetAgent, RunHistory, measure_watt_hours};

const SAMPLES: u32 = 100;
const TOKENS: u32 = 50;
const TRAINED_TOKENS: u64 = 20_000;

fn raft_spec(prompts: u32, cycles: u32) -> v1::Spec {
    let raft = v1::spec::Raft {
        prompt_count: prompts,
        cycles,
        samples_per_prompt: 4,
        heldout_count: 25,
        heldout_samples_per_prompt: 4,
        verifier: Some(v1::Verifier::default()),
        sampling: Some(v1::Sampling { max_new_tokens: 100, ..Default::default() }),
        selection: Some(v1::Selection { keep_per_prompt: 1, ..Default::default() }),
        training: Some(v1::Training { epochs: 2, ..Default::default() }),
        ..Default::default()
    };
    let suites = vec![v1::Suite { name: "text".into(), ..Default::default() }];
    let kind = Some(v1::spec::Kind::Raft(raft));
    v1::Spec { suites, kind, ..Default::default() }
}

fn agents() -> Vec<FleetAgent> {
    let agent = |name: &str, role: &str| FleetAgent {
        name: name.into(),
        roles: vec![role.into()],
        tokens_per_s: 0.0,
        watts: None,
    };
    vec![agent("gen", "generator"), agent("gen", "trainer"), agent("eval", "evaluator")]
}

/// A run of two cycles after the base's evaluation, written with the times of its facts.
struct WrittenRun {
    records: Vec<wire::Record>,
    now_ms: u64,
}

impl WrittenRun {
    fn write(&mut self, key: FactKey, body: FactBody) {
        let sequence = self.records.len() as u64 + 1;
        let fact = Fact { subject: Subject::new(&RunId::new("r-1").unwrap(), key), body };
        self.records.push(wire::Record { sequence, time_ms: self.now_ms, author: None, fact });
    }

    /// Draws samples for 10 s, and judges them in 2 s.
    fn draw_samples(&mut self, cycle: u32, purpose: v1::Purpose, joules: f64) {
        self.now_ms += 10_000;
        let sample = v1::samples::Sample { tokens: TOKENS, ..Default::default() };
        let samples = v1::Samples {
            agent: "gen".into(),
            purpose: purpose.into(),
            samples: vec![sample; SAMPLES as usize],
            wall_s: 10.0,
            joules,
            ..Default::default()
        };
        let job: JobId = format!("{}1", purpose.as_str_name().to_lowercase()).parse().unwrap();
        self.write(FactKey::Samples { cycle, job: job.clone() }, FactBody::Samples(samples));
        self.now_ms += 2_000;
        let verdicts = v1::Verdicts { purpose: purpose.into(), ..Default::default() };
        self.write(FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts));
    }

    fn write_checkpoint(&mut self, cycle: u32, tokens: u64, wall_s: f64) {
        let agent = "gen".into();
        let checkpoint = v1::Checkpoint {
            r#final: true,
            tokens,
            wall_s,
            agent,
            peak_memory_bytes: 1000 * u64::from(cycle),
            ..Default::default()
        };
        self.write(FactKey::Checkpoint { cycle, step: 1 }, FactBody::Checkpoint(checkpoint));
    }

    /// Measures the text in 5 s while the held-out samples are drawn.
    fn evaluate(&mut self, cycle: u32, joules: f64) {
        let began = self.now_ms;
        self.now_ms += 5_000;
        let eval = v1::Eval { agent: "eval".into(), ..Default::default() };
        let suite = "text".parse().unwrap();
        self.write(FactKey::Eval { cycle, step: 1, suite }, FactBody::Eval(eval));
        self.now_ms = began;
        self.draw_samples(cycle, v1::Purpose::Heldout, joules);
        self.write(FactKey::CycleDone { cycle }, FactBody::CycleDone(v1::CycleDone::default()));
    }

    fn train(&mut self, cycle: u32) {
        let selected = v1::Selected { cycle, considered: 100, kept: 20, ..Default::default() };
        self.write(FactKey::Selection { cycle }, FactBody::Selected(selected));
        let pool = wire::Pool::new("default").unwrap();
        let order = FactKey::TrainOrder { pool, cycle, attempt: 1 };
        self.write(order, FactBody::TrainOrder(v1::TrainOrder::default()));
        self.now_ms += 23_000;
        self.write_checkpoint(cycle, TRAINED_TOKENS, 20.0);
    }
}

/// 25 prompts, with a gate: each cycle waits for the evaluation of the one before.
fn earlier_run(joules: f64) -> (v1::Spec, RunHistory, f64) {
    let mut spec = raft_spec(25, 2);
    let gate = v1::gates::Gate { then: v1::gates::Then::Stop.into(), ..Default::default() };
    if let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind {
        raft.gates = Some(v1::Gates { pass_rate: Some(gate), ..Default::default() });
    }
    let mut run = WrittenRun { records: Vec::new(), now_ms: 1_000_000 };
    run.write(FactKey::Spec, FactBody::Spec(spec.clone()));
    run.write_checkpoint(0, 0, 0.0);
    run.write(FactKey::Plan { cycle: 0 }, FactBody::Plan(v1::Plan::default()));
    run.evaluate(0, joules);
    for cycle in 1..=2 {
        run.write(FactKey::Plan { cycle }, FactBody::Plan(v1::Plan::default()));
        run.draw_samples(cycle, v1::Purpose::Train, joules);
        run.train(cycle);
        run.evaluate(cycle, joules);
    }
    let seconds = (run.now_ms - 1_000_000) as f64 / 1000.0;
    (spec, RunHistory::from_records(&run.records).unwrap(), seconds)
}

fn forecast(spec: &v1::Spec, histories: &[RunHistory], question: ForecastQuestion) -> v1::Forecast {
    let workload = RunWorkload::from_spec(spec).unwrap();
    let evidence = FleetEvidence::from_histories(&workload, histories, false, &agents());
    forecast_run(&workload, &evidence, question)
}

#[test]
fn a_run_like_an_earlier_one_takes_as_long() {
    let (spec, history, actual) = earlier_run(0.0);
    let question = ForecastQuestion { within_s: Some(actual * 2.0), ..Default::default() };
    let found = forecast(&spec, &[history], question);
    let Range { low, median, high } = found.seconds.unwrap();
    assert!((median / actual - 1.0).abs() < 0.05, "{median} s, {actual} s in the past");
    assert!(low < actual && actual < high && high < 1.5 * actual, "{low} to {high}");
    assert_eq!(found.probability, Some(1.0));
    assert_eq!((found.assumed, found.runs), (Vec::<String>::new(), vec!["r-1".to_owned()]));
    assert_eq!((found.watt_hours, found.price), (None, None));
}

#[test]
fn more_cycles_and_prompts_take_longer() {
    let (spec, history, _) = earlier_run(0.0);
    let histories = [history];
    let seconds = |spec: &v1::Spec| {
        forecast(spec, &histories, ForecastQuestion::default()).seconds.unwrap().median
    };
    let (small, more_cycles) = (seconds(&spec), seconds(&raft_spec(25, 6)));
    let larger = seconds(&raft_spec(100, 6));
    assert!(small < more_cycles && more_cycles < larger, "{small}, {more_cycles}, {larger}");
}

#[test]
fn energy_follows_from_measured_power_and_the_price_from_energy() {
    // 100 W while it samples; the trainer is the same box.
    let (spec, history, actual) = earlier_run(1000.0);
    let question = ForecastQuestion { price_per_kwh: Some(0.5), ..Default::default() };
    let found = forecast(&spec, &[history], question);
    let (energy, price) = (found.watt_hours.unwrap(), found.price.unwrap());
    // It works 50 s on samples and 46 s on training.
    let expected = 100.0 * 96.0 / 3600.0;
    assert!((energy.median / expected - 1.0).abs() < 0.1, "{energy:?} in {actual} s");
    assert!((price.median - energy.median / 1000.0 * 0.5).abs() < 1e-9, "{price:?}");
}

#[test]
fn the_energy_of_a_run_is_measured_and_that_of_its_training_follows_from_its_power() {
    let (_, history, _) = earlier_run(1000.0);
    let expected = (5.0 * 1000.0 + 100.0 * 46.0) / 3600.0;
    let energy = measure_watt_hours(&history, &[]).unwrap();
    assert!((energy / expected - 1.0).abs() < 0.1, "{energy} Wh, {expected} Wh in the facts");
    assert_eq!(measure_watt_hours(&earlier_run(0.0).1, &[]), None, "no box measures its power");

    let mut purged = WrittenRun { records: Vec::new(), now_ms: 1_000_000 };
    purged.write(FactKey::Spec, FactBody::Spec(raft_spec(25, 1)));
    let heldout = Some(v1::cycle_done::Rate { samples: SAMPLES, ..Default::default() });
    let done =
        v1::CycleDone { sampled: 300, metered: 200, joules: 600.0, heldout, ..Default::default() };
    purged.write(FactKey::CycleDone { cycle: 1 }, FactBody::CycleDone(done));
    let purged = RunHistory::from_records(&purged.records).unwrap();
    let energy = measure_watt_hours(&purged, &[]).unwrap();
    assert!((energy - 3.0 * 400.0 / 3600.0).abs() < 1e-9, "400 samples of 3 J each: {energy} Wh");
}

#[test]
fn without_earlier_runs_the_assumptions_are_named_and_the_interval_is_wide() {
    let found = forecast(&raft_spec(25, 2), &[], ForecastQuestion::default());
    let Range { low, median, high } = found.seconds.unwrap();
    assert!(high > 2.0 * median && low < median, "{low}, {median}, {high}");
    for word in ["generated tokens/s", "trained tokens/s", "to measure a text", "max_new_tokens"] {
        assert!(found.assumed.iter().any(|text| text.contains(word)), "{word}: {found:?}");
    }
}

#[test]
fn a_seed_gives_the_same_forecast_and_another_seed_a_similar_one() {
    let (spec, history, _) = earlier_run(0.0);
    let histories = [history];
    let with_seed =
        |seed| forecast(&spec, &histories, ForecastQuestion { seed, ..Default::default() });
    assert_eq!(with_seed(1), with_seed(1));
    let medians = [1, 2].map(|seed| with_seed(seed).seconds.unwrap().median);
    assert!(medians[0] != medians[1] && (medians[0] / medians[1] - 1.0).abs() < 0.02);
}

#[test]
fn what_is_left_of_a_run_shrinks_with_each_cycle_and_second() {
    let (spec, history, actual) = earlier_run(0.0);
    let workload = RunWorkload::from_spec(&spec).unwrap();
    let histories = std::slice::from_ref(&history);
    let evidence = FleetEvidence::from_histories(&workload, histories, false, &agents());
    let left = |trained_cycles, elapsed_s| {
        let progress = RunProgress { trained_cycles, elapsed_s };
        forecast_remaining(&workload, &evidence, progress, 0)
    };
    let median = |trained_cycles, elapsed_s| left(trained_cycles, elapsed_s).unwrap().median;
    let whole = median(None, 0.0);
    assert!((whole / actual - 1.0).abs() < 0.05, "{whole} s, {actual} s in the past");
    // The base's cycle takes 12 s, and each of the two others 47 s.
    for (trained, seconds) in [(0, 94.0), (1, 47.0)] {
        let found = median(Some(trained), 0.0);
        assert!((found / seconds - 1.0).abs() < 0.1, "after cycle {trained}: {found} s");
        let later = median(Some(trained), 10.0);
        assert!((found - later - 10.0).abs() < 2.0, "{found} s, and 10 s later {later} s");
    }
    assert_eq!(left(Some(2), 1.0), None, "all is done");
    assert_eq!(left(Some(1), 10_000.0), None, "it is unlike earlier ones");
    assert!(history.has_trained());
    assert_eq!(history.peak_training_memory(), [("gen".to_owned(), 2000)].into());
}

#[test]
fn progress_counts_done_cycles_and_no_pauses() {
    let mut run = WrittenRun { records: Vec::new(), now_ms: 1_000_000 };
    run.write(FactKey::Spec, FactBody::Spec(raft_spec(25, 2)));
    let progress = |run: &WrittenRun, now_ms| {
        RunHistory::from_records(&run.records).unwrap().read_progress(now_ms, 3_000)
    };
    assert_eq!(
        progress(&run, 1_009_000),
        RunProgress { trained_cycles: None, elapsed_s: 3.0 },
        "its own clock counts"
    );
    run.evaluate(0, 0.0);
    let done_ms = run.now_ms;
    run.now_ms += 1_000;
    run.write(FactKey::Control { number: 1 }, FactBody::Control(v1::Control::default()));
    run.now_ms += 60_000;
    run.write(FactKey::Control { number: 2 }, FactBody::Control(v1::Control::default()));
    let expected = RunProgress { trained_cycles: Some(0), elapsed_s: 5.0 };
    assert_eq!(progress(&run, done_ms + 65_000), expected);
    let mut fork = WrittenRun { records: Vec::new(), now_ms: 1_000_000 };
    let spec = v1::Spec { fork: Some(v1::spec::Fork::default()), ..raft_spec(25, 2) };
    fork.write(FactKey::Spec, FactBody::Spec(spec));
    assert_eq!(progress(&fork, 1_009_000).trained_cycles, Some(0));
    fork.evaluate(1, 0.0);
    assert_eq!(progress(&fork, fork.now_ms).trained_cycles, Some(1));
}

#[test]
fn a_run_that_the_fleet_does_not_train_has_no_workload() {
    let kind = Some(v1::spec::Kind::Watched(v1::spec::Watched::default()));
    assert_eq!(RunWorkload::from_spec(&v1::Spec { kind, ..Default::default() }), None);
    assert_eq!(RunWorkload::from_spec(&raft_spec(25, 0)), None);
}
