//! Reports about runs and checkpoints, as text.

use std::collections::{BTreeMap, BTreeSet};

use control::{
    CanaryFigure, CanaryReport, CheckpointLineage, ControlReport, CycleReport, LineageSample,
    LineageStep, MessageGroup, RunReport, SelectionReport,
};
use run_view::{
    cycle_findings, describe_control, describe_quarantine, failure_lines, rate_text,
    selection_text, split_text, weighting_text,
};
use wire::v1;

use crate::output;

const SAMPLES_SHOWN: usize = 10;

pub(super) fn print_run_report(story: &RunReport) {
    let paused = if story.paused { "paused " } else { "" };
    let state = story.ended.clone().unwrap_or(format!("{paused}in phase {}", story.phase));
    output::print_wrapped(&format!("{}: {} run, {state}", story.run, story.kind));
    if story.ended.is_none() && !story.message.is_empty() {
        output::print_wrapped(&story.message);
    }
    output::print_line(&format!("seed {}, base {}", story.seed, story.base));
    for ControlReport { time_ms, action, by, reason } in &story.controls {
        let text = describe_control(action, by.as_deref(), reason);
        let time = output::format_time(Some(&control::to_timestamp(*time_ms)));
        output::print_line(&format!("{time} {text}"));
    }
    for cycle in &story.cycles {
        output::print_line("");
        output::print_line(&format!("cycle {}", cycle.cycle));
        for (name, text) in cycle_lines(cycle) {
            output::print_line(&format!("  {name:<10}{text}"));
        }
    }
    if let Some(yields) = &story.yields {
        print_selection_report(yields);
    }
    print_canaries(story.proof.as_ref(), &story.quarantines);
    failure_lines(&story.failures).iter().for_each(|line| output::print_wrapped(line));
}

fn print_canaries(proof: Option<&CanaryReport>, quarantines: &[v1::Quarantine]) {
    if let Some(proof) = proof {
        output::print_line("");
        output::print_line(&format!("canary check of cycle {}'s samples", proof.cycle));
        proof.shown.iter().for_each(|figure| output::print_line(&canary_line(figure)));
        if !proof.decided {
            output::print_line(
                "  they differ, and no more than half agree: nobody knows who is right, and all of \
                 their samples count; compare their engines, or add a box",
            );
        }
    }
    quarantines.iter().for_each(|one| output::print_line(&describe_quarantine(one)));
}

fn canary_line(CanaryFigure { who, mean, distance }: &CanaryFigure) -> String {
    let apart = distance.map_or(String::new(), |apart| format!(", {apart:.4} from the majority"));
    format!("  {who}: mean canary log-prob {mean:.4} nats per token{apart}")
}

