//! Throughput of generation, and the decision of a slow agent to decline an order: the samples that
//! it starts last would delay the whole cycle.

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
    pub fn seconds_per_sample(&self) -> f64 {
        let seconds = f64::from(self.slots) * self.tokens_per_sample / self.tokens_per_s;
        if seconds.is_finite() { seconds } else { 0.0 }
    }
}

/// Share of the fastest agent's speed from which an agent counts as equally fast.
const COMPARABLE_SPEED: f64 = 0.75;

/// Deliveries after which no agent declines an order.
const DECLINES_MAX: u64 = 5;

/// Minimum pause after an order is declined: time for another agent to pull it. This agent may be
/// needed for the next cycle right after it.
const DECLINE_PAUSE_MIN: Duration = Duration::from_millis(250);

const DECLINE_PAUSE_MAX: Duration = Duration::from_secs(120);

/// The means to decline an order: the fact to write, and the pause after it.
#[derive(Debug, Clone, PartialEq)]
pub struct OrderDecline {
    /// The fact to write before the order is returned.
    pub fact: v1::Declined,
    /// The pause until the agent takes jobs again, 0.25 s to 120 s.
    pub pause: Duration,
}

/// Decides whether an agent declines an order in favour of the fastest one, because its own samples
/// would end long after all others. Returns `None` if it takes the order.
///
/// It takes the order unless `seconds_per_sample * (0.75 - own speed / fastest speed)`, the extra time of its
/// samples compared with the fastest agent's, exceeds both the time in which the fleet starts all
/// samples planned after this order and the time in which the fastest agent draws those it holds.
/// The pause is the longer of both. It also takes the order if a speed or the backlog is unknown, if
/// it is the fastest itself, or if the order was delivered more than 5 times; `delivered` counts
/// this delivery too.
///
/// The caller still has to find out whether any other agent holds an order of the queue, and whether
/// it declined this order before: an agent declines an order at most once.
pub fn decide_decline(
    order: &v1::GenerateOrder,
    delivered: u64,
    agent: &str,
    own: SamplingThroughput,
) -> Option<OrderDecline> {
    let backlog = order.behind.as_ref()?;
    let SamplingThroughput { tokens_per_s, tokens_per_sample, .. } = own;
    let late_s =
        own.seconds_per_sample() * (COMPARABLE_SPEED - tokens_per_s / backlog.fastest_tokens_per_s);
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let backlog_s = backlog.samples as f64 * tokens_per_sample / backlog.tokens_per_s;
    let busy_s =
        f64::from(backlog.fastest_samples) * tokens_per_sample / backlog.fastest_tokens_per_s;
    // Unknown speeds are 0. Then `late_s` is not positive or not a number, or a duration is infinite
    // or not a number, and a comparison is false.
    let declines = delivered <= DECLINES_MAX
        && backlog.fastest != agent
        && late_s > backlog_s
        && late_s > busy_s;
    declines.then(|| OrderDecline {
        fact: v1::Declined {
            run: order.run.clone(),
            cycle: order.cycle,
            job: order.job.clone(),
            attempt: order.attempt,
            agent: agent.to_owned(),
            faster: backlog.fastest.clone(),
        },
        pause: Duration::try_from_secs_f64(backlog_s.max(busy_s))
            .unwrap_or(DECLINE_PAUSE_MAX)
            .clamp(DECLINE_PAUSE_MIN, DECLINE_PAUSE_MAX),
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
            fastest: "fast".into(),
            fastest_samples: 32,
        };
        v1::GenerateOrder { behind: Some(behind), ..Default::default() }
    }

    fn own(tokens_per_s: f64) -> SamplingThroughput {
        SamplingThroughput { tokens_per_s, tokens_per_sample: 50.0, slots: 32 }
    }

    fn pause(order: &v1::GenerateOrder, delivered: u64, tokens_per_s: f64) -> Option<Duration> {
        let declined = decide_decline(order, delivered, "slow", own(tokens_per_s))?;
        assert_eq!((&*declined.fact.agent, &*declined.fact.faster), ("slow", "fast"));
        Some(declined.pause)
    }

    #[test]
    fn a_slow_agent_declines_orders_that_it_would_finish_last() {
        // It needs 16 s a sample; the backlog is 25 s at first, then 5 s.
        assert_eq!(pause(&order(500), 1, 100.0), None);
        assert_eq!(pause(&order(100), 1, 100.0), Some(Duration::from_secs(5)));
        // The fast agent needs 2 s for its 32 samples.
        assert_eq!(pause(&order(0), 1, 100.0), Some(Duration::from_secs(2)));
        let mut idle = order(0);
        idle.behind.as_mut().unwrap().fastest_samples = 0;
        assert_eq!(pause(&idle, 1, 100.0), Some(DECLINE_PAUSE_MIN));
        assert_eq!([own(100.0).seconds_per_sample(), own(0.0).seconds_per_sample()], [16.0, 0.0]);
    }

    #[test]
    fn an_agent_that_is_as_fast_or_does_not_know_takes_it() {
        assert_eq!(pause(&order(0), 1, 800.0), None);
        assert_eq!(pause(&order(0), 1, 650.0), None);
        assert_eq!(pause(&order(0), 1, 0.0), None);
        assert_eq!(pause(&v1::GenerateOrder::default(), 1, 100.0), None);
        for samples in [0, 9] {
            let behind = Some(v1::generate_order::Behind { samples, ..Default::default() });
            let order = v1::GenerateOrder { behind, ..Default::default() };
            assert_eq!(pause(&order, 1, 100.0), None);
        }
    }

    #[test]
    fn nothing_is_left_to_an_agent_that_is_busy_for_longer_or_to_oneself() {
        let mut order = order(0);
        assert_eq!(decide_decline(&order, 1, "fast", own(100.0)), None);
        // The fast agent still needs 12.5 s, and the slow one would end 10 s later than it.
        order.behind.as_mut().unwrap().fastest_samples = 200;
        assert_eq!(pause(&order, 1, 100.0), None);
    }

    #[test]
    fn an_order_that_all_agents_decline_is_taken_in_the_end() {
        assert!(pause(&order(0), 5, 100.0).is_some());
        assert_eq!(pause(&order(0), 6, 100.0), None);
    }
}
