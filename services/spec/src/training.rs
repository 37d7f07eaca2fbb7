//! The training settings of a spec.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::across::AcrossSpec;
use crate::cycle_schedule::CycleSchedule;
use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};
use crate::yaml::describe_choice;

/// The learning-rate schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RateScheduleSpec {
    Constant,
    Linear,
    Cosine,
}

/// The settings of a training.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "Training")]
pub struct TrainingSpec {
    /// Passes over the data. At least 1, unless `max_steps` is set.
    #[schemars(range(min = 0, max = 10_000))]
    pub epochs: u32,
    /// Number of steps. If it is not 0, `epochs` has no effect.
    #[schemars(range(min = 0, max = 100_000_000))]
    pub max_steps: u32,
    /// Sequences of an optimizer step.
    #[schemars(range(min = 1, max = 65_536))]
    pub batch_size: u32,
    /// Tokens of one forward and backward pass. 0: chosen by the engine.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub micro_batch_tokens: u32,
    /// Peak rate. In an SFT run one number, without a schedule.
    #[schemars(extend("minimum" = 1e-12, "maximum" = 10.0))]
    pub learning_rate: CycleSchedule,
    /// The learning-rate schedule after the warm-up.
    pub schedule: RateScheduleSpec,
    /// Length of the warm-up, as a share of all steps.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub warmup_ratio: f64,
    /// Learning rate at the end of the schedule, as a share of `learning_rate`.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub final_ratio: f64,
    /// Weight decay of AdamW.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub weight_decay: f64,
    /// Decay rate of AdamW's first moment.
    #[schemars(range(min = 0.0, max = 0.999_999))]
    pub beta1: f64,
    /// Decay rate of AdamW's second moment.
    #[schemars(range(min = 0.0, max = 0.999_999_9))]
    pub beta2: f64,
    /// L2 norm to which a larger gradient is scaled down.
    #[schemars(range(min = 1e-9, max = 1e9))]
    pub max_grad_norm: f64,
    /// Largest number of tokens of an example. Longer examples are skipped.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub max_tokens: u32,
    /// Steps between two checkpoints. 0: chosen by the trainer.
    pub save_every: u32,
    /// Place the examples of a pass one after another without padding.
    pub packing: bool,
    /// Train on several boxes.
    pub across: Option<AcrossSpec>,
}

/// A LoRA adapter.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "LoRA adapter")]
pub struct LoraAdapterSpec {
    /// Rank of the adapter.
    #[schemars(range(min = 1, max = 4096))]
    pub r: u32,
    /// Scale of the adapter: its output is multiplied by `alpha / r`.
    #[schemars(range(min = 1e-6, max = 1e6))]
    pub alpha: f64,
    /// Linear modules that get an adapter. Only a model outside of the table of docs/FORMATS.md may
    /// have other ones.
    #[schemars(
        length(min = 1),
        extend("items" = {
            "type": "string", "pattern": "^[A-Za-z0-9_.]{1,64}$", "examples": TARGET_MODULES
        })
    )]
    pub target_modules: Vec<String>,
    /// Share of an adapter's inputs that is dropped in each step.
    #[schemars(range(min = 0.0, max = 0.99))]
    pub dropout: f64,
    /// Train only B; A keeps its random values.
    pub freeze_a: bool,
    /// Base while the adapter is trained: `nf4` takes a quarter of the memory of bf16 (QLoRA), and
    /// needs trainers with PyTorch and bitsandbytes.
    pub quantize: BaseQuantizationSpec,
}

/// The form of the frozen base while an adapter is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseQuantizationSpec {
    #[default]
    None,
    Nf4,
}

/// The linear modules of the models of the table.
const TARGET_MODULES: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

const MODULE_NAME_MAX: usize = 64;

impl Default for LoraAdapterSpec {
    fn default() -> Self {
        let target_modules = TARGET_MODULES.map(str::to_owned).to_vec();
        let quantize = BaseQuantizationSpec::None;
        Self { r: 16, alpha: 32.0, target_modules, dropout: 0.0, freeze_a: false, quantize }
    }
}

impl Default for TrainingSpec {
    fn default() -> Self {
        Self {
            epochs: 1,
            max_steps: 0,
            batch_size: 32,
            micro_batch_tokens: 0,
            learning_rate: CycleSchedule::Constant(2e-4),
            schedule: RateScheduleSpec::Cosine,
            warmup_ratio: 0.1,
            final_ratio: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            max_grad_norm: 1.0,
            max_tokens: 1024,
            save_every: 0,
            packing: true,
            across: None,
        }
    }
}

