//! What becomes of a run whose figures got worse, or no better.

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

/// What a cycle's figures mean for the run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Judgement {
    /// Worst first.
    pub findings: Vec<Finding>,
    /// The cycle with the best figures so far.
    pub best: u32,
    pub then: Then,
}

/// Whether what a cycle's figures turn out to be may end the run, or take its checkpoint back.
pub(crate) fn may_turn(raft: &v1::spec::Raft) -> bool {
    let Some(gates) = &raft.gates else { return false };
    let rates = gates.pass_rate.iter().chain(&gates.pass_rates);
    let of_samples = gates.diversity.iter().chain(&gates.entropy);
    let mut all = gates.perplexity.iter().chain(rates).chain(of_samples);
    gates.patience > 0 || all.any(|gate| gate.then() >= Then::RollBack)
}

/// Judges a cycle that is about to be done; `done` holds its figures.
pub(crate) fn judge(run: &Run, number: u32, cycle: &Cycle, done: &v1::CycleDone) -> Judgement {
    let best_before = best_before(run, number);
    let gates = run.raft().and_then(|raft| raft.gates.as_ref());
    let measured = cycle.final_checkpoint().is_some();
    let mut findings = Vec::new();
    if let (Some(gates), Some(best), true) = (gates, &best_before, measured) {
        let perplexities = gates.perplexity.iter();
        findings.extend(perplexities.filter_map(|gate| perplexity(run, number, best.cycle, gate)));
        let before = run.cycles.get(&best.cycle).and_then(|cycle| cycle.done.as_ref());
        let rates = gates.pass_rate.iter().chain(&gates.pass_rates);
        findings.extend(rates.filter_map(|gate| pass_rate(done, before?, gate)));
    }
    let spoiled = findings.iter().any(|finding| finding.then() >= Then::RollBack);
    let here = Best::of(run, number, cycle, done.heldout.as_ref());
    let best = match best_before {
        _ if !measured || spoiled => best_before.map_or(number, |best| best.cycle),
        Some(best) if !here.is_better(&best) => best.cycle,
        _ => number,
    };
    // That is about what drew the samples, not about what was made of them.
    let diverse = gates.and_then(|gates| gates.diversity.as_ref());
    findings.extend(diverse.and_then(|gate| diversity(cycle, gate)));
    let uncertain = gates.and_then(|gates| gates.entropy.as_ref());
    findings.extend(uncertain.and_then(|gate| entropy(cycle, gate)));
    findings.extend(gates.and_then(|gates| patience(run, number, best, gates.patience)));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.then));
    let then = findings.first().map_or(Then::Unspecified, Finding::then);
    Judgement { findings, best, then }
}

/// A cycle and what it is compared by: the held-out pass rate where there is one, and where that
/// does not tell two apart the perplexity of the first suite.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Best {
    cycle: u32,
    pass_rate: Option<f64>,
    perplexity: Option<f64>,
}

impl Best {
    fn of(run: &Run, number: u32, cycle: &Cycle, heldout: Option<&v1::cycle_done::Rate>) -> Self {
        let suite = run.spec.suites.first().map(|suite| suite.name.as_str());
        let perplexity = suite.and_then(|suite| perplexity_of(run, number, suite));
        let measured = cycle.final_checkpoint().is_some();
        let pass_rate = heldout.filter(|_| measured).map(|rate| rate.mean);
        Self { cycle: number, pass_rate, perplexity }
    }

    /// Of two that are equal the older one stays; of two that nothing was measured of, the newer.
    fn is_better(&self, than: &Self) -> bool {
        let rates = self.pass_rate.zip(than.pass_rate).map(|(here, there)| here.total_cmp(&there));
        let perplexities = self.perplexity.zip(than.perplexity);
        match rates {
            Some(Ordering::Greater) => true,
            Some(Ordering::Less) => false,
            Some(Ordering::Equal) => perplexities.is_some_and(|(here, there)| here < there),
            None => perplexities.is_none_or(|(here, there)| here < there),
        }
    }
}

/// The best of the cycles before, as the last of them said.
fn best_before(run: &Run, number: u32) -> Option<Best> {
    let (_, last) = run.cycles.range(..number).rev().find(|(_, cycle)| cycle.done.is_some())?;
    let best = last.done.as_ref()?.best;
    let cycle = run.cycles.get(&best)?;
    let heldout = cycle.done.as_ref().and_then(|done| done.heldout.as_ref());
    Some(Best::of(run, best, cycle, heldout))
}

/// Of the checkpoint a cycle ended with.
fn perplexity_of(run: &Run, number: u32, suite: &str) -> Option<f64> {
    let cycle = run.cycles.get(&number)?;
    let step = cycle.final_checkpoint()?.step;
    let eval = cycle.evals.get(&(step, SuiteName::new(suite).ok()?))?;
    Some(eval.perplexity).filter(|perplexity| perplexity.is_finite())
}

fn perplexity(run: &Run, number: u32, best: u32, gate: &Gate) -> Option<Finding> {
    let value = perplexity_of(run, number, &gate.suite)?;
    let best = perplexity_of(run, best, &gate.suite)?;
    let limit = best * (1.0 + gate.margin);
    let name = format!("perplexity of {}", gate.suite);
    (value > limit).then(|| finding(&name, value, best, limit, gate.then()))
}

fn pass_rate(done: &v1::CycleDone, best: &v1::CycleDone, gate: &Gate) -> Option<Finding> {
    let (value, best) = (rate_of(done, &gate.suite)?, rate_of(best, &gate.suite)?);
    let limit = best - gate.margin;
    let name = match gate.suite.as_str() {
        "" => "pass rate".to_owned(),
        suite => format!("pass rate of {suite}"),
    };
    (value < limit).then(|| finding(&name, value, best, limit, gate.then()))
}

/// Of a prompt suite, or of the run's own held-out prompts.
fn rate_of(done: &v1::CycleDone, suite: &str) -> Option<f64> {
    let rate = match suite {
        "" => done.heldout.as_ref(),
        name => done.suites.iter().find(|found| found.suite == name)?.rate.as_ref(),
    };
    rate.map(|rate| rate.mean)
}

fn diversity(cycle: &Cycle, gate: &Gate) -> Option<Finding> {
    below("diversity", cycle.selected.as_ref()?.diversity, gate)
}

fn entropy(cycle: &Cycle, gate: &Gate) -> Option<Finding> {
    below("entropy", cycle.selected.as_ref()?.entropy?, gate)
}

fn below(name: &str, value: f64, gate: &Gate) -> Option<Finding> {
    let limit = gate.margin;
    (value < limit).then(|| finding(name, value, limit, limit, gate.then()))
}

fn patience(run: &Run, number: u32, best: u32, patience: u32) -> Option<Finding> {
    let since = number.saturating_sub(best);
    // A run that ends anyway needs no reason.
    let impatient = patience > 0 && since >= patience && number < run.last_cycle();
    impatient.then(|| {
        let (since, most) = (f64::from(since), f64::from(patience));
        finding("patience", since, f64::from(best), most, Then::Stop)
    })
}

fn finding(gate: &str, value: f64, best: f64, limit: f64, then: Then) -> Finding {
    Finding { gate: gate.to_owned(), value, best, limit, then: then.into() }
}
