//! What an agent costs a box while it has nothing to do.

use std::time::Duration;

use anyhow::Context;

use super::{Figure, processes, rig::Rig};
use crate::{commands::agent::ROLES, output};

/// Until its caches and timers have settled.
const AFTER: Duration = Duration::from_secs(5);

/// 30 MB.
const LIMIT_MB: f64 = 30.0;

pub(super) async fn measure(rig: &Rig) -> anyhow::Result<[Figure; 2]> {
    output::say(&format!("idle: an agent of all roles, {} s …", AFTER.as_secs()));
    let agent = rig.agent("bench-idle", &ROLES.join(",")).await?;
    tokio::time::sleep(AFTER).await;
    let resident = processes::status_bytes(agent.pid, "VmRSS")?;
    let anonymous = processes::status_bytes(agent.pid, "RssAnon")?;
    agent.stop().await;
    let program = std::env::current_exe().context("find this program")?;
    let size = std::fs::metadata(&program).context("measure this program")?.len();
    Ok([
        Figure {
            name: "idle",
            measured: megabytes(resident),
            unit: "MB",
            limit: Some(LIMIT_MB),
            how: format!(
                "resident memory of an agent of all roles after {} s; {:.1} MB without the program's own pages",
                AFTER.as_secs(),
                megabytes(anonymous)
            ),
        },
        Figure {
            name: "binary",
            measured: megabytes(size),
            unit: "MB",
            limit: None,
            how: "this program's file".into(),
        },
    ])
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