fn cycle_lines(cycle: &CycleReport) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let (Some(samples), Some(prompts), Some(with)) =
        (cycle.samples, cycle.prompts, &cycle.sampled_with)
    {
        let hot = cycle.temperature.map_or(String::new(), |t| format!(" at temperature {t}"));
        lines.push(("sampled", format!("{samples} of {prompts} prompts with {with}{hot}")));
    }
    if let Some(selected) = &cycle.selected {
        lines.push(("kept", selection_text(selected, cycle.training.as_ref())));
    }
    if let (Some(from), Some(training)) = (&cycle.trained_from, &cycle.training) {
        let rate = training.learning_rate;
        let mut text = format!("from {from} at a learning rate of {rate}");
        if let Some(checkpoint) = &cycle.checkpoint {
            let v1::Checkpoint { steps, loss, agent, engine, .. } = checkpoint;
            text.push_str(&format!(", {steps} steps to a loss of {loss:.4}; {agent}, {engine}"));
        }
        lines.push(("trained", text));
    }
    lines.extend(cycle.split.as_ref().map(|split| ("boxes", split_text(split))));
    if let Some(found) = cycle.checkpoint.as_ref().and_then(|it| it.weighting.as_ref()) {
        lines.push(("weighted", weighting_text(found)));
    }
    let mut measured: Vec<String> = Vec::new();
    if let Some(heldout) = cycle.done.as_ref().and_then(|done| done.heldout.as_ref()) {
        measured.push(format!("held-out pass rate {}", rate_text(Some(heldout))));
    }
    let suites = cycle.perplexities.iter();
    measured.extend(suites.map(|(suite, value)| format!("perplexity of {suite} {value:.4}")));
    if !measured.is_empty() {
        lines.push(("measured", measured.join(", ")));
    }
    if !cycle.declined.is_empty() {
        let by_agent = cycle.declined.iter().map(|(agent, count)| format!("{agent} {count}"));
        let by_agent: Vec<String> = by_agent.collect();
        lines.push(("declined", format!("{} (left to faster agents)", by_agent.join(", "))));
    }
    if let Some(done) = &cycle.done {
        let agents = done.samples_by_agent.iter();
        let agents: Vec<String> = agents.map(|(agent, count)| format!("{agent} {count}")).collect();
        if !agents.is_empty() {
            lines.push(("agents", agents.join(", ")));
        }
        let prefix = format!("cycle {}: ", done.cycle);
        let findings = cycle_findings(done).into_iter();
        lines.extend(findings.map(|line| ("found", line.trim_start_matches(&prefix).to_owned())));
    }
    lines
}

fn print_selection_report(found: &SelectionReport) {
    let SelectionReport { cycle, judged, passed, all_right, mixed, all_wrong, .. } = found;
    output::print_line("");
    output::print_line(&format!("why cycle {cycle} kept no more samples"));
    if *judged > 0 {
        output::print_wrapped(&format!(
            "  {passed} of {judged} judged samples reached {}; of the prompts {all_right} always, \
             {mixed} sometimes, {all_wrong} never",
            found.min_reward
        ));
    }
    if found.cut > 0 {
        let (cut, failed) = (found.cut, found.cut_failed);
        output::print_line(&format!("  {cut} stopped at max_new_tokens; {failed} of those failed"));
    }
    for (heading, messages) in [("failures", &found.failures), ("errors", &found.errors)] {
        for MessageGroup { count, message, prompt_id, completion } in messages {
            let message = if message.is_empty() { "(no message)" } else { message };
            output::print_wrapped(&format!("  {heading}: {count} like: {message}"));
            output::print_wrapped(&format!("    prompt {prompt_id}, completion {completion:?}"));
        }
    }
    found.advice.iter().for_each(|advice| output::print_wrapped(&format!("  advice: {advice}")));
}

pub(super) fn print_lineage(lineage: &CheckpointLineage, all: bool) {
    for (place, link) in lineage.links.iter().enumerate() {
        if place > 0 {
            output::print_line("");
        }
        for line in lineage_step_lines(link) {
            output::print_line(&line);
        }
    }
    output::print_line("");
    output::print_line(&format!("started from {}", lineage.base));
    let count = lineage.samples.len();
    if count == 0 {
        return;
    }
    for (who, name) in [
        (count_by(&lineage.samples, |sample| &sample.generator), "drawn by"),
        (count_by(&lineage.samples, |sample| &sample.verifier_agent), "judged by"),
    ] {
        output::print_line(&format!("its {count} samples were {name} {who}"));
    }
    let shown = if all { count } else { SAMPLES_SHOWN };
    let rows = lineage.samples.iter().take(shown).map(|sample| {
        [
            sample.prompt_id.clone(),
            sample.index.to_string(),
            sample.reward.to_string(),
            sample.tokens.to_string(),
            sample.job.clone(),
            sample.generator.clone(),
            sample.engine.clone(),
            sample.verifier.clone(),
        ]
    });
    let headings =
        ["prompt", ">sample", ">reward", ">tokens", "job", "~generator", "~engine", "~verifier"];
    output::print_table(headings, rows);
    if shown < count {
        output::print_line(&format!("and {} more; --samples shows all", count - shown));
    }
}

