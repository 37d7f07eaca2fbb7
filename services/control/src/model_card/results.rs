//! The figures of a card: held-out pass rates and perplexities, before and after.

use std::fmt::Write;

use wire::v1;

use super::CardFacts;

/// A figure on a held-out text or on held-out prompts.
pub(super) struct HeldOutFigure {
    /// As the hub names it.
    pub(super) metric: String,
    /// As people name it.
    pub(super) name: &'static str,
    pub(super) suite: String,
    /// Digest of the text or the prompts.
    pub(super) digest: String,
    /// Of cycle 0, which is the base; the value and its standard error.
    pub(super) before: Option<(f64, f64)>,
    pub(super) after: Option<(f64, f64)>,
}

const PASS_RATE: &str = "pass rate";
const PERPLEXITY: &str = "perplexity";

/// Returns the figures of a checkpoint and of the base, in the order of the spec.
pub(super) fn held_out_figures(facts: &CardFacts<'_>) -> Vec<HeldOutFigure> {
    let mut figures = pass_rates(facts);
    let (before, after) = (base_step(facts), Some((facts.checkpoint.cycle, facts.checkpoint.step)));
    for suite in &facts.run.spec.suites {
        let figure = |place: Option<(u32, u32)>| find_perplexity(facts, place?, &suite.name);
        figures.push(HeldOutFigure {
            metric: PERPLEXITY.to_owned(),
            name: PERPLEXITY,
            suite: suite.name.clone(),
            digest: suite.text.clone().unwrap_or_default().digest,
            before: figure(before),
            after: figure(after),
        });
    }
    figures.retain(|figure| figure.after.is_some());
    figures
}

/// Returns the cycle and step of the base's own figures; `None` if the run did not measure them.
fn base_step(facts: &CardFacts<'_>) -> Option<(u32, u32)> {
    facts.run.raft_spec()?;
    let (step, _) = facts.run.cycles.get(&0)?.checkpoints.last_key_value()?;
    (facts.checkpoint.cycle > 0).then_some((0, *step))
}

fn find_perplexity(
    facts: &CardFacts<'_>,
    (cycle, step): (u32, u32),
    suite: &str,
) -> Option<(f64, f64)> {
    let evals = &facts.run.cycles.get(&cycle)?.evals;
    let found = evals.iter().find(|((at, name), _)| *at == step && name.as_str() == suite)?;
    Some((found.1.perplexity, found.1.stderr))
}

fn pass_rates(facts: &CardFacts<'_>) -> Vec<HeldOutFigure> {
    let Some(raft) = facts.run.raft_spec() else { return Vec::new() };
    let done = |cycle: u32| facts.run.cycles.get(&cycle)?.done.as_ref();
    let before = base_step(facts).and_then(|(cycle, _)| done(cycle));
    // Only the last checkpoint of a cycle is measured.
    let after = done(facts.checkpoint.cycle).filter(|_| facts.checkpoint.r#final);
    let figure = |suite: &str, digest: String, rate: &RateOf<'_>| HeldOutFigure {
        metric: "pass@1".to_owned(),
        name: PASS_RATE,
        suite: suite.to_owned(),
        digest,
        before: before.and_then(rate).map(|rate| (rate.mean, rate.stderr)),
        after: after.and_then(rate).map(|rate| (rate.mean, rate.stderr)),
    };
    let digest = |blob: &Option<v1::Blob>| blob.clone().unwrap_or_default().digest;
    let own = figure("held-out prompts", digest(&raft.heldout), &|done| done.heldout.as_ref());
    let suites = raft.prompt_suites.iter().map(|suite| {
        figure(&suite.name, digest(&suite.prompts), &|done| {
            done.suites.iter().find(|it| it.suite == suite.name)?.rate.as_ref()
        })
    });
    [own].into_iter().chain(suites).collect()
}

type RateOf<'a> = dyn Fn(&v1::CycleDone) -> Option<&v1::cycle_done::Rate> + 'a;

pub(super) fn results_section(facts: &CardFacts<'_>) -> String {
    let mut text = "## Results\n\n".to_owned();
    let figures = held_out_figures(facts);
    if figures.is_empty() {
        text.push_str("This checkpoint was not measured.\n");
        return text;
    }
    text.push_str("| figure | base | this model |\n|---|---:|---:|\n");
    for figure in &figures {
        let HeldOutFigure { name, suite, before, after, .. } = figure;
        let cell = |value: &Option<(f64, f64)>| match value {
            Some((mean, error)) if *name == PASS_RATE => {
                format!("{:.1} % ± {:.1}", mean * 100.0, error * 100.0)
            }
            Some((mean, error)) => format!("{mean:.4} ± {error:.4}"),
            None => "-".to_owned(),
        };
        let _ = writeln!(text, "| {name}, {suite} | {} | {} |", cell(before), cell(after));
    }
    text.push_str("\n± is one standard error. ");
    if let Some(rate) = measured_rate(facts) {
        let v1::cycle_done::Rate { prompts, samples, .. } = rate;
        let _ = write!(text, "Pass rates are of {samples} samples of {prompts} prompts. ");
    }
    text.push_str("Held-out prompts and texts were not trained on.\n");
    if facts.request.info.best && facts.run.raft_spec().is_some_and(|raft| raft.cycles > 1) {
        text.push_str(
            "It is the best checkpoint of its run by these figures, which are optimistic for that \
             reason.\n",
        );
    }
    text
}

fn measured_rate<'a>(facts: &'a CardFacts<'_>) -> Option<&'a v1::cycle_done::Rate> {
    let cycle = facts.run.cycles.get(&facts.checkpoint.cycle)?;
    cycle.done.as_ref()?.heldout.as_ref().filter(|_| facts.checkpoint.r#final)
}
