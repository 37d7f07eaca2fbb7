//! Events from the logs of a fleet: starts of jobs and changes of leadership.

use std::{collections::BTreeMap, path::Path};

/// The start of a job on an agent.
#[derive(Debug, Clone)]
pub struct JobStart {
    /// Seconds since the Unix epoch.
    pub at_s: f64,
    pub agent: String,
    pub subject: String,
}

/// A coordinator that gained or lost leadership.
#[derive(Debug, Clone)]
pub struct LeadershipChange {
    pub at_s: f64,
    pub coordinator: String,
    pub is_leader: bool,
}

/// Returns all job starts from the agent logs below `directory`, in order of time.
pub fn job_starts(directory: &Path) -> Vec<JobStart> {
    let mut starts = Vec::new();
    for entry in std::fs::read_dir(directory.join("agents")).into_iter().flatten().flatten() {
        let agent = entry.file_name().to_string_lossy().into_owned();
        for (at_s, line) in lines(&entry.path().join("agent.log")) {
            let subject = line.split(" job begins subject=").nth(1);
            if let Some(subject) = subject.and_then(|rest| rest.split_whitespace().next()) {
                starts.push(JobStart { at_s, agent: agent.clone(), subject: subject.to_owned() });
            }
        }
    }
    starts.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    starts
}

/// Returns all leadership changes from these logs (by coordinator), in order of time.
pub fn leadership_changes(logs: &BTreeMap<String, std::path::PathBuf>) -> Vec<LeadershipChange> {
    let mut changes = Vec::new();
    for (coordinator, log) in logs {
        for (at_s, line) in lines(log) {
            if let Some((_, value)) = line.split_once(" leadership leads=") {
                let is_leader = value.starts_with("true");
                changes.push(LeadershipChange {
                    at_s,
                    coordinator: coordinator.clone(),
                    is_leader,
                });
            }
        }
    }
    changes.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    changes
}

/// Returns how often `flotilla up` restarted a process that had ended by itself.
pub fn count_restarts(directory: &Path) -> usize {
    let log = std::fs::read_to_string(directory.join("up.log")).unwrap_or_default();
    log.lines().filter(|line| line.contains("exited unexpectedly; restarting it")).count()
}

fn lines(log: &Path) -> Vec<(f64, String)> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter_map(|line| Some((time_s(line)?, line.to_owned()))).collect()
}

/// Parses the time at the start of a line, such as `2026-01-31T23:59:59.123456Z`.
fn time_s(line: &str) -> Option<f64> {
    let stamp = line.split_whitespace().next()?.strip_suffix('Z')?;
    let (date, time) = stamp.split_once('T')?;
    let mut date = date.split('-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.split(':').map(str::parse::<f64>);
    let (hour, minute, second) = (time.next()?.ok()?, time.next()?.ok()?, time.next()?.ok()?);
    // Years that begin in March, so that the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    /// Days from 0000-03-01, counted as above, to 1970-01-01.
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
