//! The estimated end of a run as text.

use wire::v1::board::Eta;

use crate::RunView;

impl RunView {
    /// Returns the estimated end of the run, or else of its phase, as of the last fact: `, run ends
    /// in 30 min (20 min to 42 min)`. Empty without an estimate.
    pub fn end_text(&self) -> String {
        let head = self.run_head();
        let (what, eta) = match (head.run_ends, head.phase_ends) {
            (Some(eta), _) => ("run", eta),
            (None, Some(eta)) => ("phase", eta),
            (None, None) => return String::new(),
        };
        format!(", {what} ends in {}", range_text(&eta, head.at_s))
    }
}

/// Returns the time that is left, with its range unless both ends read the same.
fn range_text(eta: &Eta, at_s: f64) -> String {
    let left = |end: f64| duration_text(end - at_s);
    let (early, likely, late) = (left(eta.early_s), left(eta.likely_s), left(eta.late_s));
    if early == late { likely } else { format!("{likely} ({early} to {late})") }
}

/// Formats a duration in seconds, minutes or hours, by its size.
pub(crate) fn duration_text(seconds: f64) -> String {
    let minutes = seconds / 60.0;
    match seconds {
        ..100.0 => format!("{:.0} s", seconds.max(0.0)),
        ..6000.0 => format!("{minutes:.0} min"),
        _ => format!("{:.1} h", minutes / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_a_range_unless_both_of_its_ends_read_the_same() {
        let eta = |early_s, likely_s, late_s| Eta { early_s, likely_s, late_s };
        assert_eq!(range_text(&eta(1210.0, 1810.0, 2530.0), 10.0), "30 min (20 min to 42 min)");
        assert_eq!(range_text(&eta(305.0, 310.0, 315.0), 10.0), "5 min");
    }

    #[test]
    fn a_duration_is_said_as_exactly_as_it_is_worth() {
        let said = [-3.0, 42.4, 1800.0, 100_000.0].map(duration_text);
        assert_eq!(said, ["0 s", "42 s", "30 min", "27.8 h"]);
    }
}
