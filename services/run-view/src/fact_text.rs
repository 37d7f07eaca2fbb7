//! Facts of a run as single lines of text.

use cycle::Run;
use wire::{FactBody, FactKey, Record, RunId, v1};

/// Returns one line about a fact of a run, or `None` for facts that progress displays leave out.
pub fn describe_fact(run: &Run, record: &Record) -> Option<String> {
    let id = &run.id;
    Some(match (&record.fact.subject.key, &record.fact.body) {
        (_, FactBody::Spec(spec)) => watched_spec(run).map_or_else(
            || format!("{id}: {} run, seed {}", run.kind_name(), spec.seed),
            |watched| format!("{id}: watched run of {} on {}", watched.source, watched.host),
        ),
        (_, FactBody::Control(control)) => {
            let action = control.action().as_str_name().to_lowercase();
            let by = wire::control_user(control, record.author.as_ref());
            let by = by.as_ref().map(wire::AgentId::as_str);
            format!("{id}: {}", describe_control(&action, by, &control.reason))
        }
        (FactKey::Plan { cycle }, FactBody::Plan(plan)) => {
            let samples: u32 = plan.jobs.iter().flat_map(|job| &job.draws).map(|d| d.count).sum();
            match plan.jobs.len() {
                0 => format!("{id}: cycle {cycle}: nothing to sample"),
                jobs => format!("{id}: cycle {cycle}: {samples} samples planned in {jobs} jobs"),
            }
        }
        (_, FactBody::Selected(selected)) => describe_selection(id, selected),
        (_, FactBody::Checkpoint(v1::Checkpoint { step: 0, .. })) => return None,
        (_, FactBody::Checkpoint(c)) => {
            format!(
                "{id}: cycle {}: checkpoint {}/{}, loss {:.4}",
                c.cycle, c.step, c.steps, c.loss
            )
        }
        (_, FactBody::Delta(d)) if d.steps > 0 => format!(
            "{id}: cycle {}: outer step {}: {} steps from {} on {}, loss {:.4}",
            d.cycle, d.outer, d.steps, d.first, d.agent, d.loss
        ),
        (_, FactBody::Merge(m)) if m.outer > 0 => {
            let count = m.deltas.len();
            let slices = if count == 1 { "slice" } else { "slices" };
            let (cycle, outer, agent) = (m.cycle, m.outer, &m.agent);
            format!("{id}: cycle {cycle}: outer step {outer}: merged {count} {slices} on {agent}")
        }
        (_, FactBody::Eval(e)) => format!(
            "{id}: cycle {}: step {}, {}: perplexity {:.4} ± {:.4} ({})",
            e.cycle, e.step, e.suite, e.perplexity, e.stderr, e.agent
        ),
        (_, FactBody::Failure(f)) => {
            let end = if f.r#final { "given up" } else { "will be retried" };
            format!("{id}: {} {} failed on {}, {end}: {}", f.kind, f.id, f.agent, f.message)
        }
        (_, FactBody::Quarantine(found)) => {
            format!("{id}: {}", describe_quarantine(found))
        }
        (_, FactBody::CycleDone(done)) => describe_cycle_done(id, done),
        (_, FactBody::Done(done)) => {
            let reason = if done.message.is_empty() { "" } else { ": " };
            let status = done.status().as_str_name().to_lowercase();
            format!("{id}: {status}{reason}{}", done.message)
        }
        _ => return None,
    })
}

/// Returns a line for each different failure, such as `17 verify jobs failed on box-1, last 3-12 in
/// try 2: no such file`.
pub fn failure_lines(failures: &[v1::Failure]) -> Vec<String> {
    let mut groups: Vec<(usize, &v1::Failure)> = Vec::new();
    for failure in failures {
        let key = |it: &v1::Failure| (it.kind.clone(), it.agent.clone(), it.message.clone());
        match groups.iter_mut().find(|(_, group)| key(group) == key(failure)) {
            Some((count, last)) => (*count, *last) = (*count + 1, failure),
            None => groups.push((1, failure)),
        }
    }
    let line = |(count, failure): (usize, &v1::Failure)| {
        let v1::Failure { kind, id, attempt, agent, message, .. } = failure;
        match count {
            1 => format!("{kind} {id} failed on {agent} in try {attempt}: {message}"),
            _ => format!(
                "{count} {kind} jobs failed on {agent}, last {id} in try {attempt}: {message}"
            ),
        }
    };
    groups.into_iter().map(line).collect()
}

/// Returns words such as `pause by ann: the fan is loud`.
pub fn describe_control(action: &str, by: Option<&str>, reason: &str) -> String {
    let by = by.map_or(String::new(), |user| format!(" by {user}"));
    let colon = if reason.is_empty() { "" } else { ": " };
    format!("{action}{by}{colon}{reason}")
}

fn watched_spec(run: &Run) -> Option<&v1::spec::Watched> {
    match &run.spec.kind {
        Some(v1::spec::Kind::Watched(watched)) => Some(watched),
        _ => None,
    }
}

fn describe_selection(id: &RunId, selected: &v1::Selected) -> String {
    let dropped: Vec<String> =
        selected.dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let v1::Selected { cycle, kept, considered, .. } = selected;
    format!("{id}: cycle {cycle}: kept {kept} of {considered} ({})", dropped.join(", "))
}

fn describe_cycle_done(id: &RunId, done: &v1::CycleDone) -> String {
    let heldout = done.heldout.as_ref().map_or(String::new(), |rate| {
        format!(": held-out pass rate {:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    });
    let suites = done.suites.iter().filter_map(|suite| Some((&suite.suite, suite.rate?)));
    let suites = suites.map(|(name, rate)| format!(", {name} {:.1} %", rate.mean * 100.0));
    format!("{id}: cycle {} done{heldout}{}", done.cycle, suites.collect::<String>())
}

/// Returns one line about a quarantine.
pub fn describe_quarantine(quarantine: &v1::Quarantine) -> String {
    let v1::Quarantine { agent, said, reference, agreed, jobs, .. } = quarantine;
    format!(
        "{agent} is in quarantine: it sampled with other weights than it was ordered to ({said:.4} \
         nats per token where {} have {reference:.4}); {} of its jobs are drawn again",
        agreed.join(", "),
        jobs.len()
    )
}
