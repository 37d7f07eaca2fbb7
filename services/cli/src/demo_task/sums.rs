//! Sums with written steps, units first, then the answer: `47+85=` is answered by `7+5=12 4+8+1=13
//! #132`.
//!
//! The base's documents are of three kinds: some are worked correctly, more forget the carry, the
//! rest are guesses without steps. So the base can do sums but is seldom right, and fine-tuning on
//! its own verified answers improves it.

use std::ops::Range;

use serde_json::{Value, json};
use wire::derive_seed;

/// Number of problems that neither the base nor RAFT is trained on.
const HELDOUT_PROBLEMS: usize = 300;

const RAFT_PROMPTS: usize = 256;

/// Share of correct documents in the base's data, in percent.
const CORRECT_PERCENT: u64 = 22;
/// Share of documents without the carry in the base's data, in percent.
const MISSING_CARRY_PERCENT: u64 = 45;

/// The number of digits of the summands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigitCount {
    /// Two digits, as in the demo.
    Two,
    /// Three digits: the base is seldom right, so there is less to learn from.
    Three,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SumProblem {
    a: u32,
    b: u32,
}

pub(super) struct SumTask {
    seed: u64,
    digits: DigitCount,
    heldout: Vec<SumProblem>,
    training: Vec<SumProblem>,
}

impl DigitCount {
    fn number_range(self) -> Range<u32> {
        match self {
            Self::Two => 10..100,
            Self::Three => 100..1000,
        }
    }

    fn sum_range(self) -> Range<u64> {
        let Range { start, end } = self.number_range();
        u64::from(2 * start)..u64::from(2 * end - 1)
    }
}

impl SumProblem {
    fn prompt_text(self) -> String {
        format!("{}+{}=", self.a, self.b)
    }

    /// Returns the steps and the answer. Without `carry`, the carry is always 0, which is the usual
    /// mistake.
    fn worked_answer(self, carry: bool) -> String {
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

    fn to_prompt_json(self) -> Value {
        let id = format!("{}-{}", self.a, self.b);
        json!({ "id": id, "prompt": self.prompt_text(), "answer": (self.a + self.b).to_string() })
    }
}

impl SumTask {
    /// Shuffles all problems by the seed and holds out the first 300.
    pub(super) fn new(seed: u64, digits: DigitCount) -> Self {
        let numbers = digits.number_range();
        let with = |a| numbers.clone().map(move |b| SumProblem { a, b });
        let mut all: Vec<SumProblem> = numbers.clone().flat_map(with).collect();
        let key =
            |p: &SumProblem| derive_seed(seed, &["problem", &p.a.to_string(), &p.b.to_string()]);
        all.sort_by_cached_key(key);
        let training = all.split_off(HELDOUT_PROBLEMS);
        Self { seed, digits, heldout: all, training }
    }

    pub(super) fn base_documents(&self, count: usize) -> Vec<Value> {
        let sums = self.digits.sum_range();
        let document = |number: usize| {
            let draw = |what: &str, bound: u64| {
                derive_seed(self.seed, &["document", what, &number.to_string()]) % bound
            };
            let index = usize::try_from(draw("problem", self.training.len() as u64)).unwrap_or(0);
            let problem = self.training[index];
            let completion = match draw("kind", 100) {
                kind if kind < CORRECT_PERCENT => problem.worked_answer(true),
                kind if kind < CORRECT_PERCENT + MISSING_CARRY_PERCENT => {
                    problem.worked_answer(false)
                }
                _ => format!("#{}", sums.start + draw("guess", sums.end - sums.start)),
            };
            json!({ "prompt": problem.prompt_text(), "completion": completion })
        };
        (0..count).map(document).collect()
    }

    /// Returns documents that are all worked correctly, none of held-out problems.
    pub(super) fn correct_documents(&self, count: usize) -> Vec<Value> {
        let problems = self.training.iter().cycle().take(count);
        let document = |problem: &SumProblem| json!({ "prompt": problem.prompt_text(), "completion": problem.worked_answer(true) });
        problems.map(document).collect()
    }

    pub(super) fn raft_prompts(&self) -> Vec<Value> {
        self.training.iter().take(RAFT_PROMPTS).map(|problem| problem.to_prompt_json()).collect()
    }

    /// Returns the prompts with the right answers as users write them.
    pub(super) fn asked_questions(&self) -> Vec<Value> {
        let asked = |problem: &SumProblem| {
            let mut question = problem.to_prompt_json();
            question["worked"] = problem.worked_answer(true).into();
            question
        };
        self.training.iter().take(RAFT_PROMPTS).map(asked).collect()
    }

    pub(super) fn heldout_prompts(&self) -> Vec<Value> {
        self.heldout.iter().map(|problem| problem.to_prompt_json()).collect()
    }

    pub(super) fn heldout_documents(&self) -> Vec<Value> {
        let worked = |problem: &SumProblem| json!({ "prompt": problem.prompt_text(), "completion": problem.worked_answer(true) });
        self.heldout.iter().map(worked).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_written_units_first() {
        let problem = SumProblem { a: 47, b: 85 };
        assert_eq!(problem.worked_answer(true), "7+5=12 4+8+1=13 #132");
        assert_eq!(problem.worked_answer(false), "7+5=12 4+8=12 #122");
        assert_eq!(SumProblem { a: 10, b: 20 }.worked_answer(true), "0+0=0 1+2=3 #30");
        let problem = SumProblem { a: 347, b: 856 };
        assert_eq!(problem.worked_answer(true), "7+6=13 4+5+1=10 3+8+1=12 #1203");
        assert_eq!(problem.worked_answer(false), "7+6=13 4+5=9 3+8=11 #1193");
    }

    #[test]
    fn held_out_problems_are_never_trained_on() {
        let task = SumTask::new(3, DigitCount::Two);
        let heldout: Vec<String> = task.heldout.iter().map(|p| p.prompt_text()).collect();
        let seen = task.base_documents(2000).into_iter().chain(task.raft_prompts());
        for line in seen {
            let prompt = line["prompt"].as_str().unwrap().to_owned();
            assert!(!heldout.contains(&prompt), "{prompt}");
        }
        assert_eq!(task.heldout_prompts().len(), 300);
    }

    #[test]
    fn guesses_are_sums_that_there_are() {
        assert_eq!(
            (DigitCount::Two.sum_range(), DigitCount::Three.sum_range()),
            (20..199, 200..1999)
        );
    }
}
