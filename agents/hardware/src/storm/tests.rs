use super::*;
use crate::telemetry::{CpuUsage, PressureStats, ReclaimRates, StallPressure};

fn sample(second: u64, rate: f64, system: f64) -> HostTelemetry {
    HostTelemetry {
        at_ms: second * 1000,
        tlb_per_s: Some(rate),
        cpu: Some(CpuUsage { busy: 1.0, system }),
        ..HostTelemetry::default()
    }
}

/// Returns the level after each second. Each element is a number of seconds with these rates.
fn levels(series: &[(u64, f64, f64)]) -> Vec<(u64, StormLevel)> {
    let mut weather = StormDetector::default();
    let (mut second, mut changes) = (0, Vec::new());
    for (seconds, rate, system) in series {
        for _ in 0..*seconds {
            let before = weather.current_level();
            if weather.observe_sample(&sample(second, *rate, *system)) != before {
                changes.push((second, weather.current_level()));
            }
            second += 1;
        }
    }
    changes
}

#[test]
fn a_measured_storm_is_detected_within_seconds_and_clears_long_after_its_end() {
    // llama-perplexity, an evaluation in the trainer, its peak, and training again.
    let series =
        [(60, 110.0, 0.05), (20, 340_000.0, 0.9), (20, 1_200_000.0, 0.97), (60, 110.0, 0.05)];
    assert_eq!(levels(&series), [(65, StormLevel::Storm), (130, StormLevel::Calm)]);
}

#[test]
fn many_shootdowns_that_cost_nothing_are_a_warning_and_short_ones_are_nothing() {
    assert_eq!(levels(&[(60, 300_000.0, 0.2)]), [(10, StormLevel::Warn)]);
    assert_eq!(levels(&[(9, 300_000.0, 0.2), (1, 100.0, 0.2), (9, 300_000.0, 0.2)]), []);
    assert_eq!(levels(&[(5, 1e6, 0.9), (60, 100.0, 0.1)]), [], "four seconds and a bit");
}

#[test]
fn between_the_levels_it_stays_as_it_was() {
    let series = [
        (10, 400_000.0, 0.9),
        (100, 30_000.0, 0.3),
        (20, 9_000.0, 0.1),
        (1, 30_000.0, 0.1),
        (40, 9_000.0, 0.1),
    ];
    assert_eq!(levels(&series), [(5, StormLevel::Storm), (161, StormLevel::Calm)]);
}

#[test]
fn a_sample_without_a_rate_changes_nothing_and_a_gap_restarts_durations() {
    let mut weather = StormDetector::default();
    for second in 0..5 {
        weather.observe_sample(&sample(second, 400_000.0, 0.9));
    }
    weather.observe_sample(&HostTelemetry { at_ms: 5000, ..HostTelemetry::default() });
    assert_eq!(weather.current_level(), StormLevel::Calm);
    assert_eq!(weather.observe_sample(&sample(6, 400_000.0, 0.9)), StormLevel::Storm);
    let mut weather = StormDetector::default();
    weather.observe_sample(&sample(0, 400_000.0, 0.9));
    assert_eq!(
        weather.observe_sample(&sample(3600, 400_000.0, 0.9)),
        StormLevel::Calm,
        "the box slept"
    );
}

#[test]
fn a_training_that_stands_still_in_a_storm_evaluates_in_its_own_process() {
    let mut pace = StepPace::from_step(0, 0);
    for step in 1..=10 {
        pace.record_step(step, u64::from(step) * 3000);
    }
    assert_eq!(pace.stalled_ms(35_000), None, "a step takes three seconds");
    let stalled_ms = pace.stalled_ms(45_000);
    assert_eq!(stalled_ms, Some(15_000));
    let now = sample(45, 340_000.0, 0.9);
    let cause = StormCause::from_telemetry(&now, ObservedTraining::Ours { stalled_ms });
    let said = cause.describe_remedy();
    assert!(
        said.contains("evaluation inside the training process")
            && said.contains("eval_strategy=\"no\""),
        "{said}"
    );
    let watched = StormCause::from_telemetry(&now, ObservedTraining::Watched).describe_remedy();
    assert!(watched.contains("evaluation inside the training process"), "{watched}");
}

#[test]
fn a_storm_without_a_stall_is_not_called_an_evaluation() {
    let (calm, ours) = (sample(0, 340_000.0, 0.9), ObservedTraining::Ours { stalled_ms: None });
    assert_eq!(StormCause::from_telemetry(&calm, ours), StormCause::Unknown);
    let reclaim = ReclaimRates { scanned_per_s: Some(5000.0), ..ReclaimRates::default() };
    let short = HostTelemetry { reclaim, ..calm.clone() };
    assert_eq!(StormCause::from_telemetry(&short, ours), StormCause::Reclaim);
    let memory = Some(StallPressure { some_avg10: 40.0, some_us: 1, full_us: None });
    let waits =
        HostTelemetry { pressure: PressureStats { memory, ..PressureStats::default() }, ..calm };
    assert_eq!(
        StormCause::from_telemetry(&waits, ObservedTraining::NotTraining),
        StormCause::Reclaim
    );
    assert_eq!(
        StepPace::from_step(7, 0).stalled_ms(60_000),
        None,
        "nothing is known of its rhythm"
    );
}

/// Returns the seconds in which the responder acts, and the actions.
fn acts(
    on: StormResponse,
    seconds: std::ops::Range<u64>,
    quiet: impl Fn(u64) -> bool,
) -> Vec<(u64, StormAction)> {
    let mut reaction = StormResponder::new(on, 30_000);
    let act = |second| {
        Some((second, reaction.next_action(second * 1000, StormLevel::Storm, quiet(second))?))
    };
    seconds.filter_map(act).collect()
}

#[test]
fn a_pause_ends_when_it_is_quiet_or_after_half_a_minute_and_the_next_waits_as_long() {
    assert_eq!(acts(StormResponse::Report, 0..100, |_| false), []);
    assert_eq!(
        acts(StormResponse::Pause, 0..20, |second| second > 3),
        [(0, StormAction::Pause), (9, StormAction::Resume)]
    );
    let all = acts(StormResponse::Pause, 0..100, |_| false);
    assert_eq!(
        all,
        [
            (0, StormAction::Pause),
            (30, StormAction::Resume),
            (61, StormAction::Pause),
            (91, StormAction::Resume)
        ]
    );
}

#[test]
fn workers_are_ended_once_a_storm() {
    assert_eq!(acts(StormResponse::Kill, 0..100, |_| false), [(0, StormAction::Kill)]);
    let mut reaction = StormResponder::new(StormResponse::Kill, 0);
    let levels = [StormLevel::Storm, StormLevel::Warn, StormLevel::Storm];
    let acts = levels.map(|level| reaction.next_action(0, level, false));
    assert_eq!(acts, [Some(StormAction::Kill), None, Some(StormAction::Kill)]);
}

#[test]
fn a_pause_always_ends_for_any_samples() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..1000 {
        let mut reaction = StormResponder::new(StormResponse::Pause, 30_000);
        let mut paused_at = None;
        for second in 0..300_u64 {
            let level = [StormLevel::Calm, StormLevel::Warn, StormLevel::Storm][random.usize(..3)];
            match reaction.next_action(second * 1000, level, random.bool()) {
                Some(StormAction::Pause) => assert_eq!(paused_at.replace(second), None),
                Some(StormAction::Resume) => assert!(paused_at.take().is_some()),
                Some(StormAction::Kill) => panic!("not asked for"),
                None => assert!(paused_at.is_none_or(|at| second - at < 30)),
            }
        }
    }
}
