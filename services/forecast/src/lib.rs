//! Forecasts of a run before it starts: how long it takes, the energy that it needs, and the
//! probability that it ends in time.
//!
//! [`RunHistory`] extracts from the log what earlier runs took, [`RunWorkload`] what a spec asks
//! for. [`FleetEvidence`] combines both with the agents that are there into a model of each phase:
//! a constant and a rate, each with its uncertainty. [`forecast_run`] draws the models many times
//! and runs the order of the phases with each draw. The crate reads no log and knows no clock; the
//! same input and seed give the same forecast.

mod duration_model;
mod fleet_agent;
mod fleet_evidence;
mod run_energy;
mod run_forecast;
mod run_history;
mod run_progress;
mod run_timeline;
mod workload;

pub use fleet_agent::FleetAgent;
pub use fleet_evidence::FleetEvidence;
pub use run_energy::measure_watt_hours;
pub use run_forecast::{ForecastQuestion, compute_price, forecast_remaining, forecast_run};
pub use run_history::RunHistory;
pub use run_progress::RunProgress;
pub use workload::RunWorkload;
