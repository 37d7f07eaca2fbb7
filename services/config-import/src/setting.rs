//! The settings of a training that the tables name, independent of the program.

use serde_json::Value;

/// A setting of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Setting {
    BaseModel,
    BaseRevision,
    Seed,
    /// The kind of training.
    Task,
    /// The loss within a kind of training.
    Loss,
    /// LoRA, or all weights.
    Adapter,
    UsesPeft,
    LoraRank,
    LoraAlpha,
    LoraDropout,
    LoraModules,
    /// Adapters on all linear modules.
    LoraAllLinear,
    UsesRslora,
    /// The form of the frozen base: 4 bits, another form, or off.
    Quantization,
    MaxTokens,
    /// Sequences of one pass on one device.
    PassBatch,
    Accumulation,
    TotalBatch,
    Epochs,
    MaxSteps,
    LearningRate,
    Scheduler,
    /// Learning rate at the end, as a share of the peak.
    FinalRatio,
    WarmupRatio,
    WarmupSteps,
    WeightDecay,
    Optimizer,
    Beta1,
    Beta2,
    MaxGradNorm,
    SaveSteps,
    Packing,
    TrainOnPrompts,
    TrainOnAnswersOnly,
    /// All answers of a conversation and nothing else, or all of it.
    AllAnswersOnly,
    /// The last answer of a conversation, or all answers.
    LastAnswerOnly,
    ChatTemplate,
    SystemPrompt,
    EvalShare,
    SamplesPerPrompt,
    Temperature,
    TopP,
    TopK,
    MaxNewTokens,
    MaxPromptTokens,
    DropsUnfinished,
    /// Passes over the samples of a cycle.
    SamplePasses,
    RewardFunctions,
    RewardWeights,
    /// Weight of the KL divergence, or beta of a preference loss.
    Beta,
    ClipLow,
    ClipHigh,
    RatioLevel,
    RewardScale,
    Gamma,
    OddsWeight,
    LikelihoodWeight,
    DesirableWeight,
    UndesirableWeight,
    Cycles,
    MinReward,
    KeepShare,
    KeptMin,
    RewardShaping,
    Curriculum,
    RateDecay,
    RateFloor,
    VerifierKind,
    VerifierRuns,
    VerifierMatch,
}

/// The form of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueForm {
    Text,
    /// A name; programs write true and false too.
    Word,
    /// A list, or names separated by commas.
    Words,
    Flag,
    Number,
    /// 0 or more.
    Count,
    /// Whole; negative values are off.
    Whole,
    Numbers,
}

/// A value in the form of its setting.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SettingValue {
    Text(String),
    Words(Vec<String>),
    Flag(bool),
    Number(f64),
    Numbers(Vec<f64>),
}

impl Setting {
    fn value_form(self) -> ValueForm {
        match self {
            Self::BaseModel | Self::BaseRevision | Self::SystemPrompt => ValueForm::Text,
            Self::Task
            | Self::Adapter
            | Self::Quantization
            | Self::Scheduler
            | Self::Optimizer
            | Self::ChatTemplate
            | Self::RatioLevel
            | Self::RewardScale
            | Self::RewardShaping
            | Self::Curriculum
            | Self::VerifierKind
            | Self::VerifierMatch => ValueForm::Word,
            Self::Loss | Self::LoraModules | Self::RewardFunctions => ValueForm::Words,
            Self::RewardWeights => ValueForm::Numbers,
            Self::UsesPeft
            | Self::LoraAllLinear
            | Self::UsesRslora
            | Self::Packing
            | Self::TrainOnPrompts
            | Self::TrainOnAnswersOnly
            | Self::AllAnswersOnly
            | Self::LastAnswerOnly
            | Self::DropsUnfinished
            | Self::VerifierRuns => ValueForm::Flag,
            Self::Seed
            | Self::LoraRank
            | Self::MaxTokens
            | Self::PassBatch
            | Self::Accumulation
            | Self::TotalBatch
            | Self::SamplesPerPrompt
            | Self::MaxNewTokens
            | Self::MaxPromptTokens
            | Self::SamplePasses
            | Self::Cycles
            | Self::KeptMin => ValueForm::Count,
            Self::MaxSteps | Self::TopK => ValueForm::Whole,
            Self::LoraAlpha
            | Self::LoraDropout
            | Self::Epochs
            | Self::LearningRate
            | Self::FinalRatio
            | Self::WarmupRatio
            | Self::WarmupSteps
            | Self::WeightDecay
            | Self::Beta1
            | Self::Beta2
            | Self::MaxGradNorm
            | Self::SaveSteps
            | Self::EvalShare
            | Self::Temperature
            | Self::TopP
            | Self::Beta
            | Self::ClipLow
            | Self::ClipHigh
            | Self::Gamma
            | Self::OddsWeight
            | Self::LikelihoodWeight
            | Self::DesirableWeight
            | Self::UndesirableWeight
            | Self::MinReward
            | Self::KeepShare
            | Self::RateDecay
            | Self::RateFloor => ValueForm::Number,
        }
    }

    /// Reads a value. Fails with the form that it should have.
    pub(crate) fn parse_value(self, value: &Value) -> Result<SettingValue, &'static str> {
        let (read, expected) = match self.value_form() {
            ValueForm::Text => (read_text(value).map(SettingValue::Text), "a text"),
            ValueForm::Word => (read_word(value).map(SettingValue::Text), "a name"),
            ValueForm::Words => (read_words(value).map(SettingValue::Words), "a list of names"),
            ValueForm::Flag => (value.as_bool().map(SettingValue::Flag), "true or false"),
            ValueForm::Number => (read_number(value).map(SettingValue::Number), "a number"),
            ValueForm::Count => {
                let fits = |number: &f64| is_whole(*number) && *number >= 0.0;
                let count = read_number(value).filter(fits).map(SettingValue::Number);
                (count, "a whole number of 0 or more")
            }
            ValueForm::Whole => {
                let whole = read_number(value).filter(|number| is_whole(*number));
                (whole.map(SettingValue::Number), "a whole number")
            }
            ValueForm::Numbers => (read_numbers(value), "a list of numbers"),
        };
        read.ok_or(expected)
    }
}

/// Returns true for a whole number of a size that specs can have.
fn is_whole(number: f64) -> bool {
    number.fract() == 0.0 && number.abs() <= f64::from(u32::MAX)
}

fn read_text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn read_word(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim().to_owned()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        _ => None,
    }
}

pub(crate) fn read_words(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(items) => items.iter().map(read_text).collect(),
        Value::String(text) => {
            let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
            Some(words.map(str::to_owned).collect())
        }
        _ => None,
    }
}

/// Accepts texts such as `5e-5`, which some YAML readers do not read as numbers.
pub(crate) fn read_number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number: &f64| number.is_finite())
}

fn read_numbers(value: &Value) -> Option<SettingValue> {
    let numbers: Option<Vec<f64>> = value.as_array()?.iter().map(read_number).collect();
    numbers.map(SettingValue::Numbers)
}
