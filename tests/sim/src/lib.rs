//! A whole fleet in one thread: the coordinators' core (`cycle`) and the agents' core
//! (`agent_core`) around a model of the log, in virtual time, under faults drawn from a seed.
//!
//! A world goes through a time of trouble, is healed, and must then finish its run, with
//! every planned sample accounted for and the result of an undisturbed world. The same
//! seed gives the same trace, step by step.
//!
//! What is modelled and not real: the server (`server`), the network and the processes
//! (`world`), what models and verifiers answer (`task`).

mod agent;
mod check;
mod coordinator;
mod faults;
mod job;
mod server;
mod task;
mod trace;
mod user;
mod world;

pub use faults::{Bug, Faults};
pub use world::{Outcome, simulate};

/// Runs a seed under the faults it stands for, and without any; both must end alike.
///
/// # Errors
/// When an invariant is broken, the run does not end, or it ends otherwise.
pub fn try_seed(seed: u64) -> Result<Outcome, String> {
    try_faults(seed, &Faults::of(seed))
}

/// As `try_seed`, under these faults.
///
/// # Errors
/// As `try_seed`.
pub fn try_faults(seed: u64, faults: &Faults) -> Result<Outcome, String> {
    let outcome = simulate(seed, faults, false)?;
    if outcome.comparable {
        let calm = simulate(seed, &Faults::none(), false)?;
        if calm.results != outcome.results {
            return Err(format!(
                "the run ended otherwise than undisturbed: {:?}, undisturbed {:?}",
                outcome.results, calm.results
            ));
        }
    }
    Ok(outcome)
}
