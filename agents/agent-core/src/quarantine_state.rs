//! The quarantine of an agent for sampling with wrong weights, as recorded in the log.

use wire::{FactBody, Record, v1};

/// The quarantine state of one agent, folded from the `quarantine` facts that name it.
///
/// Facts from before the agent's start do not count: call [`QuarantineState::mark_caught_up`] when
/// the log has been replayed. A quarantine lasts until the agent is restarted.
#[derive(Debug, Clone)]
pub struct QuarantineState {
    /// Id of the agent.
    agent: String,
    /// True once later facts are about the running process and not about an earlier one.
    caught_up: bool,
    /// Message about the quarantine; `None` if the agent is not quarantined.
    reason: Option<String>,
}

impl QuarantineState {
    /// Creates the state of an agent that is not quarantined.
    pub fn new(agent: impl Into<String>) -> Self {
        Self { agent: agent.into(), caught_up: false, reason: None }
    }

    /// Records that the log, as it was at the agent's start, has been replayed.
    pub fn mark_caught_up(&mut self) {
        self.caught_up = true;
    }

    /// Applies the next fact; only quarantines of this agent have an effect.
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

    /// Returns the reason why the agent must not generate any more, if quarantined.
    pub fn quarantine_reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

/// Formats the difference between the agent's canary value and the reference.
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
    fn an_agent_heeds_what_names_it_in_this_life() {
        let mut standing = QuarantineState::new("a");
        standing.apply_fact(&record(1, "a"));
        standing.mark_caught_up();
        standing.apply_fact(&record(2, "b"));
        assert_eq!(standing.quarantine_reason(), None);
        standing.apply_fact(&record(3, "a"));
        let why = standing.quarantine_reason().unwrap();
        assert!(
            why.contains("loaded for run r1") && why.contains("-2.000, expected -1.000 (from b)"),
            "{why}"
        );
        assert!(why.contains("until restarted"), "{why}");
    }
}
