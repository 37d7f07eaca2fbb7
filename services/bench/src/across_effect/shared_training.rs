//! A training that boxes share, on one machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use engine::{
    AdapterMerge, CompletionExample, Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec,
    MatrixDtype, MergeRule, ModelTokenizer, ModelTrainer, OuterOptimizer, SoupChoice, TrainMethod,
    TrainSpec, WeightChange, load_model, score_completions,
};
use serde::{Deserialize, Serialize};

/// The method by which boxes share a training.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharingMethod {
    pub name: &'static str,
    pub rule: MergeRule,
    pub freezes_a: bool,
    /// As in `training.across.send_share`.
    pub send_share: Option<f64>,
    /// True if the merge keeps only adapters that improve the likelihood.
    pub is_soup: bool,
}

const MEAN: MergeRule = MergeRule::Step(OuterOptimizer { rate: 1.0, momentum: 0.0 });
const NESTEROV: MergeRule = MergeRule::Step(OuterOptimizer { rate: 0.7, momentum: 0.9 });

impl SharingMethod {
    pub(super) const AVERAGE: Self = Self::new("average", MEAN);
    pub(super) const NESTEROV: Self = Self::new("nesterov", NESTEROV);
    pub(super) const FROZEN_A: Self =
        Self { freezes_a: true, ..Self::new("average, frozen A", MEAN) };
    pub(super) const STACK: Self = Self::new("stack", MergeRule::Stack);
    pub(super) const SOUP: Self = Self { is_soup: true, ..Self::new("soup", MEAN) };
    pub(super) const CHANGES: [Self; 3] = [
        Self { send_share: Some(0.01), ..Self::new("average, 1 % sent", MEAN) },
        Self { send_share: Some(0.1), ..Self::new("average, 10 % sent", MEAN) },
        Self { send_share: Some(1.0), ..Self::new("average, all in 2 bits", MEAN) },
    ];

    const fn new(name: &'static str, rule: MergeRule) -> Self {
        Self { name, rule, freezes_a: false, send_share: None, is_soup: false }
    }

    /// Stacked weights have other factors, to which no optimizer state belongs.
    fn keeps_states(self) -> bool {
        self.rule != MergeRule::Stack
    }
}

/// The data and parameters of trainings of the same adapter.
#[derive(Clone)]
pub(super) struct SharedTraining<'a> {
    pub base: &'a Path,
    pub examples: Vec<CompletionExample>,
    pub heldout: Vec<CompletionExample>,
    /// By which a soup is chosen.
    pub chosen_by: Vec<CompletionExample>,
    pub spec: TrainSpec,
}

