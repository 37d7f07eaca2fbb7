//! The goals of a training on several boxes, beside what was measured.

use serde::Serialize;

use super::{
    AcrossReport,
    case_result::{CaseResult, QualityTime},
    cases::{GOAL_CASES, MIXED},
    fleet_figures::SlowShare,
    seed_training::BATCH_SIZE,
    shared_training::SharingMethod,
};

/// The largest change of the negative log-likelihood against one box, as a share.
const CHANGE_MAX: f64 = 0.01;
/// The same if boxes send changes over a slow link.
const SLOW_CHANGE_MAX: f64 = 0.005;
/// The least number of times as fast as one box that four equal ones come to its likelihood.
const SPEEDUP_MIN: f64 = 3.2;
/// The least share of the sum of the speeds of mixed boxes.
const SHARE_MIN: f64 = 0.85;
/// The same of four boxes behind a slow link.
const SLOW_SHARE_MIN: f64 = 0.9;
/// The most megabytes that a box sends over a slow link in an outer step.
const SENT_MB_MAX: f64 = 1.0;
/// The least number of boxes that die.
const DEATHS_MIN: usize = 100;

/// A goal and its result.
#[derive(Debug, Serialize)]
pub(super) struct GoalResult {
    pub subject: String,
    pub goal: String,
    pub result: String,
    pub is_met: bool,
}

/// Returns all goals.
pub(super) fn list_goals(report: &AcrossReport) -> Vec<GoalResult> {
    let (same, more): (Vec<_>, Vec<_>) =
        report.shared.iter().partition(|it| it.steps == GOAL_CASES[0].steps);
    let four = same.iter().copied().filter(|it| it.speeds.len() == 4);
    let mut goals: Vec<GoalResult> = same.iter().map(|it| compare_likelihood(it)).collect();
    goals.extend(four.chain(more).map(compare_speed));
    goals.extend(compare_share(report));
    goals.push(compare_digests(report));
    goals.push(compare_counts(report));
    goals.extend(compare_slow_link(report));
    goals.push(count_comparisons(report));
    goals
}

/// Describes the speeds of boxes, such as `1 : 2`.
pub(super) fn format_speeds(speeds: &[f64]) -> String {
    speeds.iter().map(ToString::to_string).collect::<Vec<_>>().join(" : ")
}

