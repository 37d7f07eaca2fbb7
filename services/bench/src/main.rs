//! The `flotilla-bench` program, which measures the performance targets of the design on this
//! machine.
//!
//! It measures the `flotilla` program beside its own file. It only reports: a figure over its limit
//! is marked, but the exit status stays successful. The load average shows whether the machine was
//! busy.

mod across_effect;
mod args;
mod balance;
mod bus_speed;
mod closed_fleet;
mod comparison;
mod conditions;
mod doctor;
mod engines;
mod eval_start;
mod fixture;
mod fleet_scale;
mod flotilla_program;
mod forecast_accuracy;
mod idle;
mod memory_log;
mod objective_effect;
mod observe;
mod performance_page;
mod procfs;
mod raft_effect;
mod replay;
mod report_file;
mod result_files;
mod sandbox_cost;
mod serve_overhead;
mod served_verifier;
mod store_speed;
mod stub_agents;
mod verifier_speed;

use std::process::ExitCode;

use anyhow::bail;
use clap::Parser;
use cli::{VERSION, output};
use mimalloc::MiMalloc;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::args::{BenchArgs, BenchCommand, BenchTarget, WorkerCommand};

/// The allocator of the `flotilla` program, whose engine this program measures.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    output::install_panic_hook();
    let args =
        BenchArgs::try_parse().unwrap_or_else(|mut error| output::exit_with_usage(&mut error));
    match args.command {
        Some(BenchCommand::Worker(worker)) => {
            output::start_logging("warn,async_nats=error");
            return output::report_outcome(run_worker(worker));
        }
        Some(BenchCommand::Compare { old, new, tolerance }) => {
            return output::report_outcome(comparison::compare_files(&old, &new, tolerance));
        }
        None => {}
    }
    // The benchmarks close thousands of connections on purpose.
    output::start_logging("warn,async_nats=off,bus=error");
    cli::block_on_command(run_bench(&args))
}

