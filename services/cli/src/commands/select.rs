//! `flotilla select`: compares a cycle's selection with another strategy.

use std::collections::BTreeSet;

use anyhow::Context;
use control::{SelectionComparison, SelectionSummary};
use serde_json::json;
use spec::SelectionSpec;
use wire::RunId;

use crate::{
    args::{GlobalArgs, SelectArgs},
    output,
};

pub(crate) async fn preview_selection(flags: &GlobalArgs, args: &SelectArgs) -> anyhow::Result<()> {
    let run = RunId::new(args.run.as_str())?;
    let rules = SelectionSpec::parse(&args.policy).context("--policy")?;
    let control = flags.fleet.connect_control().await?;
    if let (true, Some(path)) = (args.pairs, &args.out) {
        let pairs = control.pair_samples(&run, args.cycle).await?;
        let lines = pairs.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let written =
            std::fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>());
        written.with_context(|| format!("write {}", path.display()))?;
        let document = json!({ "run": run.as_str(), "cycle": args.cycle, "pairs": pairs.len() });
        return output::print_json_or(flags.json, &document, || {
            output::print_line(&format!("{} pairs in {}", pairs.len(), path.display()));
        });
    }
    let comparison = control.preview_selection(&run, args.cycle, &rules).await?;
    if let Some(path) = &args.out {
        let written = std::fs::write(path, &comparison.dataset);
        written.with_context(|| format!("write {}", path.display()))?;
    }
    output::print_json_or(flags.json, &comparison, || print_comparison(&comparison))?;
    Ok(())
}

fn print_comparison(comparison: &SelectionComparison) {
    let SelectionComparison { run, cycle, considered, was, would, both, .. } = comparison;
    output::print_line(&format!("{run}, cycle {cycle}: of {considered} samples"));
    let row = |name: &str, of: &dyn Fn(&SelectionSummary) -> String| {
        [name.to_owned(), of(was), of(would)]
    };
    let mut rows = vec![
        row("kept", &|side| side.kept.to_string()),
        row("of prompts", &|side| side.prompts.to_string()),
        row("tokens", &|side| side.tokens.to_string()),
        row("mean reward", &|side| side.reward.map_or("-".into(), |mean| format!("{mean:.4}"))),
    ];
    let reasons: BTreeSet<&String> = was.dropped.keys().chain(would.dropped.keys()).collect();
    for why in reasons {
        let count = |side: &SelectionSummary| {
            side.dropped.get(why).copied().unwrap_or_default().to_string()
        };
        rows.push(row(why, &count));
    }
    output::print_table(["", ">was", ">would be"], rows);
    let (lost, gained) = (was.kept - both, would.kept - both);
    output::print_line(&format!("{both} samples kept by both; {gained} gained, {lost} lost"));
}