impl TrainingSpec {
    /// Converts the section to its form in the `spec` fact, with the learning rate of the first
    /// cycle. Without `lora` all weights are trained.
    pub fn to_proto(&self, lora: Option<&LoraAdapterSpec>) -> v1::Training {
        let schedule = match self.schedule {
            RateScheduleSpec::Constant => v1::Schedule::Constant,
            RateScheduleSpec::Linear => v1::Schedule::Linear,
            RateScheduleSpec::Cosine => v1::Schedule::Cosine,
        };
        v1::Training {
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch_size: self.batch_size,
            micro_batch_tokens: self.micro_batch_tokens,
            learning_rate: self.learning_rate.first_value(),
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
            objective: None,
            across: self.across.as_ref().map(AcrossSpec::to_proto),
            lora: lora.map(|lora| v1::Lora {
                r: lora.r,
                alpha: lora.alpha,
                target_modules: lora.target_modules.clone(),
                dropout: lora.dropout,
                freeze_a: lora.freeze_a,
                quantization: match lora.quantize {
                    BaseQuantizationSpec::None => v1::lora::Quantization::None,
                    BaseQuantizationSpec::Nf4 => v1::lora::Quantization::Nf4,
                }
                .into(),
            }),
        }
    }
}

impl TrainingSpec {
    pub(crate) fn check_fields(&self, section: &str, cycles: u32) -> FieldResult {
        let field = |name: &str| format!("{section}.{name}");
        check_count(&field("epochs"), self.epochs, u32::from(self.max_steps == 0), 10_000)?;
        check_count(&field("max_steps"), self.max_steps, 0, 100_000_000)?;
        check_count(&field("batch_size"), self.batch_size, 1, 65_536)?;
        check_count(&field("micro_batch_tokens"), self.micro_batch_tokens, 0, 1 << 24)?;
        self.learning_rate.check_range(&field("learning_rate"), cycles, 1e-12, 10.0)?;
        check_range(&field("warmup_ratio"), self.warmup_ratio, 0.0, 1.0)?;
        check_range(&field("final_ratio"), self.final_ratio, 0.0, 1.0)?;
        check_range(&field("weight_decay"), self.weight_decay, 0.0, 10.0)?;
        check_range(&field("beta1"), self.beta1, 0.0, 0.999_999)?;
        check_range(&field("beta2"), self.beta2, 0.0, 0.999_999_9)?;
        check_range(&field("max_grad_norm"), self.max_grad_norm, 1e-9, 1e9)?;
        check_count(&field("max_tokens"), self.max_tokens, 2, 1_048_576)?;
        self.across.as_ref().map_or(Ok(()), |across| across.check_fields(&field("across")))
    }
}

impl LoraAdapterSpec {
    pub(crate) fn check_fields(&self, section: &str) -> FieldResult {
        check_count(&format!("{section}.r"), self.r, 1, 4096)?;
        check_range(&format!("{section}.alpha"), self.alpha, 1e-6, 1e6)?;
        check_range(&format!("{section}.dropout"), self.dropout, 0.0, 0.99)?;
        let field = format!("{section}.target_modules");
        ensure_field(!self.target_modules.is_empty(), &field, "name at least one module")?;
        for (index, module) in self.target_modules.iter().enumerate() {
            let is_name = (1..=MODULE_NAME_MAX).contains(&module.len())
                && module.bytes().all(|it| it.is_ascii_alphanumeric() || b"_.".contains(&it));
            let remedy = describe_choice(module, &TARGET_MODULES);
            ensure_field(is_name, &format!("{field}[{index}]"), remedy)?;
        }
        Ok(())
    }

    /// Checks that the modules are those of the models of the table of architectures.
    pub(crate) fn check_usual_modules(&self, section: &str) -> FieldResult {
        for (index, module) in self.target_modules.iter().enumerate() {
            let is_usual = TARGET_MODULES.contains(&module.as_str());
            let remedy = describe_choice(module, &TARGET_MODULES);
            ensure_field(is_usual, &format!("{section}.target_modules[{index}]"), remedy)?;
        }
        Ok(())
    }
}
