//! Times by which a run is to end, as users write them.

use jiff::{SignedDuration, Zoned, civil};
use wire::Timestamp;

use super::ForecastError;

/// Reads a time of day (the next one), a date and time of this machine's zone or of its own, or a
/// duration from now, such as `8h` or `1h 30m`.
///
/// # Errors
/// When the text is none of these, or the time is out of range.
pub fn parse_end_time(text: &str) -> Result<Timestamp, ForecastError> {
    parse_time_after(text, &Zoned::now())
}

fn parse_time_after(text: &str, now: &Zoned) -> Result<Timestamp, ForecastError> {
    let invalid = || ForecastError::Time(text.to_owned());
    let text = text.trim();
    let at = if let Ok(instant) = text.parse::<jiff::Timestamp>() {
        instant
    } else if let (Ok(time), false) = (text.parse::<civil::DateTime>(), text.len() < 10) {
        time.to_zoned(now.time_zone().clone()).map_err(|_| invalid())?.timestamp()
    } else if let Ok(time) = text.parse::<civil::Time>() {
        next_time_of_day(time, now).map_err(|_| invalid())?
    } else {
        let duration: SignedDuration =
            text.trim_start_matches('+').parse().map_err(|_| invalid())?;
        now.timestamp().checked_add(duration).map_err(|_| invalid())?
    };
    Ok(Timestamp { seconds: at.as_second(), nanos: 0 })
}

fn next_time_of_day(time: civil::Time, now: &Zoned) -> Result<jiff::Timestamp, jiff::Error> {
    let on = |date: civil::Date| date.to_datetime(time).to_zoned(now.time_zone().clone());
    let today = on(now.date())?;
    let next = if today > *now { today } else { on(now.date().tomorrow()?)? };
    Ok(next.timestamp())
}

pub(super) fn format_end_time(at: &Timestamp) -> String {
    jiff::Timestamp::from_second(at.seconds).unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_dates_and_durations_are_read() {
        let zone = jiff::tz::TimeZone::fixed(jiff::tz::offset(2));
        let now = civil::date(2026, 12, 1).at(17, 0, 0, 0).to_zoned(zone).unwrap();
        let base = now.timestamp().as_second();
        for (text, hours) in [
            ("18:00", 1),
            ("16:00", 23),
            ("2026-12-01T18:00", 1),
            ("2026-12-02 17:00", 24),
            ("2026-12-01T18:00:00Z", 3),
            ("8h", 8),
            ("+90m", 1),
        ] {
            let seconds = parse_time_after(text, &now).unwrap().seconds - base;
            assert_eq!(seconds / 3600, hours, "{text}");
        }
        for text in ["", "soon", "25:00", "2026-13-01T00:00", "8"] {
            let error = parse_time_after(text, &now).unwrap_err().to_string();
            assert!(error.contains("is not a time"), "{text}: {error}");
        }
    }
}
