//! `flotilla status`: the health of the fleet on one screen, and the next command.

use std::{collections::BTreeMap, process::ExitCode};

use control::FleetControl;
use run_view::{FleetHealth, FleetReadings};
use serde_json::{Value, json};
use wire::{clock::unix_seconds, format_error_chain};

use crate::{
    args::GlobalArgs,
    fleet::{FleetArgs, FleetFile, read_fleet_config},
    output,
};

pub(crate) async fn show_status(flags: &GlobalArgs) -> anyhow::Result<ExitCode> {
    let readings = read_fleet(&flags.fleet).await?;
    let health = FleetHealth::assess(&readings);
    output::print_json_or(flags.json, &status_json(&readings, &health), || {
        health.screen_lines(&readings).iter().for_each(|line| output::print_line(line));
    })?;
    Ok(if health.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn read_fleet(fleet: &FleetArgs) -> anyhow::Result<FleetReadings> {
    let bus = fleet.connect_bus("cli", "user").await?;
    let config = read_fleet_config(&bus).await?;
    let control = FleetControl::new(bus.clone(), fleet.store_access(&config, None)?);
    let (leader, log, store_problem, agents, runs) = tokio::join!(
        bus.find_leader(),
        bus.log_usage(),
        find_store_problem(&control),
        control.list_agents(),
        control.describe_runs()
    );
    let (log, directory) = (log?, fleet.dir.as_deref());
    let file = directory.map(FleetFile::read).transpose()?.flatten();
    let nats = if fleet.nats.is_empty() { None } else { Some(fleet.nats.join(",")) };
    let place = match (&nats, directory) {
        (Some(nats), _) => format!(" --nats {nats}"),
        (None, directory) => {
            directory.map_or(String::new(), |it| format!(" --dir {}", it.display()))
        }
    };
    let here = directory.filter(|_| file.as_ref().is_some_and(|file| file.pid != 0));
    let disk = here.and_then(|directory| rustix::fs::statvfs(directory).ok());
    Ok(FleetReadings {
        now_s: unix_seconds(),
        bus: nats.or_else(|| Some(file.as_ref()?.nats.clone())).unwrap_or_default(),
        log_bytes: log.bytes,
        log_limit: log.limit,
        leader: leader?,
        page: file.as_ref().map_or(config.gateway, FleetFile::page_url),
        store: config.store,
        store_problem,
        disk_free: disk.map(|disk| disk.f_bavail * disk.f_frsize),
        agents: agents?,
        runs: runs?,
        place,
    })
}

/// Returns the reason why the store does not work; empty if it does.
async fn find_store_problem(control: &FleetControl) -> String {
    match control.open_store().await {
        Err(error) => format_error_chain(&error),
        Ok(store) => {
            store.check_access().await.err().map_or(String::new(), |it| format_error_chain(&it))
        }
    }
}

fn status_json(readings: &FleetReadings, health: &FleetHealth) -> Value {
    let problems: Vec<Value> = health
        .problems
        .iter()
        .map(|it| json!({ "problem": it.problem, "remedy": it.remedy }))
        .collect();
    let agents = readings.agents.iter().map(|it| (&it.agent, it.state().as_str_name()));
    let runs = readings.runs.iter().map(|it| (&it.run, it.state().as_str_name()));
    json!({
        "healthy": health.is_healthy(), "problems": problems, "next": health.next,
        "bus": readings.bus, "log_bytes": readings.log_bytes, "log_limit": readings.log_limit,
        "coordinator": readings.leader, "page": readings.page, "store": readings.store,
        "disk_free": readings.disk_free,
        "agents": agents.collect::<BTreeMap<_, _>>(), "runs": runs.collect::<BTreeMap<_, _>>(),
    })
}
