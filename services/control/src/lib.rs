//! What a user can ask of a fleet: submit and steer runs, read evals, checkpoints and
//! agents. Works over the bus and the store alone, so the gRPC gateway and the command
//! line offer the same things with the same checks; knows neither gRPC nor terminals.

mod agents;
mod archive;
mod audit;
mod base;
mod check;
mod checkpoints;
mod data;
mod evals;
mod explain;
mod files;
mod history;
mod import;
mod members;
mod runs;
mod samples;
mod select;
mod spec;
mod stores;
mod submit;
mod watched;
mod weights;

use std::sync::Arc;

use bus::Bus;
use hub::Hub;
use store::Store;
use tokio::sync::OnceCell;

pub use agents::DrainError;
pub use audit::{AuditError, AuditReport, Depth, Finding, Progress, Where};
pub use base::{BaseError, Transfer, Watch};
pub use check::FieldError;
pub use checkpoints::{CheckpointError, parse_checkpoint_ref};
pub use data::{DataError, Held, dedup, file_report, split_file};
pub use explain::{CycleStory, FigureStory, Lineage, Link, ProofStory, Sampled, Story, Yield};
pub use files::{FileError, Files};
pub use history::HistoryError;
pub use import::{Fate, ImportError, Imported, Note, import};
pub use members::{Members, MembersError, Objection, Refusal, Roll, Terms, View};
pub use runs::{RunError, timestamp, view};
pub use select::{Comparison, SelectError, Side};
pub use spec::{BaseSpec, RunSpec, SelectionSpec, SuiteSpec, VerifierSpec, WatchSpec};
pub use stores::{StoreError, Stores};
pub use submit::{SubmitError, Submitted};
pub use watched::Found;

/// A fleet, seen from outside.
#[derive(Clone)]
pub struct Control {
    bus: Bus,
    stores: Stores,
    store: Arc<OnceCell<Store>>,
    hub: Hub,
}

impl Control {
    /// The store is opened when something needs it: looking at runs takes no credentials.
    pub fn new(bus: Bus, stores: Stores) -> Self {
        Self { bus, stores, store: Arc::default(), hub: Hub::from_env() }
    }

    /// With a store that is open already.
    pub fn with_store(bus: Bus, store: Store) -> Self {
        let stores = Stores::at(store.url());
        let store = Arc::new(OnceCell::new_with(Some(store)));
        Self { bus, stores, store, hub: Hub::from_env() }
    }

    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The fleet's store, opened when it is first asked for.
    ///
    /// # Errors
    /// When it is elsewhere, or cannot be set up.
    pub async fn store(&self) -> Result<&Store, StoreError> {
        self.store.get_or_try_init(|| self.stores.open()).await
    }
}
