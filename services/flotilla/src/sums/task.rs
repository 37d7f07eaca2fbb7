//! Sums with written work, units first, then the answer: `47+85=` is answered by
//! `7+5=12 4+8+1=13 #132`.
//!
//! The base learns from people of three kinds: some work it out, more forget the carry,
//! the rest guess without work. So it can do the sum but seldom does, which is what
//! fine-tuning on its own verified answers changes.

use std::ops::Range;

use serde_json::{Value, json};
use wire::derive;

/// Problems that neither the base nor RAFT ever sees.
const HELDOUT: usize = 300;

/// Prompts RAFT samples from, every cycle.
const PROMPTS: usize = 256;

/// Shares of the base's documents, in hundredths.
const RIGHT: u64 = 22;
const FORGETS_THE_CARRY: u64 = 45;

/// Of the numbers that are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Digits {
    /// The demo's.
    Two,
    /// Seldom right to begin with, so that there is less to learn from.
    Three,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Problem {
    a: u32,
    b: u32,
}

/// A task's data with one seed, as lines of JSON.
pub(super) struct Task {
    seed: u64,
    digits: Digits,
    heldout: Vec<Problem>,
    training: Vec<Problem>,
}

impl Digits {
    fn numbers(self) -> Range<u32> {
        match self {
            Self::Two => 10..100,
            Self::Three => 100..1000,
        }
    }

    /// What two of its numbers may come to.
    fn sums(self) -> Range<u64> {
        let Range { start, end } = self.numbers();
        u64::from(2 * start)..u64::from(2 * end - 1)
    }
}

impl Problem {
    fn prompt(self) -> String {
        format!("{}+{}=", self.a, self.b)
    }

    /// The work and the answer; without `carry` the usual mistake.
    fn worked(self, carry: bool) -> String {
        let Self { mut a, mut b } = self;
        let mut work = String::new();
        let mut answer = String::new();
        let mut carried = 0;
        loop {
            let sum = a % 10 + b % 10 + carried;
            let plus = if carried > 0 { "+1" } else { "" };
            work.push_str(&format!("{}+{}{plus}={sum} ", a % 10, b % 10));
            (a, b) = (a / 10, b / 10);
            if a == 0 && b == 0 {
                return format!("{work}#{sum}{answer}");
            }
            answer.insert_str(0, &(sum % 10).to_string());
            carried = if carry { sum / 10 } else { 0 };
        }
    }

    fn as_prompt(self) -> Value {
        let id = format!("{}-{}", self.a, self.b);
        json!({ "id": id, "prompt": self.prompt(), "answer": (self.a + self.b).to_string() })
    }
}

impl Task {
    pub(super) fn new(seed: u64, digits: Digits) -> Self {
        let numbers = digits.numbers();
        let with = |a| numbers.clone().map(move |b| Problem { a, b });
        let mut all: Vec<Problem> = numbers.clone().flat_map(with).collect();
        let key = |p: &Problem| derive(seed, &["problem", &p.a.to_string(), &p.b.to_string()]);
        all.sort_by_cached_key(key);
        let training = all.split_off(HELDOUT);
        Self { seed, digits, heldout: all, training }
    }

    /// Documents to train the base on.
    pub(super) fn documents(&self, count: usize) -> Vec<Value> {
        let sums = self.digits.sums();
        let document = |number: usize| {
            let draw = |what: &str, bound: u64| {
                derive(self.seed, &["document", what, &number.to_string()]) % bound
            };
            let index = usize::try_from(draw("problem", self.training.len() as u64)).unwrap_or(0);
            let problem = self.training[index];
            let completion = match draw("kind", 100) {
                kind if kind < RIGHT => problem.worked(true),
                kind if kind < RIGHT + FORGETS_THE_CARRY => problem.worked(false),
                _ => format!("#{}", sums.start + draw("guess", sums.end - sums.start)),
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
        let problem = Problem { a: 347, b: 856 };
        assert_eq!(problem.worked(true), "7+6=13 4+5+1=10 3+8+1=12 #1203");
        assert_eq!(problem.worked(false), "7+6=13 4+5=9 3+8=11 #1193");
    }

    #[test]
    fn held_out_problems_are_never_trained_on() {
        let task = Task::new(3, Digits::Two);
        let heldout: Vec<String> = task.heldout.iter().map(|p| p.prompt()).collect();
        let seen = task.documents(2000).into_iter().chain(task.prompts());
        for line in seen {
            let prompt = line["prompt"].as_str().unwrap().to_owned();
            assert!(!heldout.contains(&prompt), "{prompt}");
        }
        assert_eq!(task.heldout_prompts().len(), 300);
    }

    #[test]
    fn guesses_are_sums_that_there_are() {
        assert_eq!((Digits::Two.sums(), Digits::Three.sums()), (20..199, 200..1999));
    }
}
