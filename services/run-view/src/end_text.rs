//! The estimated end of a run as text.

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
        let left = |end: f64| duration_text(end - head.at_s);
        let (early, late) = (left(eta.early_s), left(eta.late_s));
        format!(", {what} ends in {} ({early} to {late})", left(eta.likely_s))
    }
}

/// Formats a duration in seconds, minutes or hours, by its size.
fn duration_text(seconds: f64) -> String {
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
    fn a_duration_is_said_as_exactly_as_it_is_worth() {
        let said = [-3.0, 42.4, 1800.0, 100_000.0].map(duration_text);
        assert_eq!(said, ["0 s", "42 s", "30 min", "27.8 h"]);
    }
}
