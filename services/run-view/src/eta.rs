//! Estimates when a phase or a run will end, with a 90 % range, from past progress only. Times are
//! seconds of a clock that stops while the run is paused.

use wire::v1::board::Eta;

/// Half width of the 90 % range of a normal distribution, in standard deviations.
const RANGE_DEVIATIONS: f64 = 1.645;
/// Cycles from which the next are estimated: prompts get longer, and hosts come and go.
const RECENT_CYCLES: usize = 8;
/// Deviation of cycle durations if only one was measured, as a fraction of it.
const ASSUMED_DEVIATION: f64 = 0.3;
/// Fewer results give no estimate of a rate.
const RESULTS_MIN: u32 = 3;
/// A smaller completed share gives no estimate of a rate.
const SHARE_MIN: f64 = 0.02;

/// Estimates from the ends of the run's cycles and the number of cycles left. The first end only
/// marks the start of the second cycle. Returns `None` before two ends are known or if no cycle is
/// left.
pub(crate) fn estimate_run_end(ends: &[f64], left: u32, now: f64) -> Option<Eta> {
    let last = *ends.last()?;
    let ends = &ends[ends.len().saturating_sub(RECENT_CYCLES + 1)..];
    let took: Vec<f64> = ends.windows(2).map(|two| two[1] - two[0]).collect();
    if took.is_empty() || left == 0 {
        return None;
    }
    let (n, left) = (took.len() as f64, f64::from(left));
    let mean = took.iter().sum::<f64>() / n;
    let deviation = match took.len() {
        1 => mean * ASSUMED_DEVIATION,
        _ => (took.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt(),
    };
    // Standard deviation of a sum of `left` durations, plus that of the estimated mean.
    let spread = RANGE_DEVIATIONS * deviation * (left + left * left / n).sqrt();
    Some(build_eta(now, last + left * mean, spread))
}

/// Estimates from the completed share of the phase, which `results` results brought. Returns `None`
/// with fewer than 3 results, less than 2 %, or a completed phase.
pub(crate) fn estimate_phase_end(began: f64, now: f64, share: f64, results: u32) -> Option<Eta> {
    if results < RESULTS_MIN || !(SHARE_MIN..1.0).contains(&share) || now <= began {
        return None;
    }
    let left = (now - began) / share * (1.0 - share);
    // The number of results is Poisson distributed: its standard deviation is its square root.
    let spread = left * RANGE_DEVIATIONS / f64::from(results).sqrt();
    Some(build_eta(now, now + left, spread))
}

/// Spreads symmetrically, but does not begin before `now`.
fn build_eta(now: f64, likely: f64, spread: f64) -> Eta {
    let likely_s = likely.max(now);
    Eta { early_s: (likely - spread).max(now), likely_s, late_s: likely_s + spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_cycles_make_a_sure_end_and_uneven_ones_a_wide_range() {
        let even = estimate_run_end(&[10.0, 110.0, 210.0, 310.0], 2, 320.0).unwrap();
        assert_eq!(even, Eta { early_s: 510.0, likely_s: 510.0, late_s: 510.0 });
        let uneven = estimate_run_end(&[10.0, 60.0, 210.0, 310.0], 2, 320.0).unwrap();
        assert_eq!(uneven.likely_s, 510.0);
        // 50 of deviation, of two more by three seen: 1.645 × 50 × √(2 + 4/3).
        assert!((uneven.late_s - 660.2).abs() < 0.1, "{uneven:?}");
        assert!((uneven.early_s - 359.8).abs() < 0.1, "{uneven:?}");
    }

    #[test]
    fn nothing_is_said_that_nothing_tells() {
        assert_eq!(estimate_run_end(&[], 3, 5.0), None);
        assert_eq!(estimate_run_end(&[10.0], 3, 50.0), None, "the base's cycle is like no other");
        assert_eq!(estimate_run_end(&[10.0, 20.0], 0, 50.0), None);
        assert_eq!(estimate_phase_end(0.0, 10.0, 0.5, 2), None, "two results are no rate");
        assert_eq!(estimate_phase_end(0.0, 10.0, 0.0, 50), None);
        assert_eq!(estimate_phase_end(0.0, 10.0, 1.0, 50), None);
        assert_eq!(estimate_phase_end(10.0, 10.0, 0.5, 50), None);
    }

    #[test]
    fn an_end_is_never_in_the_past() {
        let late = estimate_run_end(&[0.0, 10.0, 21.0], 1, 500.0).unwrap();
        assert!(late.early_s >= 500.0 && late.likely_s >= 500.0 && late.late_s > 500.0);
    }

    #[test]
    fn a_phase_goes_on_as_it_went() {
        let eta = estimate_phase_end(100.0, 150.0, 0.25, 25).unwrap();
        assert_eq!(eta.likely_s, 300.0);
        assert!((eta.late_s - 349.35).abs() < 0.01 && (eta.early_s - 250.65).abs() < 0.01);
    }
}
