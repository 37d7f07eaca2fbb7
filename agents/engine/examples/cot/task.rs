//! The demo's task: two-digit sums with written work, units first, then the answer.
//! `47+85=` is answered by `7+5=12 4+8+1=13 #132`.
//!
//! The base model learns from people of three kinds: some work it out, more forget the carry, the
//! rest guess without work. It can therefore do the sum, but seldom does: what fine-tuning on its
//! own verified answers changes.

use engine::Example;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) a: u32,
    pub(crate) b: u32,
}

/// All problems in an order drawn from the seed: the first 300 are held out, the rest are for
/// training.
pub(crate) struct Problems {
    pub(crate) held_out: Vec<Problem>,
    pub(crate) training: Vec<Problem>,
}

const HELD_OUT: usize = 300;
const RIGHT: f64 = 0.22;
const FORGETS_THE_CARRY: f64 = 0.45;

impl Problem {
    pub(crate) fn prompt(self) -> String {
        format!("{}+{}=", self.a, self.b)
    }

    pub(crate) fn passes(self, completion: &str) -> bool {
        completion
            .rsplit_once('#')
            .is_some_and(|(_, answer)| answer == (self.a + self.b).to_string())
    }

    /// The work and the answer; without `carry` the usual mistake.
    fn worked(self, carry: bool) -> String {
        let (a_ones, b_ones) = (self.a % 10, self.b % 10);
        let (a_tens, b_tens) = (self.a / 10, self.b / 10);
        let ones = a_ones + b_ones;
        let carried = if carry { ones / 10 } else { 0 };
        let tens = a_tens + b_tens + carried;
        let plus = if carried > 0 { "+1" } else { "" };
        let last = ones % 10;
        format!("{a_ones}+{b_ones}={ones} {a_tens}+{b_tens}{plus}={tens} #{tens}{last}")
    }
}

impl Problems {
    pub(crate) fn new(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let mut all: Vec<Problem> =
            (10..100).flat_map(|a| (10..100).map(move |b| Problem { a, b })).collect();
        for last in (1..all.len()).rev() {
            all.swap(last, draw.below(last as u64 + 1) as usize);
        }
        let training = all.split_off(HELD_OUT);
        Self { held_out: all, training }
    }

    /// Documents to pre-train on.
    pub(crate) fn corpus(&self, seed: u64, count: usize) -> Vec<Example> {
        let mut draw = Draw(seed);
        (0..count)
            .map(|_| {
                let problem = self.training[draw.below(self.training.len() as u64) as usize];
                let kind = draw.below(1 << 32) as f64 / (1u64 << 32) as f64;
                let completion = if kind < RIGHT {
                    problem.worked(true)
                } else if kind < RIGHT + FORGETS_THE_CARRY {
                    problem.worked(false)
                } else {
                    format!("#{}", 20 + draw.below(179))
                };
                Example { prompt: problem.prompt(), completion }
            })
            .collect()
    }
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(value ^ (value >> 31)) * u128::from(bound)) >> 64) as u64
    }
}
