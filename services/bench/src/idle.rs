//! Measures the memory of an agent without work.

use std::time::Duration;

use anyhow::Context;
use cli::output;

use super::{BenchFigure, fixture::FleetFixture, procfs};
use crate::flotilla_program::find_flotilla;

/// The roles of the agent.
const ROLES: &str = "trainer,generator,verifier,evaluator";
/// Delay until the agent's caches and timers have settled.
const SETTLE_TIME: Duration = Duration::from_secs(5);

/// Accepted resident memory, in megabytes.
const LIMIT_MB: f64 = 30.0;

pub(super) async fn measure_idle_agent(rig: &FleetFixture) -> anyhow::Result<[BenchFigure; 2]> {
    output::print_message(&format!("idle: an agent of all roles, {} s …", SETTLE_TIME.as_secs()));
    let agent = rig.start_agent("bench-idle", ROLES).await?;
    tokio::time::sleep(SETTLE_TIME).await;
    let resident = procfs::read_status_bytes(agent.pid, "VmRSS")?;
    let anonymous = procfs::read_status_bytes(agent.pid, "RssAnon")?;
    agent.stop().await;
    let size = std::fs::metadata(find_flotilla()?).context("measure the program")?.len();
    Ok([
        BenchFigure {
            name: "idle",
            measured: to_megabytes(resident),
            unit: "MB",
            limit: Some(LIMIT_MB),
            how: format!(
                "resident memory of an agent of all roles after {} s; {:.1} MB without the program's own pages",
                SETTLE_TIME.as_secs(),
                to_megabytes(anonymous)
            ),
        },
        BenchFigure {
            name: "binary",
            measured: to_megabytes(size),
            unit: "MB",
            limit: None,
            how: "the program's file".into(),
        },
    ])
}

/// Converts bytes to megabytes (10^6).
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn to_megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
