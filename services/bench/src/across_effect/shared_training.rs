//! A training that boxes share, on one machine.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use engine::{
    AdapterMerge, CompletionExample, Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec,
    MatrixDtype, MergeRule, ModelTokenizer, ModelTrainer, OuterOptimizer, SoupChoice, TrainMethod,
    TrainSpec, WeightChange, load_model, score_completions,
};
use formats::peft::TENSOR_FILE;
use serde::{Deserialize, Serialize};
use wire::{Digest, v1::across::Method};

use super::virtual_fleet::{ScheduledSlice, SplitSchedule};

/// The method by which boxes share a training.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    pub(super) const HUNDREDTH_SENT: Self =
        Self { send_share: Some(0.01), ..Self::new("average, 1 % sent", MEAN) };
    pub(super) const TENTH_SENT: Self =
        Self { send_share: Some(0.1), ..Self::new("average, 10 % sent", MEAN) };
    pub(super) const ALL_SENT: Self =
        Self { send_share: Some(1.0), ..Self::new("average, all in 2 bits", MEAN) };

    /// The values of `training.across.merge`.
    pub(super) const MERGES: [Self; 4] = [Self::AVERAGE, Self::NESTEROV, Self::STACK, Self::SOUP];

    const fn new(name: &'static str, rule: MergeRule) -> Self {
        Self { name, rule, freezes_a: false, send_share: None, is_soup: false }
    }

    /// Returns the method by which the planner splits the steps.
    pub(super) fn planner_method(self) -> Method {
        match self.rule {
            _ if self.is_soup => Method::Soup,
            MergeRule::Stack => Method::Stack,
            MergeRule::Step(_) => Method::Step,
        }
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct TrainedShare {
    /// After each merge, the mean negative log-likelihood of held-out completions, in nats per
    /// token.
    pub nlls: Vec<f64>,
    /// The drift of each merge.
    pub drifts: Vec<f64>,
    /// The share that each merge lost to the rank.
    pub residuals: Vec<f64>,
    /// Mean bytes that a box sent after a slice.
    pub sent_bytes: f64,
    /// The digest of the last weights.
    pub digest: String,
}

impl TrainedShare {
    /// Returns the negative log-likelihood after the last merge; NaN if it was not measured.
    pub(super) fn final_nll(&self) -> f64 {
        self.nlls.last().copied().unwrap_or(f64::NAN)
    }
}

/// The boxes of a training, one after the other in this process.
struct SequentialBoxes {
    trainer: ModelTrainer,
    method: SharingMethod,
    /// Directories of optimizer states, by box.
    states: BTreeMap<usize, PathBuf>,
}

impl SequentialBoxes {
    fn begin_slice(&mut self, start: &Path, slice: &ScheduledSlice) -> anyhow::Result<()> {
        let adapter = LoraAdapter::load_peft(start, self.trainer.trained_model().model_config())?;
        self.trainer.replace_adapter(&adapter)?;
        let state = self.states.get(&slice.member).map(PathBuf::as_path);
        self.trainer.start_slice(state, slice.first as usize)?;
        if self.method.is_soup {
            self.trainer.schedule_slice(slice.steps as usize);
        }
        Ok(())
    }

    /// Takes steps, and returns the number of tokens that they scored.
    fn run_steps(&mut self, steps: u32) -> anyhow::Result<u64> {
        let mut scored = 0;
        for _ in 0..steps {
            let step = self.trainer.run_step()?;
            scored += step.ok_or_else(|| anyhow!("the training ended early"))?.scored as u64;
        }
        Ok(scored)
    }

    /// Trains half of a slice, of which nothing remains.
    fn cut_off_slice(&mut self, start: &Path, slice: &ScheduledSlice) -> anyhow::Result<()> {
        self.begin_slice(start, slice)?;
        self.run_steps(slice.steps.div_ceil(2))?;
        Ok(())
    }

    /// Trains a slice. Returns the files that its box sends, and the number of scored tokens.
    fn train_slice(
        &mut self,
        start: &Path,
        slice: &ScheduledSlice,
        out: &Path,
    ) -> anyhow::Result<(PathBuf, u64)> {
        self.begin_slice(start, slice)?;
        let scored = self.run_steps(slice.steps)?;
        let (adapter, state) = (out.join("adapter"), out.join("state"));
        self.trainer.save_directory(&adapter, "base")?;
        self.trainer.save_state(&state)?;
        let left_out = self.states.remove(&slice.member);
        let sent = match self.method.send_share {
            None => adapter,
            Some(keep) => {
                let start = start.to_owned();
                let change = WeightChange { start, trained: adapter, left_out, keep };
                change.write_change(&out.join("change"), &state)?;
                out.join("change")
            }
        };
        if self.method.keeps_states() {
            self.states.insert(slice.member, state);
        }
        Ok((sent, scored))
    }
}

impl SharedTraining<'_> {
    /// Trains as scheduled. Measures the likelihood after each merge, unless there are no held-out
    /// examples.
    pub(super) fn train_schedule(
        &self,
        directory: &Path,
        schedule: &SplitSchedule,
        method: SharingMethod,
    ) -> anyhow::Result<TrainedShare> {
        let mut start = directory.join("0");
        self.new_adapter()?.save_peft(&start, "base")?;
        let trainer = self.load_trainer(&start)?;
        let mut boxes = SequentialBoxes { trainer, method, states: BTreeMap::new() };
        let mut velocity = None;
        let mut result = TrainedShare::default();
        let (mut sent_bytes, mut slices) = (0, 0u32);
        for (number, outer_step) in (1u32..).zip(&schedule.outer_steps) {
            for slice in &outer_step.cut_off {
                boxes.cut_off_slice(&start, slice)?;
            }
            let mut trained = Vec::new();
            for slice in &outer_step.slices {
                let out = directory.join(format!("{number}-{}", slice.first));
                let (sent, scored) = boxes.train_slice(&start, slice, &out)?;
                sent_bytes += count_bytes(&sent)?;
                slices += 1;
                trained.push((sent, scored));
            }
            let merged = directory.join(number.to_string());
            let moved = directory.join(format!("{number}-velocity"));
            let mut files = AdapterMerge { start, velocity, trained, rule: method.rule };
            if method.is_soup {
                files.trained = self.choose_soup(&files, &directory.join("candidate"))?;
            }
            let errors = files.write_merged(&merged, &moved)?;
            result.drifts.push(errors.drift);
            result.residuals.push(errors.residual);
            velocity = moved.exists().then_some(moved);
            start = merged;
            if !self.heldout.is_empty() {
                result.nlls.push(self.measure_nll(&start, &self.heldout)?);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "megabytes")]
        let sent_bytes = sent_bytes as f64 / f64::from(slices.max(1));
        let digest = Digest::hash_bytes(&std::fs::read(start.join(TENSOR_FILE))?).to_string();
        Ok(TrainedShare { sent_bytes, digest, ..result })
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

/// Returns the bytes of the files in a directory.
pub(super) fn count_bytes(directory: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}
