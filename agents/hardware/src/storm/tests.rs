use super::*;
use crate::telemetry::{CpuNow, Pressure, Pressures, Reclaim};

fn sample(second: u64, rate: f64, system: f64) -> Telemetry {
    Telemetry {
        at_ms: second * 1000,
        tlb_per_s: Some(rate),
        cpu: Some(CpuNow { busy: 1.0, system }),
        ..Telemetry::default()
    }
}

/// The level after each second of these rates, each for so many seconds.
fn levels(series: &[(u64, f64, f64)]) -> Vec<(u64, Level)> {
    let mut weather = Weather::default();
    let (mut second, mut changes) = (0, Vec::new());
    for (seconds, rate, system) in series {
        for _ in 0..*seconds {
            let before = weather.level();
            if weather.hear(&sample(second, *rate, *system)) != before {
                changes.push((second, weather.level()));
            }
            second += 1;
        }
    }
    changes
}

#[test]
fn a_measured_storm_is_told_within_seconds_and_clears_when_it_is_long_over() {
    // llama-perplexity, an evaluation in the trainer, its peak, and training again.
    let series =
        [(60, 110.0, 0.05), (20, 340_000.0, 0.9), (20, 1_200_000.0, 0.97), (60, 110.0, 0.05)];
    assert_eq!(levels(&series), [(65, Level::Storm), (130, Level::Calm)]);
}

#[test]
fn many_shootdowns_that_cost_nothing_are_a_warning_and_short_ones_are_nothing() {
    assert_eq!(levels(&[(60, 300_000.0, 0.2)]), [(10, Level::Warn)]);
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
    assert_eq!(levels(&series), [(5, Level::Storm), (161, Level::Calm)]);
}

#[test]
fn a_sample_without_a_rate_changes_nothing_and_a_gap_begins_anew() {
    let mut weather = Weather::default();
    for second in 0..5 {
        weather.hear(&sample(second, 400_000.0, 0.9));
    }
    weather.hear(&Telemetry { at_ms: 5000, ..Telemetry::default() });
    assert_eq!(weather.level(), Level::Calm);
    assert_eq!(weather.hear(&sample(6, 400_000.0, 0.9)), Level::Storm);
    let mut weather = Weather::default();
    weather.hear(&sample(0, 400_000.0, 0.9));
    assert_eq!(weather.hear(&sample(3600, 400_000.0, 0.9)), Level::Calm, "the box slept");
}

#[test]
fn a_training_that_stands_still_in_a_storm_evaluates_in_its_own_process() {
    let mut pace = Pace::begin(0, 0);
    for step in 1..=10 {
        pace.note(step, u64::from(step) * 3000);
    }
    assert_eq!(pace.stalled_ms(35_000), None, "a step takes three seconds");
    let stalled_ms = pace.stalled_ms(45_000);
    assert_eq!(stalled_ms, Some(15_000));
    let now = sample(45, 340_000.0, 0.9);
    let cause = Cause::of(&now, Training::Ours { stalled_ms });
    let said = cause.describe();
    assert!(
        said.contains("evaluation inside the training process")
            && said.contains("eval_strategy=\"no\""),
        "{said}"
    );
    let watched = Cause::of(&now, Training::Watched).describe();
    assert!(watched.contains("evaluation inside the training process"), "{watched}");
}

#[test]
fn a_storm_without_a_stall_is_not_called_an_evaluation() {
    let (calm, ours) = (sample(0, 340_000.0, 0.9), Training::Ours { stalled_ms: None });
    assert_eq!(Cause::of(&calm, ours), Cause::Unknown);
    let reclaim = Reclaim { scanned_per_s: Some(5000.0), ..Reclaim::default() };
    let short = Telemetry { reclaim, ..calm.clone() };
    assert_eq!(Cause::of(&short, ours), Cause::Reclaim);
    let memory = Some(Pressure { some_avg10: 40.0, some_us: 1, full_us: None });
    let waits = Telemetry { pressure: Pressures { memory, ..Pressures::default() }, ..calm };
    assert_eq!(Cause::of(&waits, Training::No), Cause::Reclaim);
    assert_eq!(Pace::begin(7, 0).stalled_ms(60_000), None, "nothing is known of its rhythm");
}

/// Seconds and what was done in them.
fn acts(
    on: OnStorm,
    seconds: std::ops::Range<u64>,
    quiet: impl Fn(u64) -> bool,
) -> Vec<(u64, Act)> {
    let mut reaction = Reaction::new(on, 30_000);
    let act = |second| Some((second, reaction.next(second * 1000, Level::Storm, quiet(second))?));
    seconds.filter_map(act).collect()
}

#[test]
fn a_pause_ends_when_it_is_quiet_or_after_half_a_minute_and_the_next_waits_as_long() {
    assert_eq!(acts(OnStorm::Tell, 0..100, |_| false), []);
    assert_eq!(
        acts(OnStorm::Pause, 0..20, |second| second > 3),
        [(0, Act::Pause), (9, Act::Resume)]
    );
    let all = acts(OnStorm::Pause, 0..100, |_| false);
    assert_eq!(all, [(0, Act::Pause), (30, Act::Resume), (61, Act::Pause), (91, Act::Resume)]);
}

#[test]
fn workers_are_ended_once_a_storm() {
    assert_eq!(acts(OnStorm::Kill, 0..100, |_| false), [(0, Act::Kill)]);
    let mut reaction = Reaction::new(OnStorm::Kill, 0);
    let levels = [Level::Storm, Level::Warn, Level::Storm];
    let acts = levels.map(|level| reaction.next(0, level, false));
    assert_eq!(acts, [Some(Act::Kill), None, Some(Act::Kill)]);
}

#[test]
fn a_pause_always_ends_whatever_is_heard_meanwhile() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..1000 {
        let mut reaction = Reaction::new(OnStorm::Pause, 30_000);
        let mut paused_at = None;
        for second in 0..300_u64 {
            let level = [Level::Calm, Level::Warn, Level::Storm][random.usize(..3)];
            match reaction.next(second * 1000, level, random.bool()) {
                Some(Act::Pause) => assert_eq!(paused_at.replace(second), None),
                Some(Act::Resume) => assert!(paused_at.take().is_some()),
                Some(Act::Kill) => panic!("not asked for"),
                None => assert!(paused_at.is_none_or(|at| second - at < 30)),
            }
        }
    }
}