fn count_by(samples: &[LineageSample], of: impl Fn(&LineageSample) -> &String) -> String {
    let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
    samples.iter().for_each(|sample| *counts.entry(of(sample)).or_default() += 1);
    let counts: Vec<String> = counts.iter().map(|(who, count)| format!("{who} {count}")).collect();
    counts.join(", ")
}

fn lineage_step_lines(link: &LineageStep) -> Vec<String> {
    let v1::Checkpoint { run, cycle, step, steps, loss, agent, engine, tree, .. } =
        &link.checkpoint;
    let tree = tree.clone().unwrap_or_default();
    let mut lines = vec![
        format!("{run}/{cycle}/{step} of {steps} steps: {}", tree.path),
        format!("  digest    {}", tree.manifest),
        format!("  trained   from {}, to a loss of {loss:.4}; {agent}, {engine}", link.from),
    ];
    if let Some(order) = &link.order {
        let training = order.training.clone().unwrap_or_default();
        let v1::Training { batch_size, learning_rate, epochs, max_steps, .. } = training;
        let long =
            if max_steps > 0 { format!("{max_steps} steps") } else { format!("{epochs} epochs") };
        lines.push(format!(
            "  settings  {long}, {batch_size} sequences a step, learning rate {learning_rate}, \
             seed {}",
            order.seed
        ));
        let dataset = order.dataset.clone().unwrap_or_default();
        let replayed = match order.replay.len() {
            0 => String::new(),
            some => format!(", and some of {some} earlier ones"),
        };
        lines.push(format!("  on        dataset {}{replayed}", dataset.digest));
    }
    if let Some(selected) = &link.selected {
        let training = link.order.as_ref().and_then(|order| order.training.as_ref());
        lines.push(format!("  kept      {}", selection_text(selected, training)));
    }
    lines
}

pub(super) fn comparison_tables([a, b]: [&v1::Run; 2]) -> Vec<String> {
    let both = || [a, b].into_iter().flat_map(|run| &run.cycles_done);
    let of = |run: &v1::Run, cycle: u32, figure: &dyn Fn(&v1::CycleDone) -> String| {
        let done = run.cycles_done.iter().find(|done| done.cycle == cycle);
        done.map_or("-".into(), figure)
    };
    let heldout = |done: &v1::CycleDone| rate_text(done.heldout.as_ref());
    let kept = |done: &v1::CycleDone| format!("{}/{}", done.kept, done.sampled);
    let cycles: BTreeSet<u32> = both().map(|done| done.cycle).collect();
    let rows = cycles.iter().map(|cycle| {
        [
            cycle.to_string(),
            of(a, *cycle, &heldout),
            of(b, *cycle, &heldout),
            of(a, *cycle, &kept),
            of(b, *cycle, &kept),
        ]
    });
    let headings = [
        ">cycle",
        &format!(">held-out, {}", a.run),
        &format!(">held-out, {}", b.run),
        &format!(">kept, {}", a.run),
        &format!(">kept, {}", b.run),
    ];
    let mut tables = vec![output::fit_table(headings, rows, output::stdout_width())];
    let suites = both().flat_map(|done| done.suites.iter().map(|suite| (&suite.suite, done.cycle)));
    let suites: BTreeSet<(&String, u32)> = suites.collect();
    if !suites.is_empty() {
        let rows = suites.into_iter().map(|(name, cycle)| {
            let suite = |done: &v1::CycleDone| {
                let suite = done.suites.iter().find(|suite| suite.suite == *name);
                rate_text(suite.and_then(|suite| suite.rate.as_ref()))
            };
            [name.clone(), cycle.to_string(), of(a, cycle, &suite), of(b, cycle, &suite)]
        });
        let headings = ["suite", ">cycle", &format!(">{}", a.run), &format!(">{}", b.run)];
        tables.push(output::fit_table(headings, rows, output::stdout_width()));
    }
    tables
}
