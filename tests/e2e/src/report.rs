//! Recovery times of a chaos test: how fast the jobs of killed agents restart, and how fast a new
//! coordinator leads.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    journal::{JobStart, LeadershipChange},
    storm::{InjectedFault, ProcessKind},
};

/// Faults, log events and facts of a chaos test.
pub struct ChaosEvidence<'a> {
    pub faults: &'a [InjectedFault],
    pub job_starts: &'a [JobStart],
    pub leadership: &'a [LeadershipChange],
    /// The write time of each fact by subject, in seconds since the Unix epoch.
    pub written: &'a BTreeMap<String, f64>,
}

/// An unfinished job of an agent that was killed.
struct HeldJob<'a> {
    start: &'a JobStart,
    /// Its next start, on any agent.
    restarted_s: Option<f64>,
}

impl ChaosEvidence<'_> {
    pub fn to_json(&self) -> Value {
        let (mut restarts, mut undisturbed, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        let mut each = Vec::new();
        for fault in self.kills(ProcessKind::Agent) {
            let held = self.held_jobs(fault);
            for restarted_s in held.iter().filter_map(|held| held.restarted_s) {
                restarts.push(restarted_s - fault.at_s);
                each.push(json!([
                    fault.name,
                    restarted_s - fault.at_s,
                    self.faults_between(fault.at_s, restarted_s)
                ]));
                if !self.is_bus_hit(fault.at_s, restarted_s) {
                    undisturbed.push(restarted_s - fault.at_s);
                }
            }
            if fault.name.starts_with("generator") {
                let began = held.iter().map(|held| held.start.at_s).reduce(f64::min);
                lost.push(began.map_or(0.0, |began| fault.at_s - began));
            }
        }
        let takeovers =
            self.kills(ProcessKind::Coordinator).filter_map(|fault| self.takeover_s(fault));
        json!({
            "seconds_from_agent_kill_to_its_jobs_next_delivery": summary(restarts),
            "each_agent_kill_seconds_and_what_was_struck_meanwhile": each,
            "the_same_where_the_bus_was_not_struck_meanwhile": summary(undisturbed),
            "generation_seconds_lost_a_generator_kill": summary(lost),
            "seconds_from_leader_kill_to_next_leader": summary(takeovers.collect()),
        })
    }

    fn kills(&self, kind: ProcessKind) -> impl Iterator<Item = &InjectedFault> {
        self.faults.iter().filter(move |one| one.kind == kind && one.stopped_s.is_none())
    }

    fn faults_between(&self, from_s: f64, to_s: f64) -> Vec<String> {
        let hit = self.faults.iter().filter(|one| one.at_s > from_s - 8.0 && one.at_s < to_s);
        hit.map(|one| match one.stopped_s {
            None => format!("{} killed at {:.1}", one.name, one.at_s - from_s),
            Some(s) => format!("{} stopped at {:.1} for {s:.1}", one.name, one.at_s - from_s),
        })
        .collect()
    }

    fn is_bus_hit(&self, from_s: f64, to_s: f64) -> bool {
        let bus =
            |one: &&InjectedFault| matches!(one.kind, ProcessKind::NatsServer | ProcessKind::Up);
        self.faults.iter().filter(bus).any(|one| {
            let over_s = one.at_s + one.stopped_s.unwrap_or(1.0);
            one.at_s < to_s && over_s > from_s
        })
    }

    /// The unfinished jobs of the killed agent that were started again.
    fn held_jobs(&self, fault: &InjectedFault) -> Vec<HeldJob<'_>> {
        let mut last: BTreeMap<&str, &JobStart> = BTreeMap::new();
        for start in self.job_starts.iter().filter(|start| start.at_s < fault.at_s) {
            last.insert(&start.subject, start);
        }
        let held = last.into_values().filter(|start| start.agent == fault.name);
        let done = |start: &JobStart| {
            let result =
                result_subject(&start.subject).and_then(|result| self.written.get(&result));
            result.is_some_and(|at_s| *at_s < fault.at_s)
        };
        let restarts = |start: &JobStart| {
            let later = |one: &&JobStart| one.subject == start.subject && one.at_s > fault.at_s;
            self.job_starts.iter().find(later).map(|one| one.at_s)
        };
        held.filter(|start| !done(start))
            .map(|start| HeldJob { start, restarted_s: restarts(start) })
            .filter(|held| held.restarted_s.is_some())
            .collect()
    }

    /// Seconds until the next leader, if the killed coordinator was the leader.
    fn takeover_s(&self, fault: &InjectedFault) -> Option<f64> {
        let is_before = |at_s: f64| at_s < fault.at_s;
        let last = self.leadership.iter().rfind(|one| is_before(one.at_s))?;
        let killed_since = self
            .kills(ProcessKind::Coordinator)
            .any(|one| one.name == fault.name && is_before(one.at_s) && one.at_s > last.at_s);
        if !last.is_leader || last.coordinator != fault.name || killed_since {
            return None;
        }
        let next = self.leadership.iter().find(|one| one.is_leader && !is_before(one.at_s))?;
        Some(next.at_s - fault.at_s)
    }
}

/// The subject of the result of a job, if it follows from the subject of the job.
fn result_subject(subject: &str) -> Option<String> {
    let words: Vec<&str> = subject.split('.').collect();
    match words[..] {
        [_, run, "order", "generate", _, cycle, job, _] => {
            Some(format!("flotilla.{run}.samples.{cycle}.{job}"))
        }
        [_, run, "samples", cycle, job] => Some(format!("flotilla.{run}.verdicts.{cycle}.{job}")),
        _ => None,
    }
}

fn summary(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let rounded = |value: &f64| (value * 1000.0).round() / 1000.0;
    json!({
        "count": values.len(),
        "median": values.get(values.len() / 2).map(rounded),
        "max": values.last().map(rounded),
    })
}
