//! Whether a fact's message speaks of what its subject says.

use wire::{Body, Fact, Place};

/// The fields that contradict the subject, in one sentence; `None` when none does.
pub(super) fn disagreement(fact: &Fact) -> Option<String> {
    let subject = &fact.subject;
    let run = |run: &str| ("run", run == subject.run.as_str());
    let cycle_of = |cycle: u32, found: u32| ("cycle", cycle == found);
    let fields: Vec<(&str, bool)> = match (&subject.place, &fact.body) {
        (_, Body::Spec(spec)) => vec![run(&spec.run)],
        (Place::Plan { cycle }, Body::Plan(plan)) => vec![cycle_of(*cycle, plan.cycle)],
        (Place::GenerateOrder { cycle, job, attempt, .. }, Body::GenerateOrder(order)) => vec![
            run(&order.run),
            cycle_of(*cycle, order.cycle),
            ("job", order.job == job.as_str()),
            ("attempt", order.attempt == *attempt),
        ],
        (Place::Samples { cycle, job }, Body::Samples(samples)) => vec![
            run(&samples.run),
            cycle_of(*cycle, samples.cycle),
            ("job", samples.job == job.as_str()),
        ],
        (Place::Quarantine { agent, .. }, Body::Quarantine(quarantine)) => {
            vec![("agent", quarantine.agent == agent.as_str())]
        }
        (Place::Verdicts { cycle, job }, Body::Verdicts(verdicts)) => vec![
            run(&verdicts.run),
            cycle_of(*cycle, verdicts.cycle),
            ("job", verdicts.job == job.as_str()),
        ],
        (Place::Selection { cycle }, Body::Selected(selected)) => {
            vec![cycle_of(*cycle, selected.cycle)]
        }
        (Place::TrainOrder { cycle, attempt, .. }, Body::TrainOrder(order)) => vec![
            run(&order.run),
            cycle_of(*cycle, order.cycle),
            ("attempt", order.attempt == *attempt),
        ],
        (Place::Checkpoint { cycle, step }, Body::Checkpoint(checkpoint)) => vec![
            run(&checkpoint.run),
            cycle_of(*cycle, checkpoint.cycle),
            ("step", checkpoint.step == *step),
        ],
        (Place::Eval { cycle, step, suite }, Body::Eval(eval)) => vec![
            run(&eval.run),
            cycle_of(*cycle, eval.cycle),
            ("step", eval.step == *step),
            ("suite", eval.suite == suite.as_str()),
        ],
        (Place::Failure { kind, id, .. }, Body::Failure(failure)) => vec![
            run(&failure.run),
            ("kind", failure.kind == kind.as_str()),
            ("id", failure.id == *id),
        ],
        (Place::CycleDone { cycle }, Body::CycleDone(done)) => vec![cycle_of(*cycle, done.cycle)],
        (Place::Archived { cycle }, Body::Archived(archived)) => {
            vec![cycle_of(*cycle, archived.cycle)]
        }
        // Folding says so of a message that does not belong under its subject.
        _ => Vec::new(),
    };
    let wrong: Vec<&str> =
        fields.into_iter().filter(|(_, agrees)| !agrees).map(|(name, _)| name).collect();
    (!wrong.is_empty()).then(|| format!("its {} is not its subject's", wrong.join(", its ")))
}
