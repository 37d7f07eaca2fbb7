//! Decides what happens to a run whose metrics got worse or stopped improving.

use std::cmp::Ordering;

use wire::{
    SuiteName,
    v1::{
        self,
        cycle_done::Finding,
        gates::{Gate, Then},
    },
};

use crate::state::{Cycle, Run};

/// The findings of the gates on a cycle, and what follows from them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct GateResult {
    /// The findings, those with the strictest action first.
    pub findings: Vec<Finding>,
    /// Cycle with the best metrics so far.
    pub best_cycle: u32,
    /// The strictest action of the findings.
    pub action: Then,
}

/// Compares the metrics of a cycle that is about to end (in `done`) with the gates of its run.
pub(crate) fn evaluate_gates(
    run: &Run,
    number: u32,
    cycle: &Cycle,
    done: &v1::CycleDone,
) -> GateResult {
    let best_before = previous_best(run, number);
    let gates = run.raft_spec().and_then(|raft| raft.gates.as_ref());
    let measured = cycle.final_checkpoint().is_some();
    let mut findings = Vec::new();
    if let (Some(gates), Some(best), true) = (gates, &best_before, measured) {
        let perplexities = gates.perplexity.iter();
        findings.extend(
            perplexities.filter_map(|gate| check_perplexity(run, number, best.cycle, gate)),
        );
        let before = run.cycles.get(&best.cycle).and_then(|cycle| cycle.done.as_ref());
        let rates = gates.pass_rate.iter().chain(&gates.pass_rates);
        findings.extend(rates.filter_map(|gate| check_pass_rate(done, before?, gate)));
    }
    findings.extend(gates.into_iter().flat_map(|gates| check_weighting(cycle, gates)));
    let spoiled = findings.iter().any(|finding| finding.then() >= Then::RollBack);
    let current = CycleScore::from_cycle(run, number, cycle, done.heldout.as_ref());
    let best = match best_before {
        _ if !measured || spoiled => best_before.map_or(number, |best| best.cycle),
        Some(best) if !current.is_better(&best) => best.cycle,
        _ => number,
    };
    // Diversity and entropy describe the policy that drew the samples, not the checkpoint trained
    // from them, so they do not affect which cycle is best.
    let diverse = gates.and_then(|gates| gates.diversity.as_ref());
    findings.extend(diverse.and_then(|gate| check_diversity(cycle, gate)));
    let uncertain = gates.and_then(|gates| gates.entropy.as_ref());
    findings.extend(uncertain.and_then(|gate| check_entropy(cycle, gate)));
    findings.extend(gates.and_then(|gates| check_patience(run, number, best, gates.patience)));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.then));
    let then = findings.first().map_or(Then::Unspecified, Finding::then);
    GateResult { findings, best_cycle: best, action: then }
}

/// Ranked by the held-out pass rate, then the perplexity of the first suite.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CycleScore {
    cycle: u32,
    pass_rate: Option<f64>,
    perplexity: Option<f64>,
}

impl CycleScore {
    fn from_cycle(
        run: &Run,
        number: u32,
        cycle: &Cycle,
        heldout: Option<&v1::cycle_done::Rate>,
    ) -> Self {
        let suite = run.spec.suites.first().map(|suite| suite.name.as_str());
        let perplexity = suite.and_then(|suite| final_perplexity(run, number, suite));
        let measured = cycle.final_checkpoint().is_some();
        let pass_rate = heldout.filter(|_| measured).map(|rate| rate.mean);
        Self { cycle: number, pass_rate, perplexity }
    }

    /// Returns true if this cycle ranks above the other. Ties keep the older cycle; if neither has
    /// comparable metrics, the newer one wins.
    fn is_better(&self, than: &Self) -> bool {
        let rates =
            self.pass_rate.zip(than.pass_rate).map(|(ours, theirs)| ours.total_cmp(&theirs));
        let perplexities = self.perplexity.zip(than.perplexity);
        match rates {
            Some(Ordering::Greater) => true,
            Some(Ordering::Less) => false,
            Some(Ordering::Equal) => perplexities.is_some_and(|(ours, theirs)| ours < theirs),
            None => perplexities.is_none_or(|(ours, theirs)| ours < theirs),
        }
    }
}

