//! A training that boxes share, on one machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use engine::{
    AdapterMerge, CompletionExample, Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec,
    MatrixDtype, ModelTokenizer, ModelTrainer, OuterOptimizer, TrainMethod, TrainSpec, load_model,
    score_completions,
};
use serde::Serialize;

/// The method by which the weights of boxes are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MergeMethod {
    Average,
    Nesterov,
    /// The mean, and A is not trained, so that the mean is exact.
    FrozenAverage,
}

impl MergeMethod {
    pub(super) const ALL: [Self; 3] = [Self::Average, Self::Nesterov, Self::FrozenAverage];

    /// Returns the settings in words.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Average => "average",
            Self::Nesterov => "nesterov",
            Self::FrozenAverage => "average, frozen A",
        }
    }

    fn outer_optimizer(self) -> OuterOptimizer {
        match self {
            Self::Average | Self::FrozenAverage => OuterOptimizer { rate: 1.0, momentum: 0.0 },
            Self::Nesterov => OuterOptimizer { rate: 0.7, momentum: 0.9 },
        }
    }
}

/// The data and parameters of trainings of the same adapter.
#[derive(Clone)]
pub(super) struct SharedTraining<'a> {
    pub base: &'a Path,
    pub examples: Vec<CompletionExample>,
    pub heldout: Vec<CompletionExample>,
    pub spec: TrainSpec,
}

/// The result of a training.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TrainedShare {
    /// The mean negative log-likelihood of held-out completions, in nats per token.
    pub nll: f64,
    /// The drift of each merge.
    pub drifts: Vec<f64>,
}

/// The weights and the optimizer's state of a box after its slice.
struct TrainedSlice {
    adapter: PathBuf,
    state: PathBuf,
    scored: u64,
}

impl SharedTraining<'_> {
    /// Trains on equally fast boxes, which merge after `every` steps of each.
    pub(super) fn train_boxes(
        &self,
        directory: &Path,
        boxes: usize,
        every: usize,
        merge: MergeMethod,
    ) -> anyhow::Result<TrainedShare> {
        let total = self.spec.max_steps.context("a number of steps")?;
        let mut start = directory.join("0");
        self.new_adapter()?.save_peft(&start, "base")?;
        let mut states: Vec<Option<PathBuf>> = vec![None; boxes];
        let mut velocity = None;
        let mut drifts = Vec::new();
        let mut first = 0;
        while first < total {
            let outer = drifts.len() + 1;
            let mut trained = Vec::new();
            for (number, state) in states.iter_mut().enumerate() {
                let steps = every.min(total - first);
                if steps == 0 {
                    break;
                }
                let out = directory.join(format!("{outer}-{number}"));
                let slice = self.train_slice(&start, state.as_deref(), (first, steps), &out)?;
                *state = Some(slice.state);
                trained.push((slice.adapter, slice.scored));
                first += steps;
            }
            let (merged, moved) =
                (directory.join(outer.to_string()), directory.join(format!("{outer}-velocity")));
            let outer = merge.outer_optimizer();
            let files = AdapterMerge { start, velocity, trained, outer };
            drifts.push(files.write_merged(&merged, &moved)?);
            velocity = moved.exists().then_some(moved);
            start = merged;
        }
        Ok(TrainedShare { nll: self.heldout_nll(&start)?, drifts })
    }

    fn new_adapter(&self) -> anyhow::Result<LoraAdapter> {
        let config = engine::ModelConfig::from_dir(self.base)?;
        let modules = LayerModule::ALL.into_iter().collect();
        let lora = LoraSpec { rank: 16, alpha: 32.0, rslora: false, modules };
        Ok(LoraAdapter::new(&lora, &config, self.spec.seed)?)
    }

    fn train_slice(
        &self,
        start: &Path,
        state: Option<&Path>,
        (first, steps): (usize, usize),
        out: &Path,
    ) -> anyhow::Result<TrainedSlice> {
        let model = LanguageModel::load_f32(self.base, &Device::Cpu)?;
        let tokenizer = ModelTokenizer::load_tokenizer(self.base)?;
        let adapter = LoraAdapter::load_peft(start, model.model_config())?;
        let method = TrainMethod::Continue(adapter);
        let spec = self.spec.clone();
        let mut trainer = ModelTrainer::new(model, &tokenizer, method, &self.examples, spec)?;
        trainer.start_slice(state, first)?;
        let mut scored = 0;
        for _ in 0..steps {
            let step = trainer.run_step()?.ok_or_else(|| anyhow!("the training ended early"))?;
            scored += step.scored as u64;
        }
        let slice = TrainedSlice { adapter: out.join("adapter"), state: out.join("state"), scored };
        trainer.save_directory(&slice.adapter, "base")?;
        trainer.save_state(&slice.state)?;
        Ok(slice)
    }

    fn heldout_nll(&self, adapter: &Path) -> anyhow::Result<f64> {
        let (model, tokenizer) = load_model(self.base, Some(adapter), "cpu", MatrixDtype::F32)?;
        let most = self.spec.max_tokens;
        let scores = score_completions(&model, &tokenizer, &self.heldout, most, |_, _| {})?;
        let scores: Vec<f64> = scores.into_iter().flatten().flatten().collect();
        #[expect(clippy::cast_precision_loss, reason = "thousands of tokens")]
        let count = scores.len() as f64;
        Ok(-scores.iter().sum::<f64>() / count)
    }
}
