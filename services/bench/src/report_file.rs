//! The files that `flotilla-bench … --json` writes.

use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use super::engines::EnginesReport;

/// A report of measurements.
#[derive(Debug, Deserialize)]
pub(super) struct ReportFile {
    pub machine: String,
    pub load: Vec<f64>,
    pub release: bool,
    pub version: String,
    pub figures: Vec<FigureRow>,
    pub engines: Option<EnginesReport>,
}

/// A measured value. Smaller is better.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct FigureRow {
    pub name: String,
    pub measured: f64,
    pub unit: String,
    pub limit: Option<f64>,
    pub ratio: Option<f64>,
    pub over: bool,
    pub how: String,
}

pub(super) fn read_report(path: &Path) -> anyhow::Result<ReportFile> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is no output of `flotilla-bench --json`", path.display()))
}
