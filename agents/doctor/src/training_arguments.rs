//! A dump of Hugging Face's `TrainingArguments`, or a settings file of a training script: JSON or
//! YAML with the same keys. Keys that do not concern the host are ignored.

use serde::Deserialize;

use super::{TrainingPlan, parse_major_minor};
use crate::estimate::{ModelShape, PlannedTraining, TrainingMethod};
use formats::FloatDtype;
use hardware::host_snapshot::HostSnapshot;

const BYTES_MAX: usize = 1 << 20;

/// The settings that the checks use. Missing keys have the defaults of transformers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TrainingArguments {
    #[serde(alias = "batch_size")]
    pub per_device_train_batch_size: u64,
    pub gradient_accumulation_steps: u64,
    pub num_train_epochs: f64,
    pub max_steps: i64,
    pub save_strategy: String,
    /// Below 1, a fraction of all steps.
    pub save_steps: f64,
    pub eval_strategy: String,
    pub evaluation_strategy: Option<String>,
    pub do_eval: bool,
    pub eval_on_start: bool,
    pub load_best_model_at_end: bool,
    pub metric_for_best_model: Option<String>,
    /// A setting of scripts that stop early.
    pub early_stopping_patience: Option<f64>,
    pub dataloader_num_workers: u32,
    pub dataloader_pin_memory: bool,
    pub bf16: bool,
    pub fp16: bool,
    pub load_in_4bit: bool,
    pub load_in_8bit: bool,
    pub gradient_checkpointing: bool,
    /// The maximum length of an example, in TRL and in scripts.
    #[serde(alias = "max_seq_length")]
    pub max_length: Option<u64>,
    #[serde(alias = "lora_rank", alias = "r")]
    pub lora_r: Option<u64>,
    pub padding: Option<PaddingSetting>,
    pub pad_to_max_length: bool,
    pub attn_implementation: Option<String>,
}

/// `"max_length"` or a flag.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum PaddingSetting {
    Named(String),
    Flag(bool),
}

impl Default for TrainingArguments {
    fn default() -> Self {
        Self {
            per_device_train_batch_size: 8,
            gradient_accumulation_steps: 1,
            num_train_epochs: 3.0,
            max_steps: -1,
            save_strategy: "steps".into(),
            save_steps: 500.0,
            eval_strategy: "no".into(),
            evaluation_strategy: None,
            do_eval: false,
            eval_on_start: false,
            load_best_model_at_end: false,
            metric_for_best_model: None,
            early_stopping_patience: None,
            dataloader_num_workers: 0,
            dataloader_pin_memory: true,
            bf16: false,
            fp16: false,
            load_in_4bit: false,
            load_in_8bit: false,
            gradient_checkpointing: false,
            max_length: None,
            lora_r: None,
            padding: None,
            pad_to_max_length: false,
            attn_implementation: None,
        }
    }
}

/// A settings file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrainingArgumentsError {
    #[error("it has {0} bytes, and settings have at most {BYTES_MAX}; is it another file? (A115)")]
    Large(usize),
    #[error("a setting is not what transformers takes (A115): {}", .0.to_string().trim_start_matches("error: "))]
    Parse(Box<serde_saphyr::Error>),
    #[error(
        "{field} is {value}, and must be from {min} to {max}; correct it, or leave it out for \
         transformers' default (A115)"
    )]
    Range { field: &'static str, value: f64, min: f64, max: f64 },
}

/// The first version of transformers without `evaluation_strategy`.
const EVAL_STRATEGY_SINCE: (u64, u64) = (4, 46);

impl TrainingArguments {
    /// Parses a settings file in JSON or YAML. A known setting with a wrong type or an impossible
    /// value is an error.
    pub fn parse(text: &str) -> Result<Self, TrainingArgumentsError> {
        if text.len() > BYTES_MAX {
            return Err(TrainingArgumentsError::Large(text.len()));
        }
        let arguments: Self = serde_saphyr::from_str(text)
            .map_err(|error| TrainingArgumentsError::Parse(Box::new(error)))?;
        arguments.check_ranges()?;
        Ok(arguments)
    }

