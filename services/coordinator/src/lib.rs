//! The IO shell around `cycle`: replays the log, follows it, and writes the facts that the core
//! plans. It has no other state. Any member may run a coordinator, and several may run at the same
//! time: the leader lease only avoids duplicate work.

mod agent_registry;
mod archive;
mod control_loop;
mod metrics;
mod metrics_page;
mod prompts;
mod store_tasks;

pub use self::metrics::{FleetMetrics, RunMetrics, TrainSampleCounts};
pub use archive::CycleRetention;
pub use control_loop::{Config, LoopStatus, run};
