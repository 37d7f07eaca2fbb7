//! The demo's task: two-digit sums with written work, units first, then the answer:
//! `47+85=` is answered by `7+5=12 4+8+1=13 #132`.
//!
//! The base learns from people of three kinds: some work it out, more forget the carry,
//! the rest guess without work. So it can do the sum but seldom does, which is what
//! fine-tuning on its own verified answers changes.

use serde_json::{Value, json};
use wire::derive;

/// Problems that neither the base nor RAFT ever sees.
const HELDOUT: usize = 300;

/// Prompts RAFT samples from, every cycle.
const PROMPTS: usize = 256;

/// Shares of the base's documents, in hundredths.
const RIGHT: u64 = 22;
const FORGETS_THE_CARRY: u64 = 45;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Problem {
    a: u32,
    b: u32,
}

/// The data of a demo with one seed, as lines of JSON.
pub(super) struct Task {
    seed: u64,
    heldout: Vec<Problem>,
    training: Vec<Problem>,
}

impl Problem {
    fn prompt(self) -> String {
        format!("{}+{}=", self.a, self.b)
    }

    /// The work and the answer; without `carry` the usual mistake.
    fn worked(self, carry: bool) -> String {
        let Self { a, b } = self;
        let units = a % 10 + b % 10;
        let carried = if carry { units / 10 } else { 0 };
        let tens = a / 10 + b / 10 + carried;
        let plus = if carried > 0 { "+1" } else { "" };
        let (unit_work, ten_work) = (
            format!("{}+{}={units}", a % 10, b % 10),
            format!("{}+{}{plus}={tens}", a / 10, b / 10),
        );
        format!("{unit_work} {ten_work} #{tens}{}", units % 10)
    }

    fn as_prompt(self) -> Value {
        let id = format!("{}-{}", self.a, self.b);
        json!({ "id": id, "prompt": self.prompt(), "answer": (self.a + self.b).to_string() })
    }
}

impl Task {
    pub(super) fn new(seed: u64) -> Self {
        let mut all: Vec<Problem> =
            (10..100).flat_map(|a| (10..100).map(move |b| Problem { a, b })).collect();
        let key = |p: &Problem| derive(seed, &["problem", &p.a.to_string(), &p.b.to_string()]);
        all.sort_by_cached_key(key);
        let training = all.split_off(HELDOUT);
        Self { seed, heldout: all, training }
    }

    /// Documents to train the base on.
    pub(super) fn documents(&self, count: usize) -> Vec<Value> {
        let document = |number: usize| {
            let draw = |what: &str, bound: u64| {
                derive(self.seed, &["document", what, &number.to_string()]) % bound
            };
            let index = usize::try_from(draw("problem", self.training.len() as u64)).unwrap_or(0);
            let problem = self.training[index];
            let completion = match draw("kind", 100) {
                kind if kind < RIGHT => problem.worked(true),
                kind if kind < RIGHT + FORGETS_THE_CARRY => problem.worked(false),
                _ => format!("#{}", 20 + draw("guess", 179)),
            };
            json!({ "prompt": problem.prompt(), "completion": completion })
        };
        (0..count).map(document).collect()
    }

    pub(super) fn prompts(&self) -> Vec<Value> {
        self.training.iter().take(PROMPTS).map(|problem| problem.as_prompt()).collect()
    }

    pub(super) fn heldout_prompts(&self) -> Vec<Value> {
        self.heldout.iter().map(|problem| problem.as_prompt()).collect()
    }

    /// The held-out problems, worked out as they should be: what perplexity is measured on.
    pub(super) fn heldout_documents(&self) -> Vec<Value> {
        let worked = |problem: &Problem| json!({ "prompt": problem.prompt(), "completion": problem.worked(true) });
        self.heldout.iter().map(worked).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_written_units_first() {
        let problem = Problem { a: 47, b: 85 };
        assert_eq!(problem.worked(true), "7+5=12 4+8+1=13 #132");
        assert_eq!(problem.worked(false), "7+5=12 4+8=12 #122");
        assert_eq!(Problem { a: 10, b: 20 }.worked(true), "0+0=0 1+2=3 #30");
    }

    #[test]
    fn held_out_problems_are_never_trained_on() {
        let task = Task::new(3);
        let heldout: Vec<String> = task.heldout.iter().map(|p| p.prompt()).collect();
        let seen = task.documents(2000).into_iter().chain(task.prompts());
        for line in seen {
            let prompt = line["prompt"].as_str().unwrap().to_owned();
            assert!(!heldout.contains(&prompt), "{prompt}");
        }
        assert_eq!(task.heldout_prompts().len(), 300);
    }
}
