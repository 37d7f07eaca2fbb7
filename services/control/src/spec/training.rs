//! How a spec says what training is to be like.

use serde::Deserialize;
use wire::v1;

use super::curve::Curve;
use crate::check::{Checked, count, ensure, within};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleSpec {
    Constant,
    Linear,
    Cosine,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSpec {
    pub epochs: u32,
    /// When set, `epochs` does not count.
    pub max_steps: u32,
    pub batch_size: u32,
    pub micro_batch_tokens: u32,
    pub learning_rate: Curve,
    pub schedule: ScheduleSpec,
    pub warmup_ratio: f64,
    pub final_ratio: f64,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub max_grad_norm: f64,
    pub max_tokens: u32,
    pub save_every: u32,
    /// The examples of a pass stand one after another without padding.
    pub packing: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSpec {
    pub r: u32,
    pub alpha: f64,
    pub target_modules: Vec<String>,
    /// Of what a pair reads, the share it does not see in a step.
    pub dropout: f64,
}

impl Default for LoraSpec {
    fn default() -> Self {
        let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let target_modules = modules.map(str::to_owned).to_vec();
        Self { r: 16, alpha: 32.0, target_modules, dropout: 0.0 }
    }
}

impl Default for TrainingSpec {
    fn default() -> Self {
        Self {
            epochs: 1,
            max_steps: 0,
            batch_size: 32,
            micro_batch_tokens: 0,
            learning_rate: Curve::Constant(2e-4),
            schedule: ScheduleSpec::Cosine,
            warmup_ratio: 0.1,
            final_ratio: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            max_grad_norm: 1.0,
            max_tokens: 1024,
            save_every: 0,
            packing: true,
        }
    }
}

impl TrainingSpec {
    pub(crate) fn resolve(&self, lora: Option<&LoraSpec>) -> v1::Training {
        let schedule = match self.schedule {
            ScheduleSpec::Constant => v1::Schedule::Constant,
            ScheduleSpec::Linear => v1::Schedule::Linear,
            ScheduleSpec::Cosine => v1::Schedule::Cosine,
        };
        v1::Training {
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch_size: self.batch_size,
            micro_batch_tokens: self.micro_batch_tokens,
            learning_rate: self.learning_rate.first(),
            schedule: schedule.into(),
            warmup_ratio: self.warmup_ratio,
            final_ratio: self.final_ratio,
            weight_decay: self.weight_decay,
            beta1: self.beta1,
            beta2: self.beta2,
            max_grad_norm: self.max_grad_norm,
            max_tokens: self.max_tokens,
            save_every: self.save_every,
            packing: Some(self.packing),
            lora: lora.map(|lora| v1::Lora {
                r: lora.r,
                alpha: lora.alpha,
                target_modules: lora.target_modules.clone(),
                dropout: lora.dropout,
            }),
        }
    }
}

impl TrainingSpec {
    pub(crate) fn check(&self, section: &str, cycles: u32) -> Checked {
        let field = |name: &str| format!("{section}.{name}");
        count(&field("epochs"), self.epochs, u32::from(self.max_steps == 0), 10_000)?;
        count(&field("max_steps"), self.max_steps, 0, 100_000_000)?;
        count(&field("batch_size"), self.batch_size, 1, 65_536)?;
        count(&field("micro_batch_tokens"), self.micro_batch_tokens, 0, 1 << 24)?;
        self.learning_rate.check(&field("learning_rate"), cycles, 1e-12, 10.0)?;
        within(&field("warmup_ratio"), self.warmup_ratio, 0.0, 1.0)?;
        within(&field("final_ratio"), self.final_ratio, 0.0, 1.0)?;
        within(&field("weight_decay"), self.weight_decay, 0.0, 10.0)?;
        within(&field("beta1"), self.beta1, 0.0, 0.999_999)?;
        within(&field("beta2"), self.beta2, 0.0, 0.999_999_9)?;
        within(&field("max_grad_norm"), self.max_grad_norm, 1e-9, 1e9)?;
        count(&field("max_tokens"), self.max_tokens, 2, 1_048_576)
    }
}

impl LoraSpec {
    pub(crate) fn check(&self, section: &str) -> Checked {
        count(&format!("{section}.r"), self.r, 1, 4096)?;
        within(&format!("{section}.alpha"), self.alpha, 1e-6, 1e6)?;
        within(&format!("{section}.dropout"), self.dropout, 0.0, 0.99)?;
        let field = format!("{section}.target_modules");
        ensure(!self.target_modules.is_empty(), &field, "name at least one module")?;
        let known = Self::default().target_modules;
        let stranger = self.target_modules.iter().find(|module| !known.contains(module));
        let remedy = stranger.map(|module| format!("{module:?} is none of {}", known.join(", ")));
        ensure(stranger.is_none(), &field, remedy.unwrap_or_default())
    }
}
