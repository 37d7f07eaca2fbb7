//! The shell that every agent shares, regardless of its roles. It announces the agent's status,
//! pulls work, holds the lease while a child process does the work, writes the result, acknowledges
//! the delivery, and drains.
//!
//! A role (trainer, generator, verifier, evaluator) names the facts that order its work and starts
//! the worker process that does it. This crate knows neither models nor verifiers. Decisions
//! (retry, backoff, admission, placement) are made in the pure crate `agent-core`.

mod adaptive_timeout;
mod agent;
mod child;
mod doctor;
mod failure;
mod job;
mod launch;
mod lease;
mod lease_journal;
mod live_status;
mod memory_placement;
mod peer_exchange;
mod prefetch;
mod process_groups;
mod role;
mod role_runner;
mod run_tracker;
mod status_metrics;
mod task_context;
pub mod telemetry;
mod worker_process;
mod worker_protocol;

pub use adaptive_timeout::AdaptiveTimeout;
pub use agent::{Agent, AgentConfig};
pub use agent_core::{JobFault, MemoryFit, SamplingThroughput, halve_micro_batch};
pub use child::{ChildCommand, ChildProcess};
pub use doctor::HostDoctor;
pub use job::{JobError, LeasedJob};
pub use launch::WorkerLauncher;
pub use memory_placement::MemoryNeeds;
pub use peer_exchange::PeerExchange;
pub use prefetch::PrefetchedCheckpoint;
pub use process_groups::ProcessGroups;
pub use role::AgentRole;
pub use task_context::{TaskContext, TaskStatus};
pub use worker_process::{WorkerError, WorkerProcess};
#[doc(hidden)]
pub use worker_protocol::fuzzing;
pub use worker_protocol::{CallInbox, CallResponder, WorkerCall};
