//! Simulates a whole fleet in one thread: the coordinator core (`cycle`) and the agent core
//! (`agent_core`) around a model of the log, in virtual time, with faults drawn from a seed.
//!
//! A simulation has a phase with faults. After it the run must finish, with every planned sample
//! accounted for and with the results of a simulation without faults. The same seed always produces
//! the same trace.
//!
//! These parts are models: the server (`server`), the store (`store`), the network and the
//! processes (`world`), and the results of models and verifiers (`task`).

mod agent;
mod archiver;
mod channel_check;
mod channel_model;
mod channel_user;
mod check;
mod coordinator;
mod faults;
mod fork_user;
mod job;
mod keeper;
mod peer;
mod pending;
mod process;
mod run_check;
mod server;
mod specs;
mod store;
mod task;
mod trace;
mod user;
mod world;

pub use faults::{Bug, Faults};
pub use run_check::RunResults;
pub use world::{Outcome, simulate};

/// Simulates a seed with its faults and without faults, and compares the results.
///
/// # Errors
/// If an invariant is violated, the run does not end, or the results differ.
pub fn try_seed(seed: u64) -> Result<Outcome, String> {
    try_faults(seed, &Faults::from_seed(seed))
}

/// Like `try_seed`, with these faults.
///
/// # Errors
/// See `try_seed`.
pub fn try_faults(seed: u64, faults: &Faults) -> Result<Outcome, String> {
    let outcome = simulate(seed, faults, false)?;
    let undisturbed = simulate(seed, &Faults::none(), false)?;
    for (run, results) in &outcome.results {
        // A run that is not in it is one that feedback has started.
        let Some(expected) = undisturbed.results.get(run) else { continue };
        let is_complete = !outcome.comparable || results.len() == expected.len();
        let is_equal = results.iter().all(|(cycle, result)| expected.get(cycle) == Some(result));
        if !is_complete || !is_equal {
            return Err(format!(
                "run {run} ended otherwise than undisturbed: {results:?}, undisturbed {expected:?}"
            ));
        }
    }
    Ok(outcome)
}