fn run_worker(worker: WorkerCommand) -> anyhow::Result<ExitCode> {
    process::die_with_parent(Signal::KILL);
    match worker {
        WorkerCommand::Swarm { part } => store_speed::run_swarm_node(&part)?,
        WorkerCommand::Bench { task, model, text } => {
            engines::run_engine_task(&model, &text, &task)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Clone)]
struct BenchFigure {
    name: &'static str,
    measured: f64,
    unit: &'static str,
    /// The largest accepted value, in `unit`. `None` means that the figure has no limit.
    limit: Option<f64>,
    how: String,
}

impl BenchFigure {
    /// Returns the measured value divided by the limit, or `None` without a limit.
    fn limit_ratio(&self) -> Option<f64> {
        self.limit.map(|limit| self.measured / limit)
    }

    fn is_over_limit(&self) -> bool {
        self.limit.is_some_and(|limit| self.measured > limit)
    }

    fn table_row(&self) -> [String; 5] {
        let Self { name, measured, unit, limit, how } = self;
        let mark = if self.is_over_limit() { "OVER " } else { "" };
        [
            (*name).to_owned(),
            format!("{} {unit}", format_value(*measured)),
            limit.map_or("-".into(), |limit| format!("{} {unit}", format_value(limit))),
            self.limit_ratio().map_or("-".into(), |ratio| format!("{mark}{ratio:.2}")),
            how.clone(),
        ]
    }

    fn to_json(&self) -> Value {
        let Self { name, measured, unit, limit, how } = self;
        json!({
            "name": name,
            "measured": measured,
            "unit": unit,
            "limit": limit,
            "ratio": self.limit_ratio(),
            "over": self.is_over_limit(),
            "how": how,
        })
    }
}

async fn run_bench(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    if !args.page.is_empty() {
        output::print_text(&performance_page::write_page(&args.page)?);
        return Ok(ExitCode::SUCCESS);
    }
    let load = read_load_average();
    if cfg!(debug_assertions) {
        output::print_message("this is a debug build: its figures say little");
    }
    match args.what[..] {
        [BenchTarget::Engine] => return engines::bench_engines(args).await,
        [BenchTarget::Raft] => return raft_effect::bench_raft(args).await,
        [BenchTarget::Objectives] => return objective_effect::bench_objectives(args).await,
        [BenchTarget::Across] => return across_effect::bench_across(args),
        _ => {}
    }
    if args.what.iter().any(BenchTarget::is_alone) {
        bail!(
            "`engine`, `raft`, `objectives` and `across` are measured alone: they would disturb \
             the others"
        );
    }
    let wanted = |what| args.what.is_empty() || args.what.contains(&what);
    let mut figures = Vec::new();
    if wanted(BenchTarget::Fold) {
        figures.extend(tokio::task::spawn_blocking(replay::measure_replay).await??);
    }
    if wanted(BenchTarget::Doctor) {
        figures.push(doctor::measure_doctor()?);
    }
    if wanted(BenchTarget::Sandbox) {
        figures.extend(tokio::task::spawn_blocking(sandbox_cost::measure_sandbox).await??);
    }
    let verifiers = (wanted(BenchTarget::Verify), wanted(BenchTarget::Served));
    figures.extend(tokio::task::spawn_blocking(move || measure_verifiers(verifiers)).await??);
    // It takes minutes and includes the measurement of `share`.
    let whole_fleet = args.what.contains(&BenchTarget::Fleet);
    if whole_fleet {
        figures.extend(fleet_scale::measure_fleet().await?);
    }
    if wanted(BenchTarget::Bus) {
        figures.extend(bus_speed::measure_bus().await?);
    }
    let simulated = (wanted(BenchTarget::Share) && !whole_fleet, wanted(BenchTarget::Forecast));
    figures.extend(measure_simulations(simulated, (args.fleets, args.seed)).await?);
    // This writes a model of 2 GB first.
    if args.what.contains(&BenchTarget::Eval) {
        figures.extend(engines::measure_eval(args).await?);
    }
    // This needs llama.cpp.
    if args.what.contains(&BenchTarget::Serve) {
        figures.extend(serve_overhead::measure_serving().await?);
    }
    if wanted(BenchTarget::Look) {
        figures.extend(observe::measure_observers().await?);
    }
    if wanted(BenchTarget::Closed) {
        figures.extend(closed_fleet::measure_closed_fleet().await?);
    }
    if wanted(BenchTarget::Store) {
        figures.extend(store_speed::measure_store(args).await?);
    }
    figures.extend(measure_agents(wanted(BenchTarget::Start), wanted(BenchTarget::Idle)).await?);
    if args.json {
        let figures: Vec<Value> = figures.iter().map(BenchFigure::to_json).collect();
        output::print_json(&build_document(&load, &figures))?;
    } else {
        print_figures(&figures, &load);
    }
    Ok(ExitCode::SUCCESS)
}

fn measure_verifiers((programs, served): (bool, bool)) -> anyhow::Result<Vec<BenchFigure>> {
    let mut figures = Vec::new();
    if programs {
        figures.extend(verifier_speed::measure_verifier()?);
    }
    if served {
        figures.extend(served_verifier::measure_served()?);
    }
    Ok(figures)
}

async fn measure_simulations(
    (share, forecasts): (bool, bool),
    (fleets, seed): (u32, u64),
) -> anyhow::Result<Vec<BenchFigure>> {
    let measure = move || -> anyhow::Result<Vec<BenchFigure>> {
        let mut figures = if share { balance::measure_balance()? } else { Vec::new() };
        if forecasts {
            figures.extend(forecast_accuracy::measure_forecasts(fleets, seed)?);
        }
        Ok(figures)
    };
    tokio::task::spawn_blocking(measure).await?
}

async fn measure_agents(start: bool, idle: bool) -> anyhow::Result<Vec<BenchFigure>> {
    let mut figures = Vec::new();
    if start || idle {
        let rig = fixture::FleetFixture::start().await?;
        if start {
            figures.extend(eval_start::measure_start(&rig).await?);
        }
        if idle {
            figures.extend(idle::measure_idle_agent(&rig).await?);
        }
        rig.stop().await;
    }
    Ok(figures)
}

fn build_document(load: &[f64], figures: &[Value]) -> Value {
    json!({
        "machine": engines::describe_machine(),
        "load": load,
        "release": !cfg!(debug_assertions),
        "version": VERSION,
        "figures": figures,
    })
}

fn print_figures(figures: &[BenchFigure], load: &[f64]) {
    let headings = ["", ">measured", ">limit", ">ratio", "how"];
    output::print_text(&output::format_table(headings, figures.iter().map(BenchFigure::table_row)));
    let machine = engines::describe_machine();
    let over = figures.iter().filter(|figure| figure.is_over_limit()).count();
    output::print_text(&format!(
        "\n{over} over the limit; load average at the start {}; {machine}",
        format_load(load)
    ));
}

fn format_value(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn format_load(load: &[f64]) -> String {
    load.iter().map(|load| format!("{load:.2}")).collect::<Vec<_>>().join(" ")
}

fn read_load_average() -> Vec<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect()
}