fn previous_best(run: &Run, number: u32) -> Option<CycleScore> {
    let (_, last) = run.cycles.range(..number).rev().find(|(_, cycle)| cycle.done.is_some())?;
    let best = last.done.as_ref()?.best;
    let cycle = run.cycles.get(&best)?;
    let heldout = cycle.done.as_ref().and_then(|done| done.heldout.as_ref());
    Some(CycleScore::from_cycle(run, best, cycle, heldout))
}

/// Returns `None` if the perplexity was not measured or is not finite.
fn final_perplexity(run: &Run, number: u32, suite: &str) -> Option<f64> {
    let cycle = run.cycles.get(&number)?;
    let step = cycle.final_checkpoint()?.step;
    let eval = cycle.evals.get(&(step, SuiteName::new(suite).ok()?))?;
    Some(eval.perplexity).filter(|perplexity| perplexity.is_finite())
}

/// Compares with the best cycle by a relative margin.
fn check_perplexity(run: &Run, number: u32, best: u32, gate: &Gate) -> Option<Finding> {
    let value = final_perplexity(run, number, &gate.suite)?;
    let best = final_perplexity(run, best, &gate.suite)?;
    let limit = best * (1.0 + gate.margin);
    let name = format!("perplexity of {}", gate.suite);
    (value > limit).then(|| new_finding(&name, value, best, limit, gate.then()))
}

/// Compares with the best cycle by an absolute margin.
fn check_pass_rate(done: &v1::CycleDone, best: &v1::CycleDone, gate: &Gate) -> Option<Finding> {
    let (value, best) = (mean_pass_rate(done, &gate.suite)?, mean_pass_rate(best, &gate.suite)?);
    let limit = best - gate.margin;
    let name = match gate.suite.as_str() {
        "" => "pass rate".to_owned(),
        suite => format!("pass rate of {suite}"),
    };
    (value < limit).then(|| new_finding(&name, value, best, limit, gate.then()))
}

/// Returns the rate of the run's own held-out prompts if `suite` is empty.
fn mean_pass_rate(done: &v1::CycleDone, suite: &str) -> Option<f64> {
    let rate = match suite {
        "" => done.heldout.as_ref(),
        name => done.suites.iter().find(|found| found.suite == name)?.rate.as_ref(),
    };
    rate.map(|rate| rate.mean)
}

fn check_diversity(cycle: &Cycle, gate: &Gate) -> Option<Finding> {
    check_minimum("diversity", cycle.selected.as_ref()?.diversity, gate)
}

fn check_entropy(cycle: &Cycle, gate: &Gate) -> Option<Finding> {
    check_minimum("entropy", cycle.selected.as_ref()?.entropy?, gate)
}

/// Limits the last checkpoint's dropped tokens and divergence, as its objective measured them.
fn check_weighting(cycle: &Cycle, gates: &v1::Gates) -> Vec<Finding> {
    let checkpoint = cycle.final_checkpoint();
    let Some(found) = checkpoint.and_then(|it| it.weighting.as_ref()) else { return Vec::new() };
    let values = [
        ("dropped tokens", Some(found.dropped_share()), &gates.dropped_tokens),
        ("divergence", found.divergence, &gates.divergence),
    ];
    values
        .into_iter()
        .filter_map(|(name, value, gate)| check_maximum(name, value?, gate.as_ref()?))
        .collect()
}

fn check_maximum(name: &str, value: f64, gate: &Gate) -> Option<Finding> {
    let limit = gate.margin;
    (value > limit).then(|| new_finding(name, value, limit, limit, gate.then()))
}

fn check_minimum(name: &str, value: f64, gate: &Gate) -> Option<Finding> {
    let limit = gate.margin;
    (value < limit).then(|| new_finding(name, value, limit, limit, gate.then()))
}

/// Finds that too many cycles have passed since the best one. The last cycle of a run is exempt.
fn check_patience(run: &Run, number: u32, best: u32, patience: u32) -> Option<Finding> {
    let since = number.saturating_sub(best);
    // The last cycle ends the run anyway.
    let impatient = patience > 0 && since >= patience && number < run.last_cycle();
    impatient.then(|| {
        let (since, most) = (f64::from(since), f64::from(patience));
        new_finding("patience", since, f64::from(best), most, Then::Stop)
    })
}

fn new_finding(gate: &str, value: f64, best: f64, limit: f64, then: Then) -> Finding {
    Finding { gate: gate.to_owned(), value, best, limit, then: then.into() }
}
