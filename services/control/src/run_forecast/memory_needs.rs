//! The memory that the training of a spec needs, from the configuration of its base.

use formats::{
    ModelOutline,
    memory_estimate::{PlannedTraining, TrainingMethod},
};
use spec::RunSpec;
use wire::v1;

use crate::{FleetControl, SpecFiles, SubmitError, base_model::BaseError};

impl FleetControl {
    /// Estimates the least peak memory of the spec's training: one example at a time, with weights
    /// of two bytes and checkpointing. `flotilla doctor --run` knows how a box trains.
    pub(super) async fn training_memory(
        &self,
        spec: &RunSpec,
        files: &SpecFiles,
        described: &v1::Spec,
    ) -> Result<u64, SubmitError> {
        let dir = self.prepare_model_dir(&spec.base, files).await?;
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
