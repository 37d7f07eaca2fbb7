//! `flotilla down`: stops the `flotilla up` of a directory, and with it the fleet.

use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Signal, kill_process};

use crate::{
    fleet::{FleetArgs, FleetFile, is_fleet_process},
    output,
};

/// Agents, coordinator and bus each need a few seconds.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) async fn stop_fleet(fleet: &FleetArgs, json: bool) -> anyhow::Result<()> {
    let directory = fleet.require_directory()?;
    if !directory.exists() {
        bail!("there is no directory {}; pass the fleet's with --dir (A103)", directory.display());
    }
    let file = FleetFile::read(directory)?;
    if let Some(file) = &file {
        file.require_own(directory, "stop it with `flotilla down` on its box")?;
    }
    let Some(pid) = file.and_then(|file| file.find_process()) else {
        let text = format!("no fleet is running in {}", directory.display());
        return report_state(json, false, &text);
    };
    kill_process(pid, Signal::TERM).context("end the fleet")?;
    let deadline = tokio::time::Instant::now() + STOP_LIMIT;
    while is_fleet_process(pid) {
        if tokio::time::Instant::now() >= deadline {
            bail!(
                "the fleet (process {}) is still running after {STOP_LIMIT:?} (A106)",
                pid.as_raw_nonzero()
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    report_state(json, true, "the fleet is down")
}

fn report_state(json: bool, changed: bool, text: &str) -> anyhow::Result<()> {
    if json {
        return output::print_json(&serde_json::json!({ "state": "down", "changed": changed }));
    }
    output::print_message(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use identity::MemberIdentity;

    use super::*;

    #[tokio::test]
    async fn credentials_of_a_member_stop_no_fleet() {
        let directory = tempfile::tempdir().unwrap();
        let identity = Some(MemberIdentity::with_default_files("ann"));
        let (nats, gateway, store) = ("tls://a:1".into(), "a:2".into(), "file:///c".into());
        let file = FleetFile { nats, gateway, store, pid: 0, agents: Vec::new(), identity };
        file.write(directory.path()).unwrap();
        let fleet = FleetArgs::in_directory(directory.path());
        let told = stop_fleet(&fleet, false).await.unwrap_err().to_string();
        assert!(told.contains("its fleet runs elsewhere"), "{told}");
    }
}
