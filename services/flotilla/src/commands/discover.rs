//! `flotilla discover`: fleets that are announced on this network.

use std::{process::ExitCode, time::Duration};

use crate::{cli::DiscoverArgs, discovery, output};

pub(crate) async fn discover(args: &DiscoverArgs, json: bool) -> anyhow::Result<ExitCode> {
    let all = discovery::look(Duration::from_secs_f64(args.wait), |_| false).await?;
    if json {
        output::print_json(&all)?;
        return Ok(ExitCode::SUCCESS);
    }
    if all.is_empty() {
        output::say(
            "no fleet is announced on this network; `flotilla up --announce` announces one",
        );
    }
    let rows = all.into_iter().map(|fleet| {
        let authority = if fleet.authority.is_empty() { "open".into() } else { fleet.authority };
        [fleet.name, fleet.gateways.join(" "), authority]
    });
    output::table(["fleet", "gateway", "authority"], rows);
    Ok(ExitCode::SUCCESS)
}
