//! `flotilla bench`: what the design promises in figures, measured here and now.
//!
//! It reports and fails nothing: a figure over its limit is marked, and a machine that
//! was busy shows in the load.

mod agents;
mod bus;
mod closed;
mod doctor;
mod engines;
mod fleet;
mod fold;
mod idle;
mod log;
mod look;
mod page;
mod processes;
mod raft;
mod rig;
mod sandbox;
mod share;
mod start;
mod store;
mod verify;

use std::process::ExitCode;

use anyhow::bail;
use serde_json::{Value, json};

use crate::{
    cli::{BenchArgs, BenchWhat},
    fleet::FleetArgs,
    output,
    version::VERSION,
};

pub(crate) use engines::work as engine_task;
pub(crate) use store::peer_task;

/// One thing measured.
#[derive(Debug, Clone)]
struct Figure {
    name: &'static str,
    measured: f64,
    unit: &'static str,
    /// Absent: only told.
    limit: Option<f64>,
    how: String,
}

impl Figure {
    fn ratio(&self) -> Option<f64> {
        self.limit.map(|limit| self.measured / limit)
    }

    fn is_over(&self) -> bool {
        self.limit.is_some_and(|limit| self.measured > limit)
    }

    fn row(&self) -> [String; 5] {
        let Self { name, measured, unit, limit, how } = self;
        let mark = if self.is_over() { "OVER " } else { "" };
        [
            (*name).to_owned(),
            format!("{} {unit}", round(*measured)),
            limit.map_or("-".into(), |limit| format!("{} {unit}", round(limit))),
            self.ratio().map_or("-".into(), |ratio| format!("{mark}{ratio:.2}")),
            how.clone(),
        ]
    }

    fn json(&self) -> Value {
        let Self { name, measured, unit, limit, how } = self;
        json!({
            "name": name,
            "measured": measured,
            "unit": unit,
            "limit": limit,
            "ratio": self.ratio(),
            "over": self.is_over(),
            "how": how,
        })
    }
}

pub(crate) async fn bench(
    fleet: &FleetArgs,
    args: &BenchArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    if !args.page.is_empty() {
        output::print(&page::write(&args.page)?);
        return Ok(ExitCode::SUCCESS);
    }
    let load = load();
    if cfg!(debug_assertions) {
        output::say("this is a debug build: its figures say little");
    }
    match args.what[..] {
        [BenchWhat::Engine] => {
            engines::bench(args, json).await?;
            return Ok(ExitCode::SUCCESS);
        }
        [BenchWhat::Raft] => return raft::bench(fleet, args, json).await,
        _ => {}
    }
    if args.what.iter().any(|what| matches!(what, BenchWhat::Engine | BenchWhat::Raft)) {
        bail!("`bench engine` and `bench raft` are measured alone: they would disturb the others");
    }
    let wanted = |what| args.what.is_empty() || args.what.contains(&what);
    let mut figures = Vec::new();
    if wanted(BenchWhat::Fold) {
        figures.extend(tokio::task::spawn_blocking(fold::measure).await??);
    }
    if wanted(BenchWhat::Doctor) {
        figures.push(doctor::measure()?);
    }
    if wanted(BenchWhat::Sandbox) {
        figures.extend(tokio::task::spawn_blocking(sandbox::measure).await??);
    }
    if wanted(BenchWhat::Verify) {
        figures.extend(tokio::task::spawn_blocking(verify::measure).await??);
    }
    // It takes minutes, and measures what `share` does.
    let whole_fleet = args.what.contains(&BenchWhat::Fleet);
    if whole_fleet {
        figures.extend(self::fleet::measure().await?);
    }
    if wanted(BenchWhat::Bus) {
        figures.extend(self::bus::measure().await?);
    }
    if wanted(BenchWhat::Share) && !whole_fleet {
        figures.extend(tokio::task::spawn_blocking(share::measure).await??);
    }
    // It writes a model of 2 GB first.
    if args.what.contains(&BenchWhat::Eval) {
        figures.extend(engines::eval(args).await?);
    }
    if wanted(BenchWhat::Look) {
        figures.extend(look::measure().await?);
    }
    if wanted(BenchWhat::Closed) {
        figures.extend(closed::measure().await?);
    }
    if wanted(BenchWhat::Store) {
        figures.extend(store::measure(args).await?);
    }
    figures.extend(of_agents(wanted(BenchWhat::Start), wanted(BenchWhat::Idle)).await?);
    if json {
        let figures: Vec<Value> = figures.iter().map(Figure::json).collect();
        output::print_json(&document(&load, &figures))?;
    } else {
        print(&figures, &load);
    }
    Ok(ExitCode::SUCCESS)
}

/// What takes a bus and agents.
async fn of_agents(start: bool, idle: bool) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    if start || idle {
        let rig = rig::Rig::start().await?;
        if start {
            figures.extend(start::measure(&rig).await?);
        }
        if idle {
            figures.extend(idle::measure(&rig).await?);
        }
        rig.stop().await;
    }
    Ok(figures)
}

/// What `--json` prints, and [`page`] reads.
fn document(load: &[f64], figures: &[Value]) -> Value {
    json!({
        "machine": engines::machine(),
        "load": load,
        "release": !cfg!(debug_assertions),
        "version": VERSION,
        "figures": figures,
    })
}

fn print(figures: &[Figure], load: &[f64]) {
    let headings = ["", ">measured", ">limit", ">ratio", "how"];
    output::print(&output::table(headings, figures.iter().map(Figure::row)));
    let machine = engines::machine();
    let over = figures.iter().filter(|figure| figure.is_over()).count();
    output::print(&format!(
        "\n{over} over the limit; load average at the start {}; {machine}",
        load_text(load)
    ));
}

/// Three digits, or all before the point.
fn round(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

/// Of a load, for people.
fn load_text(load: &[f64]) -> String {
    load.iter().map(|load| format!("{load:.2}")).collect::<Vec<_>>().join(" ")
}

/// Runnable processes over 1, 5 and 15 minutes; empty where there is no procfs.
fn load() -> Vec<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect()
}
