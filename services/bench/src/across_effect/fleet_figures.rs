//! Figures of fleets in virtual time: how much of their speed is used, and how often steps count.

use serde::Serialize;
use wire::v1::across::Method;

use super::virtual_fleet::VirtualTraining;

/// Steps of the trainings.
const STEPS: u32 = 2000;
const EVERY: u32 = 20;

/// Steps between two merges over a slow link.
pub(super) const SLOW_INTERVALS: [u32; 3] = [EVERY, 50, 100];

/// Steps a second of the fastest box: a 7B model on a Strix Halo.
pub(super) const BOX_SPEED: f64 = 1.0 / 2.65;

/// A local network.
pub(super) const LOCAL_LINK: TcpLink = TcpLink { bits_s: 1e9, round_trip_s: 0.0005, loss: 0.0 };

/// Bad Wi-Fi, or an upload from home.
const SLOW_LINK: TcpLink = TcpLink { bits_s: 20e6, round_trip_s: 0.1, loss: 0.02 };

/// A link in TCP's steady state.
#[derive(Debug, Clone, Copy)]
pub(super) struct TcpLink {
    pub bits_s: f64,
    pub round_trip_s: f64,
    /// The share of packets that is lost.
    pub loss: f64,
}

/// The files of an adapter that boxes send, and the time in which one merges them.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentFiles {
    pub weight_bytes: f64,
    pub change_bytes: f64,
    pub merge_s: f64,
}

/// The share of the sum of speeds that boxes use.
#[derive(Debug, Clone, Serialize)]
pub(super) struct FleetShare {
    /// Relative to each other.
    pub speeds: Vec<f64>,
    /// If weights are sent and merged in no time.
    pub planned: f64,
    /// On a local network.
    pub with_weights: f64,
}

/// The share of the sum of speeds that four equal boxes behind a slow link use.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct SlowShare {
    pub every: u32,
    /// If boxes send their weights.
    pub with_weights: f64,
    /// If they send changes.
    pub with_changes: f64,
}

/// Counts of the steps of a training in which boxes die.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct StepCounts {
    pub steps: u32,
    pub deaths: usize,
    /// Steps that do not count.
    pub lost: usize,
    /// Steps that count more than once.
    pub doubled: usize,
    /// Facts that contradict others.
    pub contradictions: usize,
}

/// Connections over which a large file is transferred.
const PARTS: f64 = 8.0;

const SEGMENT_BYTES: f64 = 1460.0;

impl TcpLink {
    /// Returns the seconds in which each box sends its weights and fetches the merged ones.
    pub(super) fn exchange_weights_s(self, bytes: f64) -> f64 {
        2.0 * self.transfer_s(bytes, PARTS)
    }

    /// Returns the seconds in which each box sends its change and fetches those of the others at
    /// once.
    fn exchange_changes_s(self, bytes: f64, boxes: usize) -> f64 {
        let others = boxes.saturating_sub(1) as f64;
        self.transfer_s(bytes, 1.0) + self.transfer_s(others * bytes, others)
    }

    /// Returns the seconds of a transfer over several connections. Each is as fast as losses allow
    /// (Mathis et al. 1997, doi:10.1145/263932.264023).
    fn transfer_s(self, bytes: f64, connections: f64) -> f64 {
        let connection = 8.0 * SEGMENT_BYTES / self.round_trip_s * (1.5 / self.loss).sqrt();
        self.round_trip_s + 8.0 * bytes / (connections * connection).min(self.bits_s)
    }
}

/// Returns the steps a second of boxes with these relative speeds.
pub(super) fn scale_speeds(relative: &[f64]) -> Vec<f64> {
    let fastest = relative.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    relative.iter().map(|speed| speed / fastest * BOX_SPEED).collect()
}

