//! The conditions of a long measurement: machine, build, load and duration.

use std::time::Instant;

use cli::VERSION;
use serde::Serialize;

use crate::{engines::describe_machine, format_load, read_load_average};

/// The conditions of a measurement, as its report has them.
#[derive(Debug, Serialize)]
pub(crate) struct Conditions {
    machine: String,
    pub(crate) version: &'static str,
    release: bool,
    load_before: Vec<f64>,
    load_after: Vec<f64>,
    wall_s: f64,
}

/// A measurement that has begun.
pub(crate) struct ConditionsMeter {
    began: Instant,
    load_before: Vec<f64>,
}

impl ConditionsMeter {
    pub(crate) fn start() -> Self {
        Self { began: Instant::now(), load_before: read_load_average() }
    }

    pub(crate) fn finish(self) -> Conditions {
        Conditions {
            machine: describe_machine(),
            version: VERSION,
            release: !cfg!(debug_assertions),
            load_before: self.load_before,
            load_after: read_load_average(),
            wall_s: self.began.elapsed().as_secs_f64(),
        }
    }
}

impl Conditions {
    /// Returns a line of Markdown about all but the version.
    pub(crate) fn to_markdown(&self) -> String {
        format!(
            "Machine: {}. Load average before {}, after {}; {:.0} min in all{}.",
            self.machine,
            format_load(&self.load_before),
            format_load(&self.load_after),
            self.wall_s / 60.0,
            if self.release { "" } else { ", with a debug build" },
        )
    }
}
