//! Checks that the fields of a fact match its subject.

use wire::{Fact, FactBody, FactKey, Subject};

/// Names of fields, each with whether it agrees with the subject.
type Fields = Vec<(&'static str, bool)>;

pub(super) fn check_subject(fact: &Fact) -> Option<String> {
    let Fact { subject, body } = fact;
    let mut fields = compare_decision(subject, body);
    fields.extend(compare_result(subject, body));
    let wrong: Vec<&str> =
        fields.into_iter().filter(|(_, agrees)| !agrees).map(|(name, _)| name).collect();
    (!wrong.is_empty()).then(|| format!("its {} is not its subject's", wrong.join(", its ")))
}

fn compare_run(subject: &Subject, run: &str) -> (&'static str, bool) {
    ("run", run == subject.run.as_str())
}

fn compare_cycle(cycle: u32, found: u32) -> (&'static str, bool) {
    ("cycle", cycle == found)
}

/// Compares what users and coordinators write; empty for other facts.
fn compare_decision(subject: &Subject, body: &FactBody) -> Fields {
    let run = |run: &str| compare_run(subject, run);
    match (&subject.key, body) {
        (_, FactBody::Spec(spec)) => vec![run(&spec.run)],
        (FactKey::Plan { cycle }, FactBody::Plan(plan)) => vec![compare_cycle(*cycle, plan.cycle)],
        (FactKey::GenerateOrder { cycle, job, attempt, .. }, FactBody::GenerateOrder(order)) => {
            vec![
                run(&order.run),
                compare_cycle(*cycle, order.cycle),
                ("job", order.job == job.as_str()),
                ("attempt", order.attempt == *attempt),
            ]
        }
        (FactKey::TrainOrder { cycle, attempt, .. }, FactBody::TrainOrder(order)) => vec![
            run(&order.run),
            compare_cycle(*cycle, order.cycle),
            ("attempt", order.attempt == *attempt),
        ],
        (FactKey::TrainPartOrder { cycle, attempt, .. }, FactBody::TrainOrder(order)) => vec![
            run(&order.run),
            compare_cycle(*cycle, order.cycle),
            ("attempt", order.attempt == *attempt),
        ],
        (FactKey::SlicePlan { cycle, outer }, FactBody::SlicePlan(plan)) => {
            vec![compare_cycle(*cycle, plan.cycle), ("outer step", plan.outer == *outer)]
        }
        (FactKey::SliceClose { cycle, outer }, FactBody::SliceClose(close)) => {
            vec![compare_cycle(*cycle, close.cycle), ("outer step", close.outer == *outer)]
        }
        (FactKey::Quarantine { agent, .. }, FactBody::Quarantine(quarantine)) => {
            vec![("agent", quarantine.agent == agent.as_str())]
        }
        (FactKey::Selection { cycle }, FactBody::Selected(selected)) => {
            vec![compare_cycle(*cycle, selected.cycle)]
        }
        (FactKey::PassRates { cycle }, FactBody::PassRates(rates)) => {
            vec![run(&rates.run), compare_cycle(*cycle, rates.cycle)]
        }
        (FactKey::CycleDone { cycle }, FactBody::CycleDone(done)) => {
            vec![compare_cycle(*cycle, done.cycle)]
        }
        (FactKey::Archived { cycle }, FactBody::Archived(archived)) => {
            vec![compare_cycle(*cycle, archived.cycle)]
        }
        // The fold reports a message that does not belong under its subject.
        _ => Vec::new(),
    }
}

/// Compares what agents write; empty for other facts.
fn compare_result(subject: &Subject, body: &FactBody) -> Fields {
    let run = |run: &str| compare_run(subject, run);
    match (&subject.key, body) {
        (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => vec![
            run(&samples.run),
            compare_cycle(*cycle, samples.cycle),
            ("job", samples.job == job.as_str()),
        ],
        (FactKey::Declined { cycle, job, attempt, agent }, FactBody::Declined(declined)) => vec![
            run(&declined.run),
            compare_cycle(*cycle, declined.cycle),
            ("job", declined.job == job.as_str()),
            ("attempt", declined.attempt == *attempt),
            ("agent", declined.agent == agent.as_str()),
        ],
        (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => vec![
            run(&verdicts.run),
            compare_cycle(*cycle, verdicts.cycle),
            ("job", verdicts.job == job.as_str()),
        ],
        (FactKey::Scores { cycle, job }, FactBody::Scores(scores)) => vec![
            run(&scores.run),
            compare_cycle(*cycle, scores.cycle),
            ("job", scores.job == job.as_str()),
        ],
        (FactKey::Delta { cycle, outer, slice }, FactBody::Delta(delta)) => vec![
            run(&delta.run),
            compare_cycle(*cycle, delta.cycle),
            ("outer step", delta.outer == *outer),
            ("slice", delta.slice == *slice),
        ],
        (FactKey::Merge { cycle, outer }, FactBody::Merge(merge)) => vec![
            run(&merge.run),
            compare_cycle(*cycle, merge.cycle),
            ("outer step", merge.outer == *outer),
        ],
        (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => vec![
            run(&checkpoint.run),
            compare_cycle(*cycle, checkpoint.cycle),
            ("step", checkpoint.step == *step),
        ],
        (FactKey::WatchedCheckpoint { step }, FactBody::Checkpoint(checkpoint)) => vec![
            run(&checkpoint.run),
            compare_cycle(0, checkpoint.cycle),
            ("step", checkpoint.step == *step),
        ],
        (FactKey::Eval { cycle, step, suite }, FactBody::Eval(eval)) => vec![
            run(&eval.run),
            compare_cycle(*cycle, eval.cycle),
            ("step", eval.step == *step),
            ("suite", eval.suite == suite.as_str()),
        ],
        (FactKey::Failure { kind, id, .. }, FactBody::Failure(failure)) => vec![
            run(&failure.run),
            ("kind", failure.kind == kind.as_str()),
            ("id", failure.id == *id),
        ],
        _ => Vec::new(),
    }
}
