//! Printing: data on stdout, everything else on stderr.

use std::io::{IsTerminal, Write};

use comfy_table::{CellAlignment, ColumnConstraint, LineStyle, Table, TableStyle};
use serde::Serialize;
use wire::ErrorCode;

/// A line for people.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// What went wrong, and why, one cause a line. Some libraries' errors repeat their cause's words.
/// The last line says where there is more about it.
pub(crate) fn complain(error: &anyhow::Error) {
    let mut said = format!("error: {error}");
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push_str(&format!("\n  because: {cause}"));
        }
    }
    let code = ErrorCode::of(error.as_ref()).unwrap_or(ErrorCode::OTHER);
    say(&format!("{said}\n  more: flotilla topics {code}"));
}

/// A line of data. A reader that has gone (`| head -1`) wants no more.
pub(crate) fn print(line: &str) {
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(0);
    }
}

/// One JSON document on one line.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string(value)?);
    Ok(())
}

/// A line under the headings and nothing else.
const RULED: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Columns whose heading starts with `>` are aligned to the right; one with `?` is left out where
/// it holds nothing but `-`.
pub(crate) fn table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<[String; N]> = rows.into_iter().collect();
    let mut table = Table::new();
    table.load_style(RULED);
    table.set_header(headings.map(|heading| heading.trim_start_matches(['>', '?'])));
    for row in &rows {
        table.add_row(row);
    }
    for (n, (heading, column)) in headings.iter().zip(table.column_iter_mut()).enumerate() {
        if heading.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if heading.contains('?') && rows.iter().all(|row| row[n] == "-") {
            column.set_constraint(ColumnConstraint::Hidden);
        }
    }
    table.trim_fmt()
}

/// Whether a person looks at stderr.
pub(crate) fn on_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// `1.5 GiB`
pub(crate) fn bytes(count: u64) -> String {
    indicatif::HumanBytes(count).to_string()
}

/// `2026-11-20 14:03:05Z`
pub(crate) fn time(at: Option<&wire::Timestamp>) -> String {
    let Some(at) = at else { return "-".into() };
    let (days, seconds) = (at.seconds.div_euclid(86_400), at.seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

/// The Gregorian date of a day counted from 1970 (Howard Hinnant, `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_utc() {
        let at = |seconds| time(Some(&wire::Timestamp { seconds, nanos: 0 }));
        assert_eq!(at(0), "1970-01-01 00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29 00:00:00Z");
        assert_eq!(at(1_795_176_000), "2026-11-20 12:00:00Z");
    }
}