/// The result of a training.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TrainedShare {
    /// The mean negative log-likelihood of held-out completions, in nats per token.
    pub nll: f64,
    /// The drift of each merge.
    pub drifts: Vec<f64>,
    /// What each merge lost to the rank.
    pub residuals: Vec<f64>,
    /// Mean bytes that a box sent after a slice.
    pub sent_bytes: f64,
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
        method: SharingMethod,
    ) -> anyhow::Result<TrainedShare> {
        let total = self.spec.max_steps.context("a number of steps")?;
        let mut start = directory.join("0");
        self.new_adapter()?.save_peft(&start, "base")?;
        let mut trainer = self.load_trainer(&start)?;
        let mut states: Vec<Option<PathBuf>> = vec![None; boxes];
        let mut velocity = None;
        let (mut drifts, mut residuals) = (Vec::new(), Vec::new());
        let (mut sent_bytes, mut slices) = (0, 0u32);
        let mut first = 0;
        let every = if method.is_soup { total.div_ceil(boxes) } else { every };
        while first < total {
            let outer = drifts.len() + 1;
            let mut trained = Vec::new();
            for (number, state) in states.iter_mut().enumerate() {
                let steps = every.min(total - first);
                if steps == 0 {
                    break;
                }
                let out = directory.join(format!("{outer}-{number}"));
                let adapter =
                    LoraAdapter::load_peft(&start, trainer.trained_model().model_config())?;
                trainer.replace_adapter(&adapter)?;
                trainer.start_slice(state.as_deref(), first)?;
                if method.is_soup {
                    trainer.schedule_slice(steps);
                }
                let slice = train_slice(&mut trainer, steps, &out)?;
                let sent = match method.send_share {
                    None => slice.adapter,
                    Some(keep) => {
                        let (start, left_out) = (start.clone(), state.take());
                        let change = WeightChange { start, trained: slice.adapter, left_out, keep };
                        change.write_change(&out.join("change"), &slice.state)?;
                        out.join("change")
                    }
                };
                sent_bytes += count_bytes(&sent)?;
                slices += 1;
                *state = Some(slice.state).filter(|_| method.keeps_states());
                trained.push((sent, slice.scored));
                first += steps;
            }
            let (merged, moved) =
                (directory.join(outer.to_string()), directory.join(format!("{outer}-velocity")));
            let mut files = AdapterMerge { start, velocity, trained, rule: method.rule };
            if method.is_soup {
                files.trained = self.choose_soup(&files, &directory.join("candidate"))?;
            }
            let errors = files.write_merged(&merged, &moved)?;
            drifts.push(errors.drift);
            residuals.push(errors.residual);
            velocity = moved.exists().then_some(moved);
            start = merged;
        }
        #[expect(clippy::cast_precision_loss, reason = "megabytes")]
        let sent_bytes = sent_bytes as f64 / f64::from(slices);
        Ok(TrainedShare {
            nll: self.measure_nll(&start, &self.heldout)?,
            drifts,
            residuals,
            sent_bytes,
        })
    }

    fn new_adapter(&self) -> anyhow::Result<LoraAdapter> {
        let config = engine::ModelConfig::from_dir(self.base)?;
        let modules = LayerModule::ALL.into_iter().collect();
        let lora = LoraSpec { rank: 16, alpha: 32.0, rslora: false, modules };
        Ok(LoraAdapter::new(&lora, &config, self.spec.seed)?)
    }

    fn choose_soup(
        &self,
        all: &AdapterMerge,
        scratch: &Path,
    ) -> anyhow::Result<Vec<(PathBuf, u64)>> {
        let trained = |chosen: &[usize]| {
            chosen.iter().map(|index| all.trained[*index].clone()).collect::<Vec<_>>()
        };
        let mut choice = SoupChoice::new(all.trained.len());
        while let Some(candidate) = choice.next_candidate() {
            let merge = AdapterMerge { trained: trained(&candidate), ..all.clone() };
            merge.write_merged(scratch, scratch)?;
            choice.record_score(self.measure_nll(scratch, &self.chosen_by)?);
        }
        Ok(trained(choice.chosen().0))
    }

    fn load_trainer(&self, start: &Path) -> anyhow::Result<ModelTrainer> {
        let model = LanguageModel::load_f32(self.base, &Device::Cpu)?;
        let tokenizer = ModelTokenizer::load_tokenizer(self.base)?;
        let method = TrainMethod::Continue(LoraAdapter::load_peft(start, model.model_config())?);
        Ok(ModelTrainer::new(model, &tokenizer, method, &self.examples, self.spec.clone())?)
    }

    /// Returns the mean negative log-likelihood of completions, in nats per token.
    fn measure_nll(&self, adapter: &Path, examples: &[CompletionExample]) -> anyhow::Result<f64> {
        let (model, tokenizer) = load_model(self.base, Some(adapter), "cpu", MatrixDtype::F32)?;
        let most = self.spec.max_tokens;
        let scores = score_completions(&model, &tokenizer, examples, most, |_, _| {})?;
        let scores: Vec<f64> = scores.into_iter().flatten().flatten().collect();
        #[expect(clippy::cast_precision_loss, reason = "thousands of tokens")]
        let count = scores.len() as f64;
        Ok(-scores.iter().sum::<f64>() / count)
    }
}

/// Trains the next steps and saves weights and state.
fn train_slice(
    trainer: &mut ModelTrainer,
    steps: usize,
    out: &Path,
) -> anyhow::Result<TrainedSlice> {
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

/// Returns the bytes of the files in a directory.
pub(super) fn count_bytes(directory: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}
