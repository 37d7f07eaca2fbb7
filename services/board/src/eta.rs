//! When something is likely to be over, and how sure that is: by what was seen, and nothing else.
//! Times are seconds of a clock that stands still while the run is paused.

use wire::v1::board::Eta;

/// The 90 % range of a normal distribution, in standard deviations to each side.
const RANGE: f64 = 1.645;
/// Cycles that tell how long the next ones take: prompts get longer and boxes come and go.
const LAST: usize = 8;
/// What is assumed of a single cycle's duration, as nothing tells how they differ.
const ASSUMED: f64 = 0.3;
/// Results without which a rate is a guess, and the share of the phase they must be.
const RESULTS_MIN: u32 = 3;
const SHARE_MIN: f64 = 0.02;

/// By the ends of the cycles so far, the first of which only says when the second began. `left`:
/// cycles that are not done.
pub(crate) fn of_run(ends: &[f64], left: u32, now: f64) -> Option<Eta> {
    let last = *ends.last()?;
    let ends = &ends[ends.len().saturating_sub(LAST + 1)..];
    let took: Vec<f64> = ends.windows(2).map(|two| two[1] - two[0]).collect();
    if took.is_empty() || left == 0 {
        return None;
    }
    let (n, left) = (took.len() as f64, f64::from(left));
    let mean = took.iter().sum::<f64>() / n;
    let deviation = match took.len() {
        1 => mean * ASSUMED,
        _ => (took.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt(),
    };
    // Of a sum of so many more, whose mean is not known better than by those seen.
    let spread = RANGE * deviation * (left + left * left / n).sqrt();
    Some(around(now, last + left * mean, spread))
}

/// By how much of the phase is done, and in how many results that came.
pub(crate) fn of_phase(began: f64, now: f64, share: f64, results: u32) -> Option<Eta> {
    if results < RESULTS_MIN || !(SHARE_MIN..1.0).contains(&share) || now <= began {
        return None;
    }
    let left = (now - began) / share * (1.0 - share);
    // Results come as they like: their number varies by its root.
    let spread = left * RANGE / f64::from(results).sqrt();
    Some(around(now, now + left, spread))
}

fn around(now: f64, likely: f64, spread: f64) -> Eta {
    let likely_s = likely.max(now);
    Eta { early_s: (likely - spread).max(now), likely_s, late_s: likely_s + spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_cycles_make_a_sure_end_and_uneven_ones_a_wide_range() {
        let even = of_run(&[10.0, 110.0, 210.0, 310.0], 2, 320.0).unwrap();
        assert_eq!(even, Eta { early_s: 510.0, likely_s: 510.0, late_s: 510.0 });
        let uneven = of_run(&[10.0, 60.0, 210.0, 310.0], 2, 320.0).unwrap();
        assert_eq!(uneven.likely_s, 510.0);
        // 50 of deviation, of two more by three seen: 1.645 × 50 × √(2 + 4/3).
        assert!((uneven.late_s - 660.2).abs() < 0.1, "{uneven:?}");
        assert!((uneven.early_s - 359.8).abs() < 0.1, "{uneven:?}");
    }

    #[test]
    fn nothing_is_said_that_nothing_tells() {
        assert_eq!(of_run(&[], 3, 5.0), None);
        assert_eq!(of_run(&[10.0], 3, 50.0), None, "the base's cycle is like no other");
        assert_eq!(of_run(&[10.0, 20.0], 0, 50.0), None);
        assert_eq!(of_phase(0.0, 10.0, 0.5, 2), None, "two results are no rate");
        assert_eq!(of_phase(0.0, 10.0, 0.0, 50), None);
        assert_eq!(of_phase(0.0, 10.0, 1.0, 50), None);
        assert_eq!(of_phase(10.0, 10.0, 0.5, 50), None);
    }

    #[test]
    fn an_end_is_never_in_the_past() {
        let late = of_run(&[0.0, 10.0, 21.0], 1, 500.0).unwrap();
        assert!(late.early_s >= 500.0 && late.likely_s >= 500.0 && late.late_s > 500.0);
    }

    #[test]
    fn a_phase_goes_on_as_it_went() {
        let eta = of_phase(100.0, 150.0, 0.25, 25).unwrap();
        assert_eq!(eta.likely_s, 300.0);
        assert!((eta.late_s - 349.35).abs() < 0.01 && (eta.early_s - 250.65).abs() < 0.01);
    }
}
