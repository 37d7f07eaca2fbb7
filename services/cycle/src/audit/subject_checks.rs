//! Checks that the fields of a fact match its subject.

use wire::{Fact, FactBody, FactKey};

pub(super) fn check_subject(fact: &Fact) -> Option<String> {
    let subject = &fact.subject;
    let run = |run: &str| ("run", run == subject.run.as_str());
    let cycle_of = |cycle: u32, found: u32| ("cycle", cycle == found);
    let fields: Vec<(&str, bool)> = match (&subject.key, &fact.body) {
        (_, FactBody::Spec(spec)) => vec![run(&spec.run)],
        (FactKey::Plan { cycle }, FactBody::Plan(plan)) => vec![cycle_of(*cycle, plan.cycle)],
        (FactKey::GenerateOrder { cycle, job, attempt, .. }, FactBody::GenerateOrder(order)) => {
            vec![
                run(&order.run),
                cycle_of(*cycle, order.cycle),
                ("job", order.job == job.as_str()),
                ("attempt", order.attempt == *attempt),
            ]
        }
        (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => vec![
            run(&samples.run),
            cycle_of(*cycle, samples.cycle),
            ("job", samples.job == job.as_str()),
        ],
        (FactKey::Quarantine { agent, .. }, FactBody::Quarantine(quarantine)) => {
            vec![("agent", quarantine.agent == agent.as_str())]
        }
        (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => vec![
            run(&verdicts.run),
            cycle_of(*cycle, verdicts.cycle),
            ("job", verdicts.job == job.as_str()),
        ],
        (FactKey::Selection { cycle }, FactBody::Selected(selected)) => {
            vec![cycle_of(*cycle, selected.cycle)]
        }
        (FactKey::TrainOrder { cycle, attempt, .. }, FactBody::TrainOrder(order)) => vec![
            run(&order.run),
            cycle_of(*cycle, order.cycle),
            ("attempt", order.attempt == *attempt),
        ],
        (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => vec![
            run(&checkpoint.run),
            cycle_of(*cycle, checkpoint.cycle),
            ("step", checkpoint.step == *step),
        ],
        (FactKey::WatchedCheckpoint { step }, FactBody::Checkpoint(checkpoint)) => vec![
            run(&checkpoint.run),
            cycle_of(0, checkpoint.cycle),
            ("step", checkpoint.step == *step),
        ],
        (FactKey::Eval { cycle, step, suite }, FactBody::Eval(eval)) => vec![
            run(&eval.run),
            cycle_of(*cycle, eval.cycle),
            ("step", eval.step == *step),
            ("suite", eval.suite == suite.as_str()),
        ],
        (FactKey::PassRates { cycle }, FactBody::PassRates(rates)) => {
            vec![run(&rates.run), cycle_of(*cycle, rates.cycle)]
        }
        (FactKey::Failure { kind, id, .. }, FactBody::Failure(failure)) => vec![
            run(&failure.run),
            ("kind", failure.kind == kind.as_str()),
            ("id", failure.id == *id),
        ],
        (FactKey::CycleDone { cycle }, FactBody::CycleDone(done)) => {
            vec![cycle_of(*cycle, done.cycle)]
        }
        (FactKey::Archived { cycle }, FactBody::Archived(archived)) => {
            vec![cycle_of(*cycle, archived.cycle)]
        }
        // The fold reports a message that does not belong under its subject.
        _ => Vec::new(),
    };
    let wrong: Vec<&str> =
        fields.into_iter().filter(|(_, agrees)| !agrees).map(|(name, _)| name).collect();
    (!wrong.is_empty()).then(|| format!("its {} is not its subject's", wrong.join(", its ")))
}
