//! The model card of a checkpoint, derived from facts and manifests: the README of its repository
//! on the hub. It does not contain what is private to a fleet: names of users, boxes and agents,
//! texts of prompts, and paths, addresses and texts of verifiers.

mod metadata;
mod results;
#[cfg(test)]
mod tests;
mod text;
mod usage;

use cycle::Run;
use hub::{ModelId, ModelLicense, ModelRevision};
use store::TreePlace;
use wire::{FactBody, RunId, v1};

use crate::{
    CheckpointError, FleetControl, HistoryError, RunError, explain::LineageStep,
    push_error::PushError, runs::fold_run,
};

/// Runs between a checkpoint and the model that the first of them started from.
const ANCESTORS_MAX: usize = 16;

/// The form in which a checkpoint is pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelForm {
    /// The files in the store: an adapter, or a model.
    Stored,
    /// A model with the adapter merged into its weights.
    Merged,
    /// A GGUF file, with the type of its weights.
    Gguf { weight_type: String },
}

/// A card to write.
#[derive(Debug, Clone, Copy)]
pub struct CardRequest<'a> {
    /// With its files.
    pub info: &'a v1::CheckpointInfo,
    /// The repository and branch that the files are pushed to.
    pub target: &'a ModelId,
    pub form: &'a ModelForm,
}

/// The facts on a card.
struct CardFacts<'a> {
    request: CardRequest<'a>,
    checkpoint: v1::Checkpoint,
    run: Run,
    /// The newest first.
    trainings: Vec<LineageStep>,
    origin: ModelOrigin,
}

/// A model card, and what the files beside it must agree with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCard {
    /// Markdown, with metadata in YAML.
    pub text: String,
    /// The base of an adapter on the hub, as `org/name`.
    pub(crate) base: Option<String>,
}

/// The model that a checkpoint goes back to.
struct ModelOrigin {
    source: ModelSource,
    /// Checkpoints of other runs in between, the nearest first.
    ancestors: Vec<String>,
    /// The checkpoint whose adapter the run trained further.
    adapter: Option<String>,
    /// Manifest digest of the model that an adapter belongs to, or that training started from.
    base_manifest: String,
}

enum ModelSource {
    Hub {
        revision: ModelRevision,
        license: Option<ModelLicense>,
    },
    /// From a machine or the store; only the name of its directory is known.
    Local(String),
    /// Random weights, of this seed.
    Random(u64),
    Unknown,
}

impl CardFacts<'_> {
    fn is_adapter(&self) -> bool {
        *self.request.form == ModelForm::Stored
            && self.checkpoint.content() == v1::checkpoint::Content::Adapter
    }

    /// Returns the repository's name without its namespace.
    fn model_name(&self) -> &str {
        let repo = &self.request.target.repo;
        repo.rsplit_once('/').map_or(repo.as_str(), |(_, name)| name)
    }

    /// Returns the model on the hub that the pushed one derives from. An adapter of another run's
    /// checkpoint has none.
    fn hub_base(&self) -> Option<&ModelRevision> {
        match &self.origin.source {
            ModelSource::Hub { .. } if self.is_adapter() && !self.origin.ancestors.is_empty() => {
                None
            }
            ModelSource::Hub { revision, .. } => Some(revision),
            ModelSource::Local(_) | ModelSource::Random(_) | ModelSource::Unknown => None,
        }
    }

    fn license(&self) -> Option<&ModelLicense> {
        match &self.origin.source {
            ModelSource::Hub { license, .. } => license.as_ref(),
            ModelSource::Local(_) | ModelSource::Random(_) | ModelSource::Unknown => None,
        }
    }

    /// Returns the settings of the newest training, or those of the spec.
    fn training(&self) -> Option<&v1::Training> {
        let ordered = self.trainings.first().and_then(|step| step.order.as_ref());
        let ordered = ordered.and_then(|order| order.training.as_ref());
        ordered.or(match &self.run.spec.kind {
            Some(v1::spec::Kind::Sft(sft)) => sft.training.as_ref(),
            Some(v1::spec::Kind::Raft(raft)) => raft.training.as_ref(),
            Some(v1::spec::Kind::Watched(_)) | None => None,
        })
    }
}