/// Describes a share in percent, with its sign.
pub(super) fn format_change(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

/// Describes the mean change of the likelihood with its standard error.
pub(super) fn format_estimate(case: &CaseResult) -> String {
    let estimate = case.mean_change();
    format!("{:+.1} ± {:.1} %", 100.0 * estimate.mean, 100.0 * estimate.stderr)
}

fn compare_likelihood(case: &CaseResult) -> GoalResult {
    let CaseResult { speeds, every, steps, .. } = case;
    GoalResult {
        subject: format!(
            "Held-out negative log-likelihood of {} equal boxes against one, {steps} steps, \
             `every: {every}`",
            speeds.len()
        ),
        goal: format!("within {:.0} %", 100.0 * CHANGE_MAX),
        result: format_estimate(case),
        is_met: case.mean_change().mean <= CHANGE_MAX,
    }
}

fn compare_speed(case: &CaseResult) -> GoalResult {
    let CaseResult { speeds, every, steps, to_equal, to_close, changes, .. } = case;
    let seeds = changes.len();
    let describe = |time: &QualityTime, level: &str| match time.speedup {
        Some(speedup) => {
            format!("{} of {seeds} seeds reach {level}, {speedup:.2} times as fast", time.reached)
        }
        None => format!("none of {seeds} seeds reaches {level}"),
    };
    GoalResult {
        subject: format!(
            "Time to one box's last likelihood, {} equal boxes, {steps} steps, `every: {every}`",
            speeds.len()
        ),
        goal: format!("all seeds, {SPEEDUP_MIN} times as fast"),
        result: format!("{}; {}", describe(to_equal, "it"), describe(to_close, "1 % more")),
        is_met: to_equal.reached == seeds
            && to_equal.speedup.is_some_and(|speedup| speedup >= SPEEDUP_MIN),
    }
}

fn compare_share(report: &AcrossReport) -> Option<GoalResult> {
    let fleet = report.fleets.iter().find(|fleet| fleet.speeds == MIXED[2])?;
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    Some(GoalResult {
        subject: format!("Used share of the sum of the speeds {}", format_speeds(&fleet.speeds)),
        goal: format!("at least {}", percent(SHARE_MIN)),
        result: format!(
            "{}; {} if weights were sent and merged in no time",
            percent(fleet.with_weights),
            percent(fleet.planned)
        ),
        is_met: fleet.with_weights >= SHARE_MIN,
    })
}

fn compare_digests(report: &AcrossReport) -> GoalResult {
    let replays = || report.seeds.iter().map(|seed| &seed.replay);
    let cut_off: usize = replays().map(|replay| replay.cut_off).sum();
    let alike = replays().filter(|replay| replay.digest == replay.replayed).count();
    let seeds = report.seeds.len();
    GoalResult {
        subject: "Digest of the replay on one box, after slices were cut off".to_owned(),
        goal: format!("equal on every seed, after {DEATHS_MIN}"),
        result: format!("equal on {alike} of {seeds} seeds, after {cut_off}"),
        is_met: alike == seeds && cut_off >= DEATHS_MIN,
    }
}

fn compare_counts(report: &AcrossReport) -> GoalResult {
    let counts = report.steps;
    let examples = |steps: usize| steps * BATCH_SIZE;
    GoalResult {
        subject: format!(
            "Examples lost, and counted twice, if one of four boxes dies in each outer step \
             ({} deaths)",
            counts.deaths
        ),
        goal: "0, 0".to_owned(),
        result: format!("{}, {}", examples(counts.lost), examples(counts.doubled)),
        is_met: (counts.lost, counts.doubled, counts.contradictions) == (0, 0, 0)
            && counts.deaths >= DEATHS_MIN,
    }
}

/// Returns a goal for each interval: bytes, speed and likelihood have to be met at once.
fn compare_slow_link(report: &AcrossReport) -> Vec<GoalResult> {
    let sent_mb = report.adapter.change_bytes as f64 / 1e6;
    let name = SharingMethod::HUNDREDTH_SENT.name;
    let of_interval = |slow: &SlowShare| {
        let case = report.compared.iter().find(|it| it.merge == name && it.every == slow.every)?;
        let share = slow.with_changes;
        Some(GoalResult {
            subject: format!(
                "Four boxes with 20 Mb/s, 100 ms and 2 % loss, `send_share: 0.01`, `every: {}`: sent \
                 a slice, used share of the speed, likelihood against one box",
                slow.every
            ),
            goal: format!(
                "at most {SENT_MB_MAX:.0} MB; at least {:.0} %; within {:.1} %",
                100.0 * SLOW_SHARE_MIN,
                100.0 * SLOW_CHANGE_MAX
            ),
            result: format!("{sent_mb:.2} MB; {:.0} %; {}", 100.0 * share, format_estimate(case)),
            is_met: sent_mb <= SENT_MB_MAX
                && share >= SLOW_SHARE_MIN
                && case.mean_change().mean <= SLOW_CHANGE_MAX,
        })
    };
    report.slow.iter().filter_map(of_interval).collect()
}

/// Returns the goal that methods are compared on mixed boxes.
fn count_comparisons(report: &AcrossReport) -> GoalResult {
    let compared = report.compared.iter().filter(|it| it.case.is_mixed() && !it.changes.is_empty());
    let (count, all) = (compared.count(), MIXED.len() * SharingMethod::MERGES.len());
    GoalResult {
        subject: "Wall time to quality of each method on two to four mixed boxes".to_owned(),
        goal: format!("a table of {all} trainings"),
        result: format!("{count}, below"),
        is_met: count == all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time_of(reached: usize, speedup: Option<f64>) -> QualityTime {
        QualityTime { reached, median_s: speedup.map(f64::recip), speedup }
    }

    fn case_of(to_equal: QualityTime, to_close: QualityTime, changes: &[f64]) -> CaseResult {
        let case = GOAL_CASES[1];
        CaseResult {
            case,
            speeds: case.speeds,
            every: case.every,
            merge: case.method.name,
            steps: case.steps,
            changes: changes.to_vec(),
            drift: 0.0,
            sent_bytes: 0.0,
            end_s: 1.0,
            end_speedup: 1.0,
            to_equal,
            to_close,
            best_change: 0.0,
            best_s: 1.0,
        }
    }

    #[test]
    fn a_likelihood_has_to_be_reached_on_all_seeds_and_fast_enough() {
        let never = time_of(0, None);
        let goal = compare_speed(&case_of(never, time_of(2, Some(3.5)), &[0.01, 0.02]));
        let expected =
            "none of 2 seeds reaches it; 2 of 2 seeds reach 1 % more, 3.50 times as fast";
        assert_eq!((goal.result.as_str(), goal.is_met), (expected, false));
        let is_met = |reached, speedup| {
            let case = case_of(time_of(reached, Some(speedup)), time_of(2, Some(4.0)), &[0.0, 0.0]);
            compare_speed(&case).is_met
        };
        assert_eq!(
            [(2, 3.3), (2, 3.1), (1, 3.3)].map(|(n, it)| is_met(n, it)),
            [true, false, false]
        );
    }

    #[test]
    fn the_mean_change_of_the_likelihood_has_to_be_small() {
        let goal = |changes: &[f64]| {
            compare_likelihood(&case_of(time_of(0, None), time_of(0, None), changes))
        };
        let close = goal(&[0.0, 0.016]);
        assert_eq!((close.result.as_str(), close.is_met), ("+0.8 ± 0.8 %", true));
        assert!(close.subject.contains("4 equal boxes"), "{close:?}");
        assert!(!goal(&[0.0, 0.024]).is_met);
    }
}
