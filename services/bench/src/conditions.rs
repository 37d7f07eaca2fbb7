//! The conditions of a long measurement: machine, build, load and duration.

use std::{collections::BTreeSet, time::Instant};

use cli::{VERSION, output};
use serde::{Deserialize, Serialize};

use crate::{engines::describe_machine, format_load, read_load_average};

/// The conditions of a measurement, as its report has them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conditions {
    machine: String,
    pub(crate) version: String,
    release: bool,
    /// The time of the end, such as `2026-11-20 14:03:05Z`.
    ended: String,
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
            version: VERSION.to_owned(),
            release: !cfg!(debug_assertions),
            ended: output::format_time(Some(&wire::clock::now())),
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

/// Summarises the conditions of several measurements as lines of Markdown.
pub(crate) fn summarise_conditions(all: &[&Conditions]) -> String {
    let version = |it: &Conditions| {
        format!("{}{}", it.version, if it.release { "" } else { " (debug build)" })
    };
    let day = |it: &Conditions| it.ended.split(' ').next().unwrap_or_default().to_owned();
    let mut loads: Vec<f64> = all
        .iter()
        .flat_map(|it| [&it.load_before, &it.load_after])
        .filter_map(|load| load.first().copied())
        .collect();
    loads.sort_by(f64::total_cmp);
    let loads = loads.first().zip(loads.last());
    format!(
        "measured by {} in {:.0} min in all, on {}.\n\
         Machine: {}. Load average over one minute {}.",
        join_distinct(all, version),
        all.iter().map(|it| it.wall_s).sum::<f64>() / 60.0,
        join_distinct(all, day),
        join_distinct(all, |it| it.machine.clone()),
        loads.map_or("unknown".to_owned(), |(low, high)| format!("{low:.2} to {high:.2}")),
    )
}

fn join_distinct(all: &[&Conditions], value: impl Fn(&Conditions) -> String) -> String {
    let distinct: BTreeSet<String> = all.iter().map(|it| value(it)).collect();
    distinct.into_iter().collect::<Vec<_>>().join("; ")
}
