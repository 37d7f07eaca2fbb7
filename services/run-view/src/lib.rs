//! Read models for user interfaces: the view of one run, and the view of the fleet with its runs.
//! Both are projections of facts and agents' statuses; a reader passes the revision it last
//! received and gets only what changed since. The crate `cycle` defines the state of a run; this
//! crate only presents it. Knows no bus, clock, page or terminal.

mod agent_text;
mod cycle_text;
mod end_text;
mod eta;
mod fact_text;
mod fleet_health;
mod fleet_view;
mod forecast_text;
mod histogram;
mod phase_progress;
mod run_view;
mod sample_counts;
mod samples_text;
mod split_text;
mod timeline;

pub use agent_text::{
    agent_state_text, describe_serving, job_text, load_text, sampling_rate_text, status_line,
    trouble_text,
};
pub use cycle_text::{cycle_findings, energy_line, rate_text, selection_text, weighting_text};
pub use fact_text::{describe_control, describe_fact, describe_quarantine, failure_lines};
pub use fleet_health::{FleetHealth, FleetProblem, FleetReadings};
pub use fleet_view::FleetView;
pub use forecast_text::{comparison_lines, forecast_lines, remaining_text};
pub use phase_progress::{ActiveJobs, PhaseProgress};
pub use run_view::RunView;
pub use samples_text::{describe_sample, describe_samples_page};
pub use split_text::split_text;
