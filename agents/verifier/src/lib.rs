//! The verifier: reacts to samples by writing verdicts.
//!
//! `judge` says how a completion is judged; what needs a program run is in `program`, contained;
//! `command` and `model` ask somebody else. `bench` judges many at a time. `error` is the
//! verifier's own fault and never a reward of 0. What each verifier reads and pays is in
//! `docs/VERIFIERS.md`.

mod bench;
mod cache;
mod calls;
mod command;
mod fences;
mod judge;
mod kit;
mod language;
mod model;
mod once;
mod opinion;
mod process;
mod program;
mod role;
mod tools;
mod worker;

pub use calls::Item;
pub use kit::Kit;
pub use once::{Judgement, Once, version};
pub use role::VerifierRole;
pub use tools::{Tool, Tools};
pub use worker::work;

#[doc(hidden)]
pub mod fuzzing {
    use serde::Deserialize;
    use wire::v1::{Verifier, verifier::How};

    pub use crate::calls::fuzz as calls;
    use crate::{bench, calls::Verify, kit::Kit};

    /// A command's answer becomes an opinion.
    pub fn answer(output: &[u8]) {
        let _ = crate::command::read(output);
    }

    /// Judges as the worker does, but starts no program and asks nobody.
    pub fn judge(call: &serde_json::Value) {
        let Ok(call) = Verify::deserialize(call) else { return };
        if !call.verifier.how.as_ref().is_some_and(stays_here) {
            return;
        }
        let Ok(verifier) = bench::Verifier::new(&call.verifier) else { return };
        bench::Bench::new(Kit::none()).judge_all(&verifier, &call.items, 1, &|_| {});
    }

    fn stays_here(how: &How) -> bool {
        let of = |verifier: Option<&Verifier>| {
            verifier.and_then(|verifier| verifier.how.as_ref()).is_none_or(stays_here)
        };
        match how {
            How::Command(_) | How::LlmJudge(_) => false,
            How::Chain(chain) => chain.stages.iter().all(|stage| of(stage.verifier.as_ref())),
            _ => true,
        }
    }
}
