//! The quarantine of an agent that generates with wrong weights, read from the log.

use wire::{FactBody, Record, v1};

/// The quarantine state of one agent, folded from the `quarantine` facts that name it.
///
/// Only facts since the agent's start count: [`QuarantineState::mark_caught_up`] ends the replay of
/// older ones. A quarantine lasts until the agent is restarted.
#[derive(Debug, Clone)]
pub struct QuarantineState {
    agent: String,
    /// True once later facts are about the running process and not about an earlier one.
    caught_up: bool,
    /// The reason for users; `None` if the agent is not quarantined.
    reason: Option<String>,
}

impl QuarantineState {
    /// Creates the state of an agent that is not quarantined.
    pub fn new(agent: impl Into<String>) -> Self {
        Self { agent: agent.into(), caught_up: false, reason: None }
    }

    /// Records that the log has been replayed up to the agent's start; only facts applied later
    /// count.
    pub fn mark_caught_up(&mut self) {
        self.caught_up = true;
    }

    /// Applies the next fact of the log. A `quarantine` fact that names this agent quarantines it,
    /// once [`QuarantineState::mark_caught_up`] was called; all other facts are ignored.
    pub fn apply_fact(&mut self, record: &Record) {
        if let FactBody::Quarantine(quarantine) = &record.fact.body
            && quarantine.agent == self.agent
            && self.caught_up
        {
            let run = &record.fact.subject.run;
            self.reason = Some(format!(
                "in quarantine until restarted: {}",
                format_reason(quarantine, run.as_str())
            ));
        }
    }

    /// Returns the reason, for users, why the agent may not generate; `None` if it may.
    pub fn quarantine_reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

fn format_reason(quarantine: &v1::Quarantine, run: &str) -> String {
    let v1::Quarantine { said, reference, distance, tolerance, agreed, adapter, .. } = quarantine;
    let policy = if adapter.is_empty() { "the base" } else { "the adapter" };
    let apart = match distance {
        Some(distance) => format!("difference {distance:.3}, tolerance {tolerance}"),
        None => "not comparable token by token".into(),
    };
    format!(
        "wrong weights loaded for run {run}: canary log-prob {said:.3}, expected {reference:.3} \
         (from {}), {apart}; check that the engine loads {policy}",
        agreed.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use wire::Fact;

    use super::*;

    fn record(sequence: u64, agent: &str) -> Record {
        let payload = format!(r#"{{"agent":"{agent}","said":-2,"reference":-1,"agreed":["b"]}}"#);
        let subject = format!("flotilla.r1.quarantine.{agent}.1");
        let fact = Fact::from_json(&subject, payload.as_bytes()).unwrap();
        Record { sequence, time_ms: 0, author: None, fact }
    }

    #[test]
    fn only_quarantines_of_this_agent_since_its_start_count() {
        let mut state = QuarantineState::new("a");
        state.apply_fact(&record(1, "a"));
        state.mark_caught_up();
        state.apply_fact(&record(2, "b"));
        assert_eq!(state.quarantine_reason(), None);
        state.apply_fact(&record(3, "a"));
        let why = state.quarantine_reason().unwrap();
        assert!(
            why.contains("loaded for run r1") && why.contains("-2.000, expected -1.000 (from b)"),
            "{why}"
        );
        assert!(why.contains("until restarted"), "{why}");
    }
}
