//! `flotilla audit RUN`.

use std::process::ExitCode;

use wire::RunId;

use crate::{fleet::FleetArgs, output};

use super::FINDINGS;

pub(crate) async fn audit(fleet: &FleetArgs, run: &str, json: bool) -> anyhow::Result<ExitCode> {
    let run = RunId::new(run)?;
    let audit = fleet.control().await?.audit(&run).await?;
    if json {
        output::print_json(&audit)?;
    } else {
        output::print(&format!(
            "{run}: {} facts; samples: {} planned, {} accepted, {} judged, {} kept; \
             {} checkpoints, {} evals",
            audit.facts,
            audit.planned_samples,
            audit.accepted_samples,
            audit.judged_samples,
            audit.kept_samples,
            audit.checkpoints,
            audit.evals
        ));
        audit.findings.iter().for_each(|finding| output::print(&format!("finding: {finding}")));
        if audit.findings.is_empty() {
            output::print("clean");
        }
    }
    Ok(if audit.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FINDINGS) })
}
