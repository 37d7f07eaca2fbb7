//! Settings of objectives. All are numbers.

use std::fmt;

/// A setting that some or all objectives have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SettingKey {
    ClipLow,
    ClipHigh,
    MaxRatio,
    MaxGap,
    MaxTokens,
    Beta,
    Gamma,
    Lambda,
    Nll,
    Desirable,
    Undesirable,
    MinReward,
    Kl,
    TruncateTokens,
    TruncateSequences,
    MaskTokens,
    MaskSequences,
}

/// The settings that every objective has. They are off by default.
pub(crate) const COMMON_KEYS: [SettingKey; 5] = [
    SettingKey::Kl,
    SettingKey::TruncateTokens,
    SettingKey::TruncateSequences,
    SettingKey::MaskTokens,
    SettingKey::MaskSequences,
];

/// The settings that correct for another engine or an older policy. At most one is on.
pub(crate) const CORRECTION_KEYS: [SettingKey; 4] = [
    SettingKey::TruncateTokens,
    SettingKey::TruncateSequences,
    SettingKey::MaskTokens,
    SettingKey::MaskSequences,
];

/// The error that an objective has no such setting, or not with this value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingError {
    #[error("there is no objective {name:?}; it must be one of: {known} (O101)")]
    NoObjective { name: String, known: String },
    #[error("{objective} has no setting {key:?}; it has {known} (O101)")]
    Unknown { objective: &'static str, key: String, known: String },
    #[error("{key} of {objective} is {value}, but must be from {min} to {max} (O101)")]
    OutOfRange { objective: &'static str, key: SettingKey, value: f64, min: f64, max: f64 },
    #[error("{objective} needs {key}: {meaning} (O101)")]
    Missing { objective: &'static str, key: SettingKey, meaning: &'static str },
    #[error("{first} and {second} of {objective} exclude each other: set one of them to 0 (O101)")]
    Excluded { objective: &'static str, first: SettingKey, second: SettingKey },
}

impl SettingKey {
    /// Returns the name in specs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClipLow => "clip_low",
            Self::ClipHigh => "clip_high",
            Self::MaxRatio => "max_ratio",
            Self::MaxGap => "max_gap",
            Self::MaxTokens => "max_tokens",
            Self::Beta => "beta",
            Self::Gamma => "gamma",
            Self::Lambda => "lambda",
            Self::Nll => "nll",
            Self::Desirable => "desirable",
            Self::Undesirable => "undesirable",
            Self::MinReward => "min_reward",
            Self::Kl => "kl",
            Self::TruncateTokens => "truncate_tokens",
            Self::TruncateSequences => "truncate_sequences",
            Self::MaskTokens => "mask_tokens",
            Self::MaskSequences => "mask_sequences",
        }
    }

    /// Describes the setting in a line.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::ClipLow => {
                "how far below 1 a ratio may be before a worse sequence stops counting"
            }
            Self::ClipHigh => {
                "how far above 1 a ratio may be before a better sequence stops counting"
            }
            Self::MaxRatio => "the largest ratio that counts",
            Self::MaxGap => {
                "the largest difference from the teacher that counts, in nats; 0 is no limit"
            }
            Self::MaxTokens => "the number of tokens that every sequence is divided by",
            Self::Beta => "how strongly the difference of a pair, or from the reference, counts",
            Self::Gamma => "the margin by which the better sequence of a pair should win",
            Self::Lambda => "the weight of the odds ratio",
            Self::Nll => "the weight of the likelihood of the better sequence",
            Self::Desirable => "the weight of sequences that pass",
            Self::Undesirable => "the weight of sequences that fail",
            Self::MinReward => "the least reward of a sequence that passes",
            Self::Kl => "the weight of the KL divergence from the reference; 0 is off",
            Self::TruncateTokens => {
                "the largest correction of a token for the engine that drew it; 0 is off"
            }
            Self::TruncateSequences => {
                "the largest correction of a sequence for the engine that drew it; 0 is off"
            }
            Self::MaskTokens => "tokens whose correction is larger do not count; 0 is off",
            Self::MaskSequences => "sequences whose correction is larger do not count; 0 is off",
        }
    }

    /// Returns the smallest and largest value.
    pub fn range(self) -> (f64, f64) {
        match self {
            Self::ClipLow => (0.0, 1.0),
            Self::MaxTokens => (1.0, 1e9),
            Self::MinReward => (-1e9, 1e9),
            Self::Beta | Self::MaxRatio => (1e-9, 1e3),
            Self::ClipHigh
            | Self::MaxGap
            | Self::Gamma
            | Self::Lambda
            | Self::Nll
            | Self::Desirable
            | Self::Undesirable
            | Self::Kl
            | Self::TruncateTokens
            | Self::TruncateSequences
            | Self::MaskTokens
            | Self::MaskSequences => (0.0, 1e3),
        }
    }
}

impl fmt::Display for SettingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
