//! The shell that every agent shares, regardless of its roles: it announces the status, pulls work,
//! holds the lease while a child process works, writes the result, acknowledges, and drains.
//!
//! Roles (trainer, generator, verifier, scorer, evaluator) are in their own crates; this one knows
//! neither models nor verifiers. Decisions (retry, backoff, admission, placement) are made in `agent-core`.

mod adaptive_timeout;
mod agent;
mod agent_context;
pub mod agent_lock;
mod child;
mod config;
mod doctor;
mod error;
mod failure;
mod job;
mod launch;
mod lease;
mod lease_journal;
mod live_status;
mod memory_placement;
mod nvidia_memory;
mod peer_exchange;
mod prefetch;
mod prefetched_checkpoint;
mod process_groups;
mod prompt_files;
mod role;
mod role_name;
mod role_runner;
mod run_tracker;
mod status_metrics;
mod task_context;
pub mod telemetry;
mod worker_process;
mod worker_protocol;

pub use adaptive_timeout::AdaptiveTimeout;
pub use agent::Agent;
pub use agent_core::{JobFault, MemoryFit, SamplingThroughput, halve_micro_batch};
pub use child::{ChildCommand, ChildProcess};
pub use config::{AgentConfig, AgentIntervals, AgentStack};
pub use doctor::HostDoctor;
pub use error::JobError;
pub use job::LeasedJob;
pub use launch::WorkerLauncher;
pub use memory_placement::MemoryNeeds;
pub use peer_exchange::PeerExchange;
pub use prefetched_checkpoint::PrefetchedCheckpoint;
pub use process_groups::ProcessGroups;
pub use prompt_files::{PromptFiles, PromptIndex};
pub use role::AgentRole;
pub use task_context::{TaskContext, TaskStatus, WATCHER_TASK};
pub use worker_process::{WorkerError, WorkerProcess};
#[doc(hidden)]
pub use worker_protocol::fuzzing;
pub use worker_protocol::{CallInbox, CallResponder, WorkerCall};