    fn check_ranges(&self) -> Result<(), TrainingArgumentsError> {
        let wide = |count: u64| count as f64;
        for (field, value, min, max) in [
            ("per_device_train_batch_size", wide(self.per_device_train_batch_size), 1.0, 65_536.0),
            ("gradient_accumulation_steps", wide(self.gradient_accumulation_steps), 1.0, 1e6),
            ("num_train_epochs", self.num_train_epochs, 0.0, 1e6),
            ("save_steps", self.save_steps, 0.0, 1e12),
            ("max_length", wide(self.max_length.unwrap_or(1)), 1.0, 1_048_576.0),
            ("lora_r", wide(self.lora_r.unwrap_or(1)), 1.0, 16_384.0),
        ] {
            if !(min..=max).contains(&value) {
                return Err(TrainingArgumentsError::Range { field, value, min, max });
            }
        }
        Ok(())
    }

    /// Converts the settings into a plan. `examples` and the model are not part of the settings;
    /// the snapshot provides the version of transformers.
    pub fn to_plan(
        &self,
        examples: Option<u64>,
        model: Option<ModelShape>,
        box_: &HostSnapshot,
    ) -> TrainingPlan {
        let steps = self.total_steps(examples);
        TrainingPlan {
            steps,
            save_every: self.checkpoint_interval(steps),
            dtype: Some(self.training_dtype()),
            quantised_bits: match (self.load_in_4bit, self.load_in_8bit) {
                (true, _) => 4,
                (false, true) => 8,
                (false, false) => 0,
            },
            memory: model.and_then(|shape| Some((shape, self.planned_training()?))),
            checkpointing: Some(self.gradient_checkpointing),
            dataloader_workers: Some(self.dataloader_num_workers),
            pin_memory: Some(self.dataloader_pin_memory),
            evals: self.evaluation_settings(),
            refused: self.refused_settings(box_),
            pads_to_max: self.pad_to_max_length
                || self.padding == Some(PaddingSetting::Named("max_length".into())),
            ..TrainingPlan::default()
        }
    }

    fn total_steps(&self, examples: Option<u64>) -> Option<u64> {
        if let Some(steps) = u64::try_from(self.max_steps).ok().filter(|steps| *steps > 0) {
            return Some(steps);
        }
        let (batch, accumulate) =
            (self.per_device_train_batch_size, self.gradient_accumulation_steps);
        examples.map(|examples| {
            TrainingPlan::count_steps(examples, batch, accumulate, self.num_train_epochs)
        })
    }

    /// 0 if no checkpoint is saved, `None` if unknown.
    fn checkpoint_interval(&self, steps: Option<u64>) -> Option<u64> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be a number of steps"
        )]
        let whole = |steps: f64| steps.ceil() as u64;
        match strategy_name(&self.save_strategy) {
            "no" => Some(0),
            "steps" if self.save_steps < 1.0 => {
                steps.map(|steps| whole(self.save_steps * steps as f64))
            }
            "steps" => Some(whole(self.save_steps)),
            // Every epoch, or every best checkpoint.
            _ => None,
        }
    }

    fn training_dtype(&self) -> FloatDtype {
        match (self.bf16, self.fp16) {
            (true, _) => FloatDtype::Bf16,
            (false, true) => FloatDtype::F16,
            (false, false) => FloatDtype::F32,
        }
    }

    /// Returns `None` without a maximum length, or for quantised weights, for which other formulas
    /// apply.
    fn planned_training(&self) -> Option<PlannedTraining> {
        let sequence = self.max_length?;
        let method = self.lora_r.map_or(TrainingMethod::Full, |rank| TrainingMethod::Lora { rank });
        let is_quantised = self.load_in_4bit || self.load_in_8bit;
        (!is_quantised).then(|| PlannedTraining {
            method,
            batch: self.per_device_train_batch_size,
            sequence,
            bytes_per_weight: if self.training_dtype() == FloatDtype::F32 { 4 } else { 2 },
            checkpointing: self.gradient_checkpointing,
            eager_attention: self.attn_implementation.as_deref() == Some("eager"),
            dropout: false,
            quantized: false,
        })
    }

    /// Lists the settings with which the trainer would evaluate in its own process.
    fn evaluation_settings(&self) -> Vec<String> {
        let strategy = self.evaluation_strategy.as_ref().unwrap_or(&self.eval_strategy);
        let settings = [
            (strategy_name(strategy) != "no")
                .then(|| format!("eval_strategy: {}", strategy_name(strategy))),
            self.do_eval.then(|| "do_eval: true".into()),
            self.eval_on_start.then(|| "eval_on_start: true".into()),
            self.load_best_model_at_end.then(|| "load_best_model_at_end: true".into()),
            self.metric_for_best_model.as_ref().map(|it| format!("metric_for_best_model: {it}")),
            self.early_stopping_patience.map(|it| format!("early_stopping_patience: {it}")),
        ];
        settings.into_iter().flatten().collect()
    }

    fn refused_settings(&self, box_: &HostSnapshot) -> Vec<(String, &'static str)> {
        let mut refused = Vec::new();
        let packages = box_.python.as_ref().map(|python| &python.packages);
        let transformers = packages.and_then(|packages| packages.get("transformers"));
        let renamed = transformers
            .is_some_and(|version| parse_major_minor(version) >= Some(EVAL_STRATEGY_SINCE));
        if self.evaluation_strategy.is_some() && renamed {
            let why = "this transformers has no such argument: it is eval_strategy now";
            refused.push(("evaluation_strategy".into(), why));
        }
        let strategy = self.evaluation_strategy.as_ref().unwrap_or(&self.eval_strategy);
        if self.load_best_model_at_end
            && strategy_name(strategy) != strategy_name(&self.save_strategy)
        {
            let why = "transformers requires the save and eval strategy to match for it";
            refused.push(("load_best_model_at_end: true without evals".into(), why));
        }
        refused
    }
}

