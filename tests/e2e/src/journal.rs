//! What the processes of a fleet wrote in their logs: which job began where and when, and
//! who led.

use std::{collections::BTreeMap, path::Path};

/// A job handed to an agent.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Seconds since 1970.
    pub at_s: f64,
    pub agent: String,
    pub subject: String,
}

/// A coordinator that began or ceased to lead.
#[derive(Debug, Clone)]
pub struct Lead {
    pub at_s: f64,
    pub coordinator: String,
    pub leads: bool,
}

/// Every job that began at an agent below `directory`, in order.
pub fn begins(directory: &Path) -> Vec<Begin> {
    let mut begins = Vec::new();
    for entry in std::fs::read_dir(directory.join("agents")).into_iter().flatten().flatten() {
        let agent = entry.file_name().to_string_lossy().into_owned();
        for (at_s, line) in lines(&entry.path().join("agent.log")) {
            let subject = line.split(" job begins subject=").nth(1);
            if let Some(subject) = subject.and_then(|rest| rest.split_whitespace().next()) {
                begins.push(Begin { at_s, agent: agent.clone(), subject: subject.to_owned() });
            }
        }
    }
    begins.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    begins
}

/// Every change of leadership that the logs of these coordinators tell, in order.
pub fn leads(logs: &BTreeMap<String, std::path::PathBuf>) -> Vec<Lead> {
    let mut leads = Vec::new();
    for (coordinator, log) in logs {
        for (at_s, line) in lines(log) {
            if let Some((_, told)) = line.split_once(" leadership leads=") {
                let leads_now = told.starts_with("true");
                leads.push(Lead { at_s, coordinator: coordinator.clone(), leads: leads_now });
            }
        }
    }
    leads.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    leads
}

fn lines(log: &Path) -> Vec<(f64, String)> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter_map(|line| Some((time_s(line)?, line.to_owned()))).collect()
}

/// The time a line begins with, such as `2026-01-31T23:59:59.123456Z`.
fn time_s(line: &str) -> Option<f64> {
    let stamp = line.split_whitespace().next()?.strip_suffix('Z')?;
    let (date, time) = stamp.split_once('T')?;
    let mut date = date.split('-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.split(':').map(str::parse::<f64>);
    let (hour, minute, second) = (time.next()?.ok()?, time.next()?.ok()?, time.next()?.ok()?);
    // Years that begin in March, so that a leap day comes last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    /// From 0000-03-01, counted as above, to 1970-01-01.
    const EPOCH: i64 = 719_469;
    #[expect(clippy::cast_precision_loss, reason = "days are few")]
    let days = (days - EPOCH) as f64;
    Some(days * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_log_line_counts_from_1970() {
        let at = |line: &str| time_s(line);
        assert_eq!(at("1970-01-01T00:00:00.5Z INFO x"), Some(0.5));
        assert_eq!(at("2024-02-29T12:00:00Z  WARN y"), Some(1_709_208_000.0));
        assert_eq!(at("2026-11-20T15:45:00Z"), Some(1_795_189_500.0));
        assert_eq!(at("error: no time"), None);
    }
}
