//! `flotilla checkpoint prune`: removes what no rule keeps.

use anyhow::Context;
use control::{PruneItem, PrunePlan, PruneRequest, TaskProgress};
use identity::{BearerInfo, UserScope};
use wire::RunId;

use crate::{
    args::{GlobalArgs, PruneArgs},
    fleet::FleetArgs,
    output,
    progress_meter::ProgressMeter,
};

pub(super) async fn prune_checkpoints(flags: &GlobalArgs, args: PruneArgs) -> anyhow::Result<()> {
    let PruneArgs { runs, keep, even_newest, dry_run: _, yes } = args;
    let runs: Result<Vec<RunId>, _> = runs.into_iter().map(RunId::new).collect();
    let by = admin_name(&flags.fleet)?;
    let request = PruneRequest { runs: runs?, rules: keep, keep_newest: !even_newest, by };
    let control = flags.fleet.connect_control().await?;
    let mut plan = control.plan_prune(&request).await?;
    if yes {
        let meter = ProgressMeter::new();
        let show = |TaskProgress { unit, done, total }| {
            meter.show_progress("prune", unit, done, total);
        };
        plan = control.prune_trees(&request, plan, &show).await?;
        meter.finish_bar();
    }
    output::print_json_or(flags.json, &plan, || print_plan(&plan))
}

/// Returns the name for the record of the removal. Fails for a member that is no admin.
fn admin_name(fleet: &FleetArgs) -> anyhow::Result<String> {
    let Some((_, member)) = fleet.read_member()? else {
        return Ok(std::env::var("USER").unwrap_or_else(|_| "unknown".to_owned()));
    };
    let path = &member.bearer;
    let bearer =
        std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let BearerInfo { name, scope, .. } = BearerInfo::read_unverified(bearer.trim())?;
    anyhow::ensure!(
        scope == Some(UserScope::Admin),
        "{name} may not remove checkpoints; an admin may (K104)"
    );
    Ok(name.to_string())
}

fn print_plan(plan: &PrunePlan) {
    let action = |item: &PruneItem| match (item.is_kept, plan.is_done) {
        (true, _) => "keep",
        (false, false) => "remove",
        (false, true) => "removed",
    };
    let rows = plan.trees.iter().map(|item| {
        [
            item.run.to_string(),
            item.cycle.to_string(),
            item.step.map_or("-".to_owned(), |step| step.to_string()),
            item.what.to_owned(),
            output::format_bytes(item.bytes),
            action(item).to_owned(),
            output::text_or_dash(item.reason.clone()),
        ]
    });
    let headings = ["run", ">cycle", ">step", "what", ">size", "", "reason"];
    output::print_list(headings, rows, "the store has no checkpoints or samples of these runs");
    let count = plan.trees.iter().filter(|item| !item.is_kept).count();
    let size = output::format_bytes(plan.bytes);
    output::print_message(&match (count, plan.is_done) {
        (0, _) => format!("nothing to remove; kept: {}", plan.rules),
        (count, false) => format!("--yes removes {count} of these, {size}"),
        (count, true) => format!("removed {count} of these, {size}"),
    });
}