/// Returns `steps` for `IntervalStrategy.STEPS`, as some dumps contain it.
fn strategy_name(strategy: &str) -> &str {
    match strategy.rsplit('.').next().unwrap_or_default() {
        "NO" | "none" | "False" | "false" => "no",
        "STEPS" => "steps",
        "EPOCH" => "epoch",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_settings_are_let_be_and_wrong_ones_named() {
        let arguments =
            TrainingArguments::parse("{\"save_steps\": 100, \"hub_token\": null}").unwrap();
        assert_eq!(
            arguments,
            TrainingArguments { save_steps: 100.0, ..TrainingArguments::default() }
        );
        let yaml = "save_strategy: IntervalStrategy.NO\nmax_steps: 30\n";
        let plan =
            TrainingArguments::parse(yaml).unwrap().to_plan(None, None, &HostSnapshot::default());
        assert_eq!((plan.steps, plan.save_every), (Some(30), Some(0)));
        let zero =
            TrainingArguments::parse("gradient_accumulation_steps: 0").unwrap_err().to_string();
        assert!(zero.contains("gradient_accumulation_steps"), "{zero}");
        TrainingArguments::parse("save_steps: [1]").unwrap_err();
        TrainingArguments::parse("num_train_epochs: .nan").unwrap_err();
        TrainingArguments::parse(&" ".repeat(BYTES_MAX + 1)).unwrap_err();
    }

    #[test]
    fn a_share_of_the_steps_is_counted_in_steps() {
        let arguments = TrainingArguments::parse("save_steps: 0.25\nmax_steps: 90\n").unwrap();
        assert_eq!(arguments.checkpoint_interval(Some(90)), Some(23));
    }

    proptest::proptest! {
        /// Checks the plan as well.
        #[test]
        fn no_file_makes_the_reading_panic(
            key in "(save_steps|num_train_epochs|max_steps|save_strategy|padding|max_length|lora_r)",
            value in "[-+0-9.eE]{1,24}|[a-zA-Z.\"\\[\\]{}:, -]{0,20}",
            examples in proptest::option::of(proptest::num::u64::ANY),
        ) {
            let Ok(arguments) = TrainingArguments::parse(&format!("{key}: {value}\n")) else {
                return Ok(());
            };
            let box_ = HostSnapshot::default();
            let plan = arguments.to_plan(examples, None, &box_);
            let profile = hardware::HardwareProfile::for_host(&box_).unwrap();
            crate::check_plan(&box_, &profile, &plan);
        }
    }
}
