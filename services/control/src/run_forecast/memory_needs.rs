//! The memory that the training of a spec needs, from the configuration of its base.

use std::collections::BTreeMap;

use formats::{
    ModelOutline,
    memory_estimate::{PlannedTraining, TrainingMethod},
};
use spec::BaseSpec;
use wire::v1;

use crate::{FleetControl, SpecFiles, SubmitError, base_model::BaseError};

impl FleetControl {
    /// Estimates the least peak memory of a training of the base: one example at a time, with weights
    /// of two bytes and checkpointing. `flotilla doctor --run` knows how a box trains.
    pub(super) async fn training_memory(
        &self,
        base: &BaseSpec,
        files: &SpecFiles,
        described: &v1::Spec,
    ) -> Result<u64, SubmitError> {
        let dir = self.prepare_model_dir(base, files).await?;
        let outline = ModelOutline::from_dir(dir.dir_path())
            .map_err(|source| SubmitError::base_error(BaseError::from(source)))?;
        let training = match &described.kind {
            Some(v1::spec::Kind::Raft(raft)) => raft.training.clone(),
            Some(v1::spec::Kind::Sft(sft)) => sft.training.clone(),
            Some(v1::spec::Kind::Watched(_)) | None => None,
        };
        let planned = plan_training(&training.unwrap_or_default());
        Ok(outline.shape.estimate_training(&planned).peak_bytes)
    }

    /// Returns what the trainings of a run took on each trainer, beside the least that they need,
    /// which is 0 if the files of the base cannot be read.
    pub(super) async fn compare_training_memory(
        &self,
        spec: &v1::Spec,
        used: BTreeMap<String, u64>,
    ) -> Vec<v1::forecast::Memory> {
        if used.is_empty() {
            return Vec::new();
        }
        let tree = spec.base.as_ref().and_then(|base| base.tree.as_ref());
        let model = format!("store:{}", tree.map_or("", |tree| &tree.path));
        let base = BaseSpec { model: Some(model), ..BaseSpec::default() };
        let files = SpecFiles::Attached(BTreeMap::new());
        let needed_bytes = self.training_memory(&base, &files, spec).await.unwrap_or(0);
        let memory = |(agent, used_bytes)| v1::forecast::Memory {
            agent,
            needed_bytes,
            available_bytes: 0,
            used_bytes,
        };
        used.into_iter().map(memory).collect()
    }
}

fn plan_training(training: &v1::Training) -> PlannedTraining {
    let sequence = training.max_tokens.max(1);
    let sequence = match training.micro_batch_tokens {
        0 => sequence,
        tokens => sequence.min(tokens),
    };
    let method = match &training.lora {
        Some(lora) => TrainingMethod::Lora { rank: u64::from(lora.r) },
        None => TrainingMethod::Full,
    };
    PlannedTraining {
        method,
        batch: u64::from((training.micro_batch_tokens / sequence).max(1)),
        sequence: u64::from(sequence),
        // Trained weights are always f32.
        bytes_per_weight: if method == TrainingMethod::Full { 4 } else { 2 },
        checkpointing: true,
        eager_attention: false,
        dropout: false,
        quantized: training
            .lora
            .as_ref()
            .is_some_and(|lora| lora.quantization() != v1::lora::Quantization::None),
    }
}
