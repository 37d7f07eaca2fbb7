//! Whether an agent may still generate: what the log says it was found to sample with.

use wire::{Body, Record, v1};

/// One agent's, folded from the `quarantine` facts that name it.
#[derive(Debug, Clone)]
pub struct Standing {
    agent: String,
    /// What comes now is of this life of the agent's, not of an earlier one.
    begun: bool,
    why: Option<String>,
}

impl Standing {
    pub fn new(agent: impl Into<String>) -> Self {
        Self { agent: agent.into(), begun: false, why: None }
    }

    /// The log is known as it was when the agent was started.
    pub fn begin(&mut self) {
        self.begun = true;
    }

    /// Takes in the next fact; only those that name the agent are heard.
    pub fn note(&mut self, record: &Record) {
        if let Body::Quarantine(quarantine) = &record.fact.body
            && quarantine.agent == self.agent
            && self.begun
        {
            let run = &record.fact.subject.run;
            self.why = Some(format!(
                "in quarantine until it is started anew: {}",
                why(quarantine, run.as_str())
            ));
        }
    }

    /// Why it must generate nothing more, if so.
    pub fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }
}

fn why(quarantine: &v1::Quarantine, run: &str) -> String {
    let v1::Quarantine { said, reference, distance, tolerance, agreed, adapter, .. } = quarantine;
    let policy = if adapter.is_empty() { "the base" } else { "the adapter" };
    let apart = match distance {
        Some(distance) => format!("{distance:.3} apart where {tolerance} is allowed"),
        None => "not comparable at all".into(),
    };
    format!(
        "it samples with something else than {policy} that run {run} ordered: to it a token of a \
         text is worth {said:.3} nats, to {} {reference:.3}, token by token {apart}; look whether \
         its engine loads what it is given",
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
        let fact = Fact::decode(&subject, payload.as_bytes()).unwrap();
        Record { sequence, time_ms: 0, author: None, fact }
    }

    #[test]
    fn an_agent_heeds_what_names_it_in_this_life() {
        let mut standing = Standing::new("a");
        standing.note(&record(1, "a"));
        standing.begin();
        standing.note(&record(2, "b"));
        assert_eq!(standing.why(), None);
        standing.note(&record(3, "a"));
        let why = standing.why().unwrap();
        assert!(
            why.contains("run r1 ordered") && why.contains("-2.000 nats, to b -1.000"),
            "{why}"
        );
        assert!(why.contains("started anew"), "{why}");
    }
}
