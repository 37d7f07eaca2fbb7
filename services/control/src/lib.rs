//! The operations that users have on a fleet: submit and control runs, read evals, checkpoints,
//! samples and agents, audit runs, and manage members. Shared by the gRPC gateway and the command
//! line; knows neither gRPC nor terminals.

mod adapter_model;
mod adopted_runs;
mod agents;
mod archived_facts;
mod audit;
mod base_model;
mod channel_keeper;
mod channel_learning;
mod channels;
mod checkpoints;
mod court;
mod data;
mod evals;
mod exchanges;
mod explain;
mod fork;
mod hub_push;
mod measurement;
mod members;
mod model_card;
mod model_comparison;
mod push_error;
mod retention;
mod run_comparison;
mod run_files;
mod run_forecast;
mod run_history;
mod runs;
mod safetensors_check;
mod samples_page;
mod selection_preview;
mod spec_files;
mod store_access;
mod submission;
mod submit_error;
mod sweeps;

use std::sync::Arc;

use bus::Bus;
use hub::HubClient;
use store::Store;
use tokio::sync::OnceCell;

pub use adopted_runs::DetectedTraining;
pub use agents::DrainError;
pub use audit::{AuditDepth, AuditError, AuditFinding, AuditReport, FindingSource, TaskProgress};
pub use base_model::{BaseError, TransferCallback, TransferProgress};
pub use channel_learning::LearnError;
pub use channels::{ChannelError, build_serving, parse_channel_name};
pub use checkpoints::{CheckpointError, parse_checkpoint_ref};
pub use comparison::DEFAULT_ALPHA;
pub use court::{
    Court, CourtError, CourtRanking, CourtTrial, RankedObjective, SEEDS_MAX, mean_interval,
    rank_objectives,
};
pub use data::{
    DataError, DataPreview, DataPreviewError, HubDataError, NamedRows, PreviewRow, PreviewSettings,
    check_example_file, prepare_documents, preview_rows, read_prompt_entries,
    remove_duplicate_prompts, report_rows, split_prompt_rows,
};
pub use evals::HELDOUT_SUITE;
pub use exchanges::{FeedbackError, build_examples};
pub use explain::{
    CanaryFigure, CanaryReport, CheckpointLineage, ControlReport, CycleReport, LineageSample,
    LineageStep, MessageGroup, RunReport, SelectionReport, SoupReport, SplitReport,
};
pub use fork::ForkError;
pub use hub_push::ModelPush;
pub use measurement::{MeasureError, MeasuredModel};
pub use members::{
    DenyReason, MemberRegistry, MembershipConfig, MembershipError, MembershipRefusal,
    MembershipView, RevocationList,
};
pub use model_card::{CardRequest, ModelCard, ModelForm};
pub use model_comparison::{
    CategoryComparison, CompareError, ComparedCheckpoint, ModelComparison, PairedCheckpoints,
};
pub use push_error::PushError;
pub use retention::{KeepRules, PruneError, PruneItem, PrunePlan, PruneRequest};
pub use run_comparison::{SettingDifference, compare_settings};
pub use run_forecast::{ForecastComparison, ForecastError, parse_end_time};
pub use run_history::HistoryError;
pub use runs::{RunError, run_to_proto, to_timestamp};
pub use selection_preview::{PreviewError, SelectionComparison, SelectionSummary};
pub use spec_files::{SpecFileError, SpecFiles, read_named_file, require_named_file};
pub use store_access::{StoreAccess, StoreAccessError};
pub use submission::SubmittedRun;
pub use submit_error::{PlacedError, SubmitError};
pub use sweeps::{SweepPerplexity, SweepReport, SweepRow};

/// A client of a fleet: all operations that users have on runs, checkpoints, evals and agents.
///
/// It reads facts from the log and writes `spec` and `control` facts; the coordinator and the
/// agents do the rest. It keeps no state, so clones and several processes can work at the same
/// time.
///
/// For example, [`FleetControl::submit_run`] reads and checks the files of a spec, stores them,
/// resolves the base, and writes the `spec` fact as its last step. If a step fails, no run exists.
/// [`FleetControl::watch_run`] then follows the facts of the run.
#[derive(Clone)]
pub struct FleetControl {
    bus: Bus,
    stores: StoreAccess,
    store: Arc<OnceCell<Store>>,
    hub: HubClient,
}

impl FleetControl {
    /// Returns a client that opens the store on first use, so that reading runs needs no
    /// credentials for the store.
    pub fn new(bus: Bus, stores: StoreAccess) -> Self {
        Self { bus, stores, store: Arc::default(), hub: HubClient::from_env() }
    }

    /// Returns a client with an open store.
    pub fn with_store(bus: Bus, store: Store) -> Self {
        let stores = StoreAccess::for_url(store.url());
        let store = Arc::new(OnceCell::new_with(Some(store)));
        Self { bus, stores, store, hub: HubClient::from_env() }
    }

    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Returns the fleet's store, opened on first use. Fails if the store is on another machine.
    pub async fn open_store(&self) -> Result<&Store, StoreAccessError> {
        self.store.get_or_try_init(|| self.stores.open()).await
    }
}
