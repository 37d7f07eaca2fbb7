//! Throughput of generation, and the decision of a slow agent to leave orders to faster ones: the
//! samples it starts last would delay the whole cycle.

use std::time::Duration;

use wire::v1;

/// The generation throughput of an agent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingThroughput {
    /// Generated tokens per second; 0 if not yet known.
    pub tokens_per_s: f64,
    /// Mean number of tokens of a sample.
    pub tokens_per_sample: f64,
    /// Number of samples generated at the same time.
    pub slots: u32,
}

impl SamplingThroughput {
    /// Returns the seconds per sample while all slots are in use; 0 if not yet known.
    pub fn sample_s(&self) -> f64 {
        let seconds = f64::from(self.slots) * self.tokens_per_sample / self.tokens_per_s;
        if seconds.is_finite() { seconds } else { 0.0 }
    }
}

/// Share of the fastest agent's speed from which an agent counts as equally fast.
const COMPARABLE_SPEED: f64 = 0.75;

/// Number of deliveries after which an order is no longer left to others: any agent that receives
/// it must do it.
const YIELDS_MAX: u64 = 5;

/// Minimum pause after leaving an order to others: time for another agent to pull it. The agent may
/// be needed for the next cycle right after it.
const YIELD_PAUSE_MIN: Duration = Duration::from_millis(250);

/// Maximum pause after leaving an order to others.
const YIELD_PAUSE_MAX: Duration = Duration::from_secs(120);

/// Decides whether the agent leaves an order to faster agents, and returns the pause until it takes
/// jobs again: the time in which the fleet claims all samples planned behind this order. `None` if
/// it takes the order.
///
/// The agent yields if `sample_s * (0.75 - own speed / fastest speed)`, the extra time that its
/// samples take compared with the fastest agent's, exceeds the time that the fleet needs for the
/// backlog. It never yields if its speed is unknown or if the order was already delivered more than
/// 5 times.
pub fn yield_to_faster(
    order: &v1::GenerateOrder,
    delivered: u64,
    pace: SamplingThroughput,
) -> Option<Duration> {
    let behind = order.behind?;
    let SamplingThroughput { tokens_per_s, tokens_per_sample: tokens_a_sample, .. } = pace;
    let late_s = pace.sample_s() * (COMPARABLE_SPEED - tokens_per_s / behind.fastest_tokens_per_s);
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let behind_s = behind.samples as f64 * tokens_a_sample / behind.tokens_per_s;
    // The speed of an agent is unknown until it has drawn samples.
    let known = tokens_per_s > 0.0 && late_s.is_finite() && behind_s.is_finite();
    if !known || delivered > YIELDS_MAX || late_s <= behind_s {
        return None;
    }
    Some(
        Duration::try_from_secs_f64(behind_s)
            .unwrap_or(YIELD_PAUSE_MAX)
            .clamp(YIELD_PAUSE_MIN, YIELD_PAUSE_MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(samples: u64) -> v1::GenerateOrder {
        let behind = v1::generate_order::Behind {
            samples,
            tokens_per_s: 1000.0,
            fastest_tokens_per_s: 800.0,
        };
        v1::GenerateOrder { behind: Some(behind), ..Default::default() }
    }

    fn pace(tokens_per_s: f64) -> SamplingThroughput {
        SamplingThroughput { tokens_per_s, tokens_per_sample: 50.0, slots: 32 }
    }

    #[test]
    fn a_slow_box_leaves_what_it_would_end_after_all_others() {
        // It takes 16 s a sample; so much is there for 25 s at first, then for 5.
        assert_eq!(yield_to_faster(&order(500), 1, pace(100.0)), None);
        assert_eq!(yield_to_faster(&order(100), 1, pace(100.0)), Some(Duration::from_secs(5)));
        assert_eq!(yield_to_faster(&order(0), 1, pace(100.0)), Some(YIELD_PAUSE_MIN));
    }

    #[test]
    fn boxes_that_are_as_fast_and_those_that_do_not_know_take_it() {
        assert_eq!(yield_to_faster(&order(0), 1, pace(800.0)), None);
        assert_eq!(yield_to_faster(&order(0), 1, pace(650.0)), None);
        assert_eq!(yield_to_faster(&order(0), 1, pace(0.0)), None);
        assert_eq!(yield_to_faster(&v1::GenerateOrder::default(), 1, pace(100.0)), None);
    }

    #[test]
    fn what_everybody_leaves_is_taken_in_the_end() {
        assert!(yield_to_faster(&order(0), 5, pace(100.0)).is_some());
        assert_eq!(yield_to_faster(&order(0), 6, pace(100.0)), None);
    }
}
