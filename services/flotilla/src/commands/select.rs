//! `flotilla select`: a cycle's selection beside another.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::Context;
use control::{Comparison, SelectionSpec, Side};
use wire::RunId;

use crate::{cli::SelectArgs, fleet::FleetArgs, output};

pub(crate) async fn select(
    fleet: &FleetArgs,
    args: &SelectArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let run = RunId::new(args.run.as_str())?;
    let rules = SelectionSpec::parse(&args.policy).context("--policy")?;
    let control = fleet.control().await?;
    let comparison = control.select(&run, args.cycle, &rules).await?;
    if let Some(path) = &args.out {
        let written = std::fs::write(path, &comparison.dataset);
        written.with_context(|| format!("write {}", path.display()))?;
    }
    if json {
        output::print_json(&comparison)?;
    } else {
        print(&comparison);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(comparison: &Comparison) {
    let Comparison { run, cycle, considered, was, would, both, .. } = comparison;
    output::print(&format!("{run}, cycle {cycle}: of {considered} samples"));
    let row = |name: &str, of: &dyn Fn(&Side) -> String| [name.to_owned(), of(was), of(would)];
    let mut rows = vec![
        row("kept", &|side| side.kept.to_string()),
        row("of prompts", &|side| side.prompts.to_string()),
        row("tokens", &|side| side.tokens.to_string()),
        row("mean reward", &|side| side.reward.map_or("-".into(), |mean| format!("{mean:.4}"))),
    ];
    let reasons: BTreeSet<&String> = was.dropped.keys().chain(would.dropped.keys()).collect();
    for why in reasons {
        let count = |side: &Side| side.dropped.get(why).copied().unwrap_or_default().to_string();
        rows.push(row(why, &count));
    }
    output::print(&output::table(["", ">was", ">would be"], rows));
    let (lost, gained) = (was.kept - both, would.kept - both);
    output::print(&format!("{both} samples are kept by both; {gained} more would be, {lost} not"));
}
