//! The report of a burn-in: one document, and a table for people.

use std::collections::BTreeMap;

use doctor::DoctorFinding;
use hardware::host_snapshot::HostSnapshot;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{redaction::PrivateNames, telemetry_log::StageTelemetry};

/// Maximum number of bytes of a worker's log in a report.
const LOG_BYTES_MAX: usize = 4 * 1024;

/// The headings of [`BurnInReport::stage_rows`].
pub const STAGE_HEADINGS: [&str; 4] = ["stage", "outcome", ">seconds", "figures"];

/// The result of a burn-in.
#[derive(Debug, Clone, Serialize)]
pub struct BurnInReport {
    /// The version of the program.
    pub flotilla: String,
    /// True if no stage failed, and none was skipped for lack of time.
    pub passed: bool,
    /// Seconds of all stages together.
    pub seconds: f64,
    /// The name of the hardware profile.
    pub profile: String,
    /// Versions by engine: `trainer`, `llama.cpp`.
    pub engines: BTreeMap<String, String>,
    pub stages: Vec<StageReport>,
    pub findings: Vec<DoctorFinding>,
    pub host: HostSnapshot,
}

/// One stage of a burn-in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageReport {
    pub name: &'static str,
    pub outcome: StageOutcome,
    /// The reason of a failure or a skip; empty for a stage that passed.
    pub reason: String,
    pub seconds: f64,
    /// The figures in one line, for people.
    pub summary: String,
    /// The figures by name; a unit is the end of a name.
    pub figures: Map<String, Value>,
    /// The host's telemetry during the stage.
    pub host: StageTelemetry,
    /// The last lines of a worker that failed.
    pub log: String,
}

/// The outcome of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StageOutcome {
    Passed,
    Failed,
    /// Not run, because the box or an earlier stage lacks what it needs.
    Skipped,
}

impl StageOutcome {
    /// Returns the outcome as a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

/// The figures that a stage reports.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct StageFigures {
    pub(crate) summary: String,
    pub(crate) values: Map<String, Value>,
}

impl StageFigures {
    /// Creates figures from a summary and an object; other values have no names and are left out.
    pub(crate) fn new(summary: String, values: Value) -> Self {
        let values = match values {
            Value::Object(values) => values,
            _ => Map::new(),
        };
        Self { summary, values }
    }
}

impl BurnInReport {
    /// Returns the document for a bug report, without the names of the box and its owner.
    ///
    /// # Errors
    /// When a figure cannot be written as JSON.
    pub fn to_document(&self, names: &PrivateNames) -> serde_json::Result<Value> {
        let mut document = serde_json::to_value(self)?;
        names.redact_document(&mut document);
        Ok(document)
    }

    /// Returns a row for each stage: name, outcome, seconds, and its figures or the reason.
    pub fn stage_rows(&self) -> Vec<[String; 4]> {
        self.stages.iter().map(StageReport::to_row).collect()
    }
}

impl StageReport {
    fn to_row(&self) -> [String; 4] {
        let parts = [self.summary.clone(), self.reason.clone(), self.host.describe_heat()];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let seconds = match self.outcome {
            StageOutcome::Skipped => "-".to_owned(),
            StageOutcome::Passed | StageOutcome::Failed => format!("{:.1}", self.seconds),
        };
        [self.name.to_owned(), self.outcome.word().to_owned(), seconds, parts.join("; ")]
    }
}

/// Returns the last bytes of a log, without the line that is cut.
pub(crate) fn shorten_log(log: &str) -> String {
    let start = log.len().saturating_sub(LOG_BYTES_MAX);
    if start == 0 {
        return log.to_owned();
    }
    let cut = log.as_bytes()[start..].iter().position(|byte| *byte == b'\n');
    // The byte after an ASCII letter begins a character.
    cut.map_or(String::new(), |at| log[start + at + 1..].to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stage(name: &'static str, outcome: StageOutcome, reason: &str) -> StageReport {
        StageReport {
            name,
            outcome,
            reason: reason.to_owned(),
            seconds: 1.5,
            summary: "20 steps".to_owned(),
            figures: Map::new(),
            host: StageTelemetry { celsius_max: Some(71.4), ..StageTelemetry::default() },
            log: String::new(),
        }
    }

    #[test]
    fn a_row_has_figures_and_reason_and_a_document_no_names() {
        let report = BurnInReport {
            flotilla: "0.2.0".into(),
            passed: false,
            seconds: 2.5,
            profile: "cpu".into(),
            engines: BTreeMap::new(),
            stages: vec![
                stage("train", StageOutcome::Failed, "no file /home/anna/x"),
                stage("serve", StageOutcome::Skipped, "train failed"),
            ],
            findings: Vec::new(),
            host: HostSnapshot::default(),
        };
        let rows = report.stage_rows();
        let expected = ["train", "FAILED", "1.5", "20 steps; no file /home/anna/x; 71 °C"];
        assert_eq!(rows[0], expected.map(str::to_owned));
        assert_eq!(rows[1][1..3], ["skipped", "-"].map(str::to_owned));
        let names = PrivateNames { home: "/home/anna".into(), ..PrivateNames::default() };
        let document = report.to_document(&names).unwrap();
        assert_eq!(document["stages"][0]["reason"], "no file ~/x");
        assert_eq!(document["stages"][1]["outcome"], "skipped");
        assert_eq!(document["passed"], false);
    }

    #[test]
    fn figures_that_are_no_object_are_left_out() {
        let figures = StageFigures::new("a".into(), json!({ "bytes": 3 }));
        assert_eq!(figures.values["bytes"], 3);
        assert!(StageFigures::new("a".into(), json!([3])).values.is_empty());
    }

    #[test]
    fn a_long_log_is_cut_at_a_line() {
        assert_eq!(shorten_log("a\nb\n"), "a\nb\n");
        let long = format!("{}\nlast\n", "ü".repeat(LOG_BYTES_MAX));
        assert_eq!(shorten_log(&long), "last\n");
        assert_eq!(shorten_log(&"x".repeat(2 * LOG_BYTES_MAX)), "");
    }
}