/// Measures fleets of equal and of mixed boxes.
pub(super) fn measure_fleets(files: SentFiles) -> anyhow::Result<Vec<FleetShare>> {
    let fleets: [&[f64]; 3] = [&[1.0; 4], &[1.0, 2.0, 4.0], &[1.0, 2.0, 4.0, 8.0]];
    let exchange_s = LOCAL_LINK.exchange_weights_s(files.weight_bytes) + files.merge_s;
    let measure = |speeds: &[f64]| -> anyhow::Result<FleetShare> {
        Ok(FleetShare {
            speeds: speeds.to_vec(),
            planned: use_of_speeds(speeds, EVERY, 0.0)?,
            with_weights: use_of_speeds(speeds, EVERY, exchange_s)?,
        })
    };
    fleets.into_iter().map(measure).collect()
}

/// Measures four equal boxes behind the slow link.
pub(super) fn measure_slow_fleets(files: SentFiles) -> anyhow::Result<Vec<SlowShare>> {
    let speeds = [1.0; 4];
    let weights_s = SLOW_LINK.exchange_weights_s(files.weight_bytes) + files.merge_s;
    let changes_s = SLOW_LINK.exchange_changes_s(files.change_bytes, speeds.len()) + files.merge_s;
    let measure = |every| -> anyhow::Result<SlowShare> {
        Ok(SlowShare {
            every,
            with_weights: use_of_speeds(&speeds, every, weights_s)?,
            with_changes: use_of_speeds(&speeds, every, changes_s)?,
        })
    };
    SLOW_INTERVALS.into_iter().map(measure).collect()
}

/// Counts the steps of mixed boxes of which one dies in each outer step.
pub(super) fn count_steps() -> anyhow::Result<StepCounts> {
    let training = VirtualTraining { deaths: Some(1), ..mean_training(&[1.0, 2.0, 4.0, 8.0], 5) };
    let steps = training.steps;
    let schedule = training.split_steps()?;
    let mut counts = vec![0usize; steps as usize];
    for slice in schedule.outer_steps.iter().flat_map(|step| &step.slices) {
        let range = slice.first as usize..(slice.first + slice.steps) as usize;
        counts.get_mut(range).into_iter().flatten().for_each(|count| *count += 1);
    }
    Ok(StepCounts {
        steps,
        deaths: schedule.cut_off_count(),
        lost: counts.iter().filter(|count| **count == 0).count(),
        doubled: counts.iter().filter(|count| **count > 1).count(),
        contradictions: schedule.contradictions,
    })
}

fn mean_training(speeds: &[f64], every: u32) -> VirtualTraining {
    VirtualTraining {
        speeds: scale_speeds(speeds),
        steps: STEPS,
        every,
        method: Method::Step,
        exchange_s: 0.0,
        deaths: None,
    }
}

/// Returns the share of the sum of the speeds that a training uses.
fn use_of_speeds(speeds: &[f64], every: u32, exchange_s: f64) -> anyhow::Result<f64> {
    let training = VirtualTraining { exchange_s, ..mean_training(speeds, every) };
    let sum: f64 = training.speeds.iter().sum();
    Ok(f64::from(STEPS) / sum / training.split_steps()?.end_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: SentFiles = SentFiles { weight_bytes: 160e6, change_bytes: 0.5e6, merge_s: 1.0 };

    #[test]
    fn boxes_of_different_speeds_are_busy() {
        for share in measure_fleets(FILES).unwrap() {
            assert!((0.9..1.001).contains(&share.planned), "{share:?}");
            assert!((0.85..share.planned).contains(&share.with_weights), "{share:?}");
        }
    }

    #[test]
    fn over_a_slow_link_changes_leave_boxes_time_to_train() {
        // 1460 bytes a round trip of .1 s, times 8.66: a megabit a second.
        assert!((SLOW_LINK.transfer_s(1e6, 1.0) - 8.0).abs() < 0.2);
        assert!((LOCAL_LINK.transfer_s(125e6, 1.0) - 1.0).abs() < 0.01, "as fast as the link");
        for share in measure_slow_fleets(FILES).unwrap() {
            assert!(share.with_weights < 0.5 && share.with_changes > 0.8, "{share:?}");
        }
    }

    #[test]
    fn no_step_is_lost_or_counts_twice_if_boxes_die() {
        let StepCounts { deaths, lost, doubled, contradictions, .. } = count_steps().unwrap();
        assert!(deaths >= 100, "{deaths}");
        assert_eq!((lost, doubled, contradictions), (0, 0, 0));
    }
}