impl FleetControl {
    /// Writes the model card of a checkpoint. The license is that of the base on the hub, if the
    /// hub can be asked.
    ///
    /// # Errors
    /// The log, or a manifest in the store, cannot be read.
    pub async fn write_model_card(&self, request: CardRequest<'_>) -> Result<ModelCard, PushError> {
        let checkpoint = request.info.checkpoint.clone().unwrap_or_default();
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.records_without_samples(&id).await.map_err(RunError::from)?;
        let run = fold_run(&records).ok_or_else(|| RunError::Unknown(id.clone()))?;
        let trainings = self.list_trainings(&run, &records, &checkpoint).await?;
        let mut origin = self.trace_origin(&run.spec, &checkpoint).await?;
        if let ModelSource::Hub { revision, license } = &mut origin.source {
            match self.hub.find_license(revision).await {
                Ok(found) => *license = found,
                Err(error) => {
                    tracing::warn!(%error, "the card names no license of the base");
                }
            }
        }
        let facts = CardFacts { request, checkpoint, run, trainings, origin };
        let base = facts.hub_base().filter(|_| facts.is_adapter());
        let base = base.map(|revision| revision.repo.clone());
        Ok(ModelCard { text: card_text(&facts), base })
    }

    /// Follows the base of a run through other runs.
    async fn trace_origin(
        &self,
        spec: &v1::Spec,
        checkpoint: &v1::Checkpoint,
    ) -> Result<ModelOrigin, PushError> {
        let base = spec.base.clone().unwrap_or_default();
        let place = |tree: &v1::Tree| TreePlace::parse_checkpoint_path(&tree.path);
        let start = checkpoint.base.clone().or(base.tree);
        let mut origin = ModelOrigin {
            source: ModelSource::Unknown,
            ancestors: Vec::new(),
            adapter: base.adapter.as_ref().and_then(place).as_ref().map(checkpoint_name),
            base_manifest: start.as_ref().map_or_else(String::new, |tree| tree.manifest.clone()),
        };
        // Random weights are a checkpoint of the run before an adapter belongs to them.
        let mut seed = (base.random_init && checkpoint.base.is_none()).then_some(spec.seed);
        let mut next = start;
        for _ in 0..ANCESTORS_MAX {
            let Some(tree) = next.take() else { break };
            if let Some(seed) = seed {
                origin.source = ModelSource::Random(seed);
                break;
            }
            let Some(found) = place(&tree) else {
                origin.source = self.find_source(&tree).await?;
                break;
            };
            if found.0.as_str() != checkpoint.run {
                origin.ancestors.push(checkpoint_name(&found));
            }
            let record = self.bus.find_spec(&found.0).await.map_err(RunError::from)?;
            let Some(FactBody::Spec(spec)) = record.map(|record| record.fact.body) else { break };
            let base = spec.base.unwrap_or_default();
            seed = base.random_init.then_some(spec.seed);
            next = base.tree;
        }
        Ok(origin)
    }

    async fn find_source(&self, tree: &v1::Tree) -> Result<ModelSource, PushError> {
        let store = self.open_store().await.map_err(CheckpointError::from)?;
        let manifest = store.read_manifest(tree).await.map_err(CheckpointError::from)?;
        if let Some(revision) = manifest.hub_revision() {
            return Ok(ModelSource::Hub { revision, license: None });
        }
        let name = tree.path.rsplit('/').next().unwrap_or_default();
        let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
        Ok(ModelSource::Local(name.to_owned()))
    }
}

fn card_text(facts: &CardFacts<'_>) -> String {
    let sections = [
        metadata::front_matter(facts),
        text::introduction(facts),
        results::results_section(facts),
        text::lineage_section(facts),
        text::data_section(facts),
        text::training_section(facts),
        usage::usage_section(facts),
        usage::reproduction_section(facts),
    ];
    sections.join("\n")
}

fn checkpoint_name((run, cycle, step): &(RunId, u32, u32)) -> String {
    format!("{run}/{cycle}/{step}")
}

/// Returns a text as code in Markdown; it may be a cell of a table.
fn inline_code(text: &str) -> String {
    format!("`{}`", text.replace(['`', '|', '\n', '\r'], " "))
}
