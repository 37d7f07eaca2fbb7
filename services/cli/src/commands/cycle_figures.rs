//! The results of cycles as text: tables, pass rates and findings.

use wire::v1;

use crate::output;

/// Returns lines about a cycle's pass@k rates, suites and gate findings, which have no table
/// column.
pub(crate) fn cycle_findings(done: &v1::CycleDone) -> Vec<String> {
    let cycle = done.cycle;
    let mut lines = Vec::new();
    if !done.pass_at.is_empty() {
        lines.push(format!("cycle {cycle}: {}", pass_at_text(&done.pass_at)));
    }
    for suite in &done.suites {
        let at = if suite.pass_at.is_empty() { "" } else { ", " };
        let (name, rate) = (&suite.suite, rate_text(suite.rate.as_ref()));
        lines.push(format!("cycle {cycle}: {name} {rate}{at}{}", pass_at_text(&suite.pass_at)));
    }
    for finding in &done.findings {
        let v1::cycle_done::Finding { gate, value, limit, .. } = finding;
        let then = match finding.then() {
            v1::gates::Then::RollBack => format!("rolled back to cycle {}", done.best),
            v1::gates::Then::Stop => format!("the run ends; cycle {} was the best", done.best),
            v1::gates::Then::Tell | v1::gates::Then::Unspecified => "the run continues".into(),
        };
        lines.push(match gate.as_str() {
            "patience" => format!("cycle {cycle}: {value} cycles without improvement; {then}"),
            _ => format!("cycle {cycle}: {gate} {value:.4} exceeds limit {limit:.4}; {then}"),
        });
    }
    lines
}

/// Returns pass@k rates with their intervals.
fn pass_at_text(all: &[v1::cycle_done::PassAt]) -> String {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let each = all.iter().map(|at| {
        let [mean, low, high] = [at.mean, at.low, at.high].map(percent);
        format!("pass@{} {mean} % ({low} to {high})", at.k)
    });
    each.collect::<Vec<String>>().join(", ")
}

/// Returns a pass rate in percent with its standard error, or `-`.
pub(crate) fn rate_text(rate: Option<&v1::cycle_done::Rate>) -> String {
    rate.map_or("-".into(), |rate| {
        format!("{:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    })
}

/// Returns a line with the energy per kept sample in joules. `None` if no agent could measure it.
pub(super) fn energy_line(done: &v1::CycleDone) -> Option<String> {
    let v1::CycleDone { cycle, sampled, kept, joules, metered, .. } = *done;
    if metered == 0 || kept == 0 {
        return None;
    }
    let each = joules / f64::from(metered) * f64::from(sampled) / f64::from(kept);
    let of = if metered < sampled {
        format!(", measured on {metered} of {sampled} samples")
    } else {
        String::new()
    };
    Some(format!("cycle {cycle}: {each:.1} J per kept sample{of}"))
}

/// Returns a table of checkpoints with their perplexity.
pub(crate) fn perplexities_table(run: &v1::Run) -> String {
    let rows = run.checkpoints.iter().filter_map(|info| info.checkpoint.as_ref()).map(|c| {
        let of = |e: &&v1::Eval| (e.cycle, e.step) == (c.cycle, c.step);
        let eval = run.evals.iter().find(of);
        let perplexity =
            eval.map_or("-".into(), |e| format!("{:.4} ± {:.4}", e.perplexity, e.stderr));
        let bits = eval.map_or("-".into(), |e| format!("{:.4}", e.bits_per_byte));
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let path = c.tree.as_ref().map_or(String::new(), |tree| tree.path.clone());
        [c.cycle.to_string(), c.step.to_string(), loss, perplexity, bits, path]
    });
    output::format_table(
        [">cycle", ">step", ">loss", ">perplexity", ">bits/byte", "in the store"],
        rows,
    )
}

/// Returns a table of finished cycles with their results.
pub(crate) fn cycles_table(run: &v1::Run) -> String {
    let rows = run.cycles_done.iter().map(|done| {
        let rate = rate_text(done.heldout.as_ref());
        let last = run.evals.iter().filter(|eval| eval.cycle == done.cycle).max_by_key(|e| e.step);
        let perplexity =
            last.map_or("-".into(), |e| format!("{:.4} ± {:.4}", e.perplexity, e.stderr));
        let agents: Vec<String> =
            done.samples_by_agent.iter().map(|(agent, n)| format!("{agent} {n}")).collect();
        let phases = [done.generate_s, done.verify_s, done.train_s, done.eval_s];
        let [generate, verify, train, evaluate] = phases.map(|s| format!("{s:.1}"));
        let kept = format!("{}/{}", done.kept, done.sampled);
        [
            done.cycle.to_string(),
            rate,
            perplexity,
            kept,
            generate,
            verify,
            train,
            evaluate,
            agents.join(", "),
        ]
    });
    let headings = [
        ">cycle",
        ">held-out pass rate",
        ">perplexity",
        ">kept",
        ">generate s",
        ">verify s",
        ">train s",
        ">eval s",
        "samples by agent",
    ];
    output::format_table(headings, rows)
}
