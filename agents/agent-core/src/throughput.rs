//! Throughput of generation, and the decision of a slow agent to leave orders to faster ones: the
//! samples that it starts last would delay the whole cycle.

use std::time::Duration;

use wire::v1;

/// The speed at which an agent generates samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingThroughput {
    /// 0 if not yet known.
    pub tokens_per_s: f64,
    /// Mean number of tokens of a sample.
    pub tokens_per_sample: f64,
    /// Number of samples generated at the same time.
    pub slots: u32,
}

impl SamplingThroughput {
    /// Returns the seconds that one sample takes while all slots are in use; 0 if not yet known.
    pub fn sample_s(&self) -> f64 {
        let seconds = f64::from(self.slots) * self.tokens_per_sample / self.tokens_per_s;
        if seconds.is_finite() { seconds } else { 0.0 }
    }
}

/// Share of the fastest agent's speed from which an agent counts as equally fast.
const COMPARABLE_SPEED: f64 = 0.75;

/// Deliveries after which an order is not left to others: no other agent takes it.
const YIELDS_MAX: u64 = 5;

/// Minimum pause after an order is left to others: time for another agent to pull it. This agent
/// may be needed for the next cycle right after it.
const YIELD_PAUSE_MIN: Duration = Duration::from_millis(250);

const YIELD_PAUSE_MAX: Duration = Duration::from_secs(120);

/// Decides whether an agent leaves an order to faster agents. Returns the pause until it takes jobs
/// again, 0.25 s to 120 s: the time in which the fleet starts all samples planned after this order.
/// `None` if it takes the order. `delivered` is the number of deliveries including this one.
///
/// The agent leaves it if `sample_s * (0.75 - own speed / fastest speed)`, the extra time of its
/// samples compared with the fastest agent's, exceeds the time that the fleet needs for the
/// backlog. It takes it if its speed or the backlog is unknown, or the order was delivered more
/// than 5 times.
pub fn yield_to_faster(
    order: &v1::GenerateOrder,
    delivered: u64,
    own: SamplingThroughput,
) -> Option<Duration> {
    let backlog = order.behind?;
    let SamplingThroughput { tokens_per_s, tokens_per_sample, .. } = own;
    let late_s = own.sample_s() * (COMPARABLE_SPEED - tokens_per_s / backlog.fastest_tokens_per_s);
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let backlog_s = backlog.samples as f64 * tokens_per_sample / backlog.tokens_per_s;
    // Unknown speeds are 0. Then `late_s` is not positive or not a number, or the backlog is infinite
    // or not a number, and the comparison is false.
    (delivered <= YIELDS_MAX && late_s > backlog_s).then(|| {
        Duration::try_from_secs_f64(backlog_s)
            .unwrap_or(YIELD_PAUSE_MAX)
            .clamp(YIELD_PAUSE_MIN, YIELD_PAUSE_MAX)
    })
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

    fn own(tokens_per_s: f64) -> SamplingThroughput {
        SamplingThroughput { tokens_per_s, tokens_per_sample: 50.0, slots: 32 }
    }

    #[test]
    fn a_slow_agent_leaves_orders_that_it_would_finish_last() {
        // It needs 16 s a sample; the backlog is 25 s at first, then 12 s.
        assert_eq!(yield_to_faster(&order(500), 1, own(100.0)), None);
        assert_eq!(yield_to_faster(&order(100), 1, own(100.0)), Some(Duration::from_secs(5)));
        assert_eq!(yield_to_faster(&order(0), 1, own(100.0)), Some(YIELD_PAUSE_MIN));
        assert_eq!([own(100.0).sample_s(), own(0.0).sample_s()], [16.0, 0.0]);
    }

    #[test]
    fn boxes_that_are_as_fast_and_those_that_do_not_know_take_it() {
        assert_eq!(yield_to_faster(&order(0), 1, own(800.0)), None);
        assert_eq!(yield_to_faster(&order(0), 1, own(650.0)), None);
        assert_eq!(yield_to_faster(&order(0), 1, own(0.0)), None);
        assert_eq!(yield_to_faster(&v1::GenerateOrder::default(), 1, own(100.0)), None);
        for samples in [0, 9] {
            let behind = Some(v1::generate_order::Behind { samples, ..Default::default() });
            let order = v1::GenerateOrder { behind, ..Default::default() };
            assert_eq!(yield_to_faster(&order, 1, own(100.0)), None);
        }
    }

    #[test]
    fn an_order_that_all_agents_leave_is_taken_in_the_end() {
        assert!(yield_to_faster(&order(0), 5, own(100.0)).is_some());
        assert_eq!(yield_to_faster(&order(0), 6, own(100.0)), None);
    }
}
