//! The verifier: reacts to samples by writing verdicts.
//!
//! [`judge`] is the pure part; `command` runs somebody else's verifier. `error` is the
//! verifier's own fault and never a reward of 0.

mod calls;
mod command;
mod judge;
mod role;
mod worker;

pub use role::VerifierRole;
pub use worker::work;

#[doc(hidden)]
pub mod fuzzing {
    use serde::Deserialize;
    use wire::v1::verifier::How;

    pub use crate::calls::fuzz as calls;
    use crate::{calls::Verify, judge::Judge};

    /// A command's answer becomes an opinion.
    pub fn answer(output: &[u8]) {
        let _ = crate::command::read(output);
    }

    /// Judges as the worker does, but starts no command.
    pub fn judge(call: &serde_json::Value) {
        let Ok(call) = Verify::deserialize(call) else { return };
        let how = call.verifier.how.filter(|how| !matches!(how, How::Command(_)));
        if let Some(Ok(judge)) = how.as_ref().map(Judge::new) {
            for item in &call.items {
                let _ = judge.judge(item).on(item);
            }
        }
    }
}
