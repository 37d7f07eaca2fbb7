//! The scorer: writes the log-probabilities that a run's teacher gives to the tokens of training
//! samples. `ScorerRole` runs in the agent; its worker process is that of a generator, with the
//! teacher loaded.

mod role;

pub use role::ScorerRole;
