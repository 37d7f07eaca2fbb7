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
