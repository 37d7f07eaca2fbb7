//! `flotilla discover`: fleets that are announced on this network.

use std::time::Duration;

use gateway::discovery;

use crate::{args::DiscoverArgs, output};

pub(crate) async fn list_announced_fleets(args: &DiscoverArgs, json: bool) -> anyhow::Result<()> {
    let all = discovery::find_fleets(Duration::from_secs_f64(args.wait), |_| false).await?;
    if json {
        return output::print_json(&all);
    }
    let rows = all.into_iter().map(|fleet| {
        let authority = if fleet.authority.is_empty() { "open".into() } else { fleet.authority };
        [fleet.name, fleet.gateways.join(" "), authority]
    });
    let none = "no fleet found on this network; announce one with `flotilla up --announce`";
    output::print_list(["fleet", "gateway", "authority"], rows, none);
    Ok(())
}
