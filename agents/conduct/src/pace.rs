//! When a slow box leaves what is left to faster ones: the samples it began last would keep
//! everybody waiting.

use std::time::Duration;

use wire::v1;

/// How a box draws samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    pub tokens_per_s: f64,
    pub tokens_a_sample: f64,
    /// Samples at once.
    pub slots: u32,
}

impl Pace {
    /// What a sample takes while all slots are full; 0 when not yet known.
    pub fn sample_s(&self) -> f64 {
        let seconds = f64::from(self.slots) * self.tokens_a_sample / self.tokens_per_s;
        if seconds.is_finite() { seconds } else { 0.0 }
    }
}

/// One that is this much of the fastest is as good.
const AS_FAST: f64 = 0.75;

/// Somebody must do it: handed out so often, it is taken by whoever has it.
const LEFT_MAX: u64 = 5;

/// However little is left, so long is nothing taken.
const REST_MIN: Duration = Duration::from_secs(2);

/// However slow the box, it looks again after so long.
const REST_MAX: Duration = Duration::from_secs(120);

/// Whether the box leaves an order to others, and how long it takes nothing then: until all that
/// was planned is in somebody's hands.
pub fn leaves(order: &v1::GenerateOrder, delivered: u64, pace: Pace) -> Option<Duration> {
    let behind = order.behind?;
    let Pace { tokens_per_s, tokens_a_sample, .. } = pace;
    let late_s = pace.sample_s() * (AS_FAST - tokens_per_s / behind.fastest_tokens_per_s);
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let behind_s = behind.samples as f64 * tokens_a_sample / behind.tokens_per_s;
    // Nobody knows how fast a box is that has drawn nothing yet.
    let known = tokens_per_s > 0.0 && late_s.is_finite() && behind_s.is_finite();
    if !known || delivered > LEFT_MAX || late_s <= behind_s {
        return None;
    }
    Some(Duration::try_from_secs_f64(behind_s).unwrap_or(REST_MAX).clamp(REST_MIN, REST_MAX))
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

    fn pace(tokens_per_s: f64) -> Pace {
        Pace { tokens_per_s, tokens_a_sample: 50.0, slots: 32 }
    }

    #[test]
    fn a_slow_box_leaves_what_it_would_end_after_all_others() {
        // It takes 16 s a sample; so much is there for 25 s at first, then for 5.
        assert_eq!(leaves(&order(500), 1, pace(100.0)), None);
        assert_eq!(leaves(&order(100), 1, pace(100.0)), Some(Duration::from_secs(5)));
        assert_eq!(leaves(&order(0), 1, pace(100.0)), Some(REST_MIN));
    }

    #[test]
    fn boxes_that_are_as_fast_and_those_that_do_not_know_take_it() {
        assert_eq!(leaves(&order(0), 1, pace(800.0)), None);
        assert_eq!(leaves(&order(0), 1, pace(650.0)), None);
        assert_eq!(leaves(&order(0), 1, pace(0.0)), None);
        assert_eq!(leaves(&v1::GenerateOrder::default(), 1, pace(100.0)), None);
    }

    #[test]
    fn what_everybody_leaves_is_taken_in_the_end() {
        assert!(leaves(&order(0), 5, pace(100.0)).is_some());
        assert_eq!(leaves(&order(0), 6, pace(100.0)), None);
    }
}
