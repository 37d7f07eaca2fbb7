//! Read models for user interfaces: the view of one run, and the view of the fleet with its runs.
//!
//! Both are projections of facts and of agents' statuses. A reader passes the revision it last
//! received and gets only what changed since, so that watchers receive little at a time. The crate
//! `cycle` defines the state of a run; this crate only presents it.
//!
//! Knows no bus, clock, page or terminal.

mod eta;
mod fleet_view;
mod histogram;
mod run_view;
mod sample_counts;
mod timeline;

pub use fleet_view::FleetView;
pub use run_view::RunView;
