//! The names of data sets on the hub.

use std::{fmt, str::FromStr};

use crate::ModelId;

const PART_BYTES_MAX: usize = 200;

/// A part of a data set: `org/name`, `org/name@revision`, and then `:split` or `:config/split`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetName {
    /// Repository and revision.
    pub id: ModelId,
    /// `None` for the only one, or the one called `default`.
    pub config: Option<String>,
    /// `None` for `train`, or the only one.
    pub split: Option<String>,
}

/// A text that is not the name of a data set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a data set of the hub; write org/name, org/name:split or \
     org/name@revision:config/split (H113)"
)]
pub struct DatasetNameError(String);

impl FromStr for DatasetName {
    type Err = DatasetNameError;

    fn from_str(text: &str) -> Result<Self, DatasetNameError> {
        let wrong = || DatasetNameError(text.chars().take(200).collect());
        let (id, part) = match text.split_once(':') {
            Some((id, part)) => (id, Some(part)),
            None => (text, None),
        };
        let id: ModelId = id.parse().map_err(|_| wrong())?;
        let (config, split) = match part.map(|part| part.split_once('/').ok_or(part)) {
            None => (None, None),
            Some(Err(split)) => (None, Some(split)),
            Some(Ok((config, split))) => (Some(config), Some(split)),
        };
        // Both are directories of the hub's conversion to parquet.
        let is_legal = |part: &&str| {
            !part.is_empty()
                && part.len() <= PART_BYTES_MAX
                && ![".", ".."].contains(part)
                && !part.contains(['/', '\\', ':', '@'])
                && !part.chars().any(char::is_control)
        };
        if ![config, split].iter().flatten().all(is_legal) {
            return Err(wrong());
        }
        Ok(Self { id, config: config.map(str::to_owned), split: split.map(str::to_owned) })
    }
}

impl fmt::Display for DatasetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)?;
        match (&self.config, &self.split) {
            (Some(config), Some(split)) => write!(f, ":{config}/{split}"),
            (None, Some(split)) => write!(f, ":{split}"),
            (_, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_set_is_named_by_repository_config_and_split() {
        let parts = |text: &str| {
            let name: DatasetName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
            (name.id.revision, name.config, name.split)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parts("openai/gsm8k"), (None, None, None));
        assert_eq!(parts("openai/gsm8k:test"), (None, None, some("test")));
        assert_eq!(parts("a/b:main/train"), (None, some("main"), some("train")));
        assert_eq!(parts("a/b@refs/pr/1:x y/v1"), (some("refs/pr/1"), some("x y"), some("v1")));
        for wrong in ["", "gsm8k", "a/b:", "a/b:/c", "a/b:c/", "a/b:../c", "a/b:c/d/e", "a/b:c:d"] {
            let error = wrong.parse::<DatasetName>().unwrap_err().to_string();
            assert!(error.contains("org/name:split"), "{wrong:?}: {error}");
        }
    }
}
