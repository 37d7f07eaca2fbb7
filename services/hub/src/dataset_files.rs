//! Finds the files of a split among those of a repository, by the hub's conventions for paths.

use std::collections::{BTreeMap, BTreeSet};

use crate::DatasetName;

/// The branch on which the hub keeps most data sets as parquet: `<config>/<split>/0000.parquet`.
pub(crate) const CONVERTED_REVISION: &str = "refs/convert/parquet";
/// The config of a repository that has only one.
const DEFAULT_CONFIG: &str = "default";
const DEFAULT_SPLIT: &str = "train";
/// Names of files and directories that begin so hold a part of a split.
const PARTIAL_PREFIX: &str = "partial-";
/// The formats, the preferred one first: a repository may have its data in several.
const ENDINGS: [&str; 9] =
    [".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz"];
/// Directories that are part of no name.
const DATA_DIRECTORIES: [&str; 2] = ["data", "dataset"];
/// Descriptions in JSON, without rows.
const DESCRIPTIONS: [&str; 4] =
    ["dataset_info.json", "dataset_infos.json", "package.json", "config.json"];
const LISTED_NAMES_MAX: usize = 20;

/// A data set without the wanted split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DatasetSplitError {
    #[error("the repository has no .parquet, .jsonl, .json or .csv file (H113)")]
    NoFiles,
    #[error("there is no config {wanted:?}; there are {configs} (H113)")]
    NoConfig { wanted: String, configs: String },
    #[error("name one of the configs, as in :{first}/train; there are {configs} (H113)")]
    ManyConfigs { first: String, configs: String },
    #[error("there is no split {wanted:?}; config {config:?} has {splits} (H113)")]
    NoSplit { wanted: String, config: String, splits: String },
    #[error("the hub has converted only a part of {split:?} (H113)")]
    Partial { split: String },
}

/// The files of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitFiles {
    pub(crate) config: String,
    pub(crate) split: String,
    /// In the order of their rows.
    pub(crate) files: Vec<String>,
}

/// Files by config and split.
type DatasetLayout = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// Chooses the files of the split that a name asks for.
pub(crate) fn choose_split(
    files: &[String],
    name: &DatasetName,
) -> Result<SplitFiles, DatasetSplitError> {
    let layout = lay_out_files(files);
    let config = choose_config(&layout, name.config.as_deref())?;
    let splits = &layout[&config];
    let split = match &name.split {
        Some(split) => split.clone(),
        None if splits.len() == 1 => splits.keys().next().cloned().unwrap_or_default(),
        None => DEFAULT_SPLIT.to_owned(),
    };
    if splits.contains_key(&format!("{PARTIAL_PREFIX}{split}")) {
        return Err(DatasetSplitError::Partial { split });
    }
    match splits.get(&split) {
        Some(files) => Ok(SplitFiles { config, split, files: files.clone() }),
        None => Err(DatasetSplitError::NoSplit {
            wanted: split,
            config,
            splits: join_names(splits.keys()),
        }),
    }
}

fn choose_config(
    layout: &DatasetLayout,
    wanted: Option<&str>,
) -> Result<String, DatasetSplitError> {
    let first = layout.keys().next().ok_or(DatasetSplitError::NoFiles)?;
    let configs = || join_names(layout.keys());
    match wanted {
        Some(wanted) if layout.contains_key(wanted) => Ok(wanted.to_owned()),
        Some(wanted) => {
            Err(DatasetSplitError::NoConfig { wanted: wanted.to_owned(), configs: configs() })
        }
        None if layout.len() == 1 => Ok(first.clone()),
        None if layout.contains_key(DEFAULT_CONFIG) => Ok(DEFAULT_CONFIG.to_owned()),
        None => Err(DatasetSplitError::ManyConfigs { first: first.clone(), configs: configs() }),
    }
}

fn join_names<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> String {
    let more = names.len().saturating_sub(LISTED_NAMES_MAX);
    let named: Vec<&str> = names.take(LISTED_NAMES_MAX).map(String::as_str).collect();
    let named = named.join(", ");
    if more > 0 { format!("{named} and {more} more") } else { named }
}

/// Sorts the data files of one format into configs and splits.
fn lay_out_files(files: &[String]) -> DatasetLayout {
    let is_data = |file: &&String| {
        let name = file.rsplit('/').next().unwrap_or(file);
        !file.split('/').any(|part| part.starts_with('.')) && !DESCRIPTIONS.contains(&name)
    };
    let of = |ending: &str| -> BTreeSet<&String> {
        files.iter().filter(is_data).filter(|file| file.ends_with(ending)).collect()
    };
    let chosen = ENDINGS.iter().map(|ending| of(ending)).find(|files| !files.is_empty());
    let mut layout = DatasetLayout::new();
    for file in chosen.unwrap_or_default() {
        let (config, split) = place_file(file);
        layout.entry(config).or_default().entry(split).or_default().push(file.clone());
    }
    layout
}

/// Returns the config and the split that a path names.
fn place_file(path: &str) -> (String, String) {
    let mut directories: Vec<&str> = path.split('/').collect();
    let name = directories.pop().unwrap_or_default();
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    let is_number = !stem.is_empty() && stem.bytes().all(|byte| byte.is_ascii_digit());
    let split = match find_split(stem) {
        Some(split) => Some(split),
        // As in the conversion to parquet.
        None if is_number && directories.len() > 1 => directories.pop().map(str::to_owned),
        None => None,
    };
    let split = split.or_else(|| {
        let found = directories.last().and_then(|last| find_split(last));
        if found.is_some() {
            directories.pop();
        }
        found
    });
    directories.retain(|directory| !DATA_DIRECTORIES.contains(directory));
    let config =
        if directories.is_empty() { DEFAULT_CONFIG.to_owned() } else { directories.join("/") };
    (config, split.unwrap_or_else(|| DEFAULT_SPLIT.to_owned()))
}

/// Returns the split in the name of a file or directory: `<split>-00000-of-00002`, or one of the
/// words that the hub knows.
fn find_split(name: &str) -> Option<String> {
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
    let parts: Vec<&str> = name.rsplitn(4, '-').collect();
    if let [last, "of", first, split] = parts[..]
        && is_number(&last)
        && is_number(&first)
    {
        return Some(split.to_owned());
    }
    let words = name.split(|it: char| !it.is_ascii_alphanumeric());
    words.into_iter().find_map(|word| match word.to_ascii_lowercase().as_str() {
        "train" | "training" => Some("train".to_owned()),
        "validation" | "valid" | "val" | "dev" => Some("validation".to_owned()),
        "test" | "testing" | "eval" | "evaluation" => Some("test".to_owned()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(files: &[&str], name: &str) -> Result<(String, String, Vec<String>), String> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        let chosen = choose_split(&files, &name.parse().unwrap());
        chosen.map(|it| (it.config, it.split, it.files)).map_err(|error| error.to_string())
    }

    fn split(config: &str, split: &str, files: &[&str]) -> (String, String, Vec<String>) {
        (config.into(), split.into(), files.iter().map(|file| (*file).to_owned()).collect())
    }

    #[test]
    fn files_are_found_by_the_paths_that_the_hub_s_tools_write() {
        let converted =
            ["main/test/0000.parquet", "main/train/0000.parquet", "main/train/0001.parquet"];
        assert_eq!(choose(&converted, "a/b"), Ok(split("main", "train", &converted[1..])));
        assert_eq!(choose(&converted, "a/b:main/test"), Ok(split("main", "test", &converted[..1])));
        for (files, name, expected) in [
            (vec!["train.jsonl", "README.md"], "a/b", split("default", "train", &["train.jsonl"])),
            (vec!["rows.csv", ".gitattributes"], "a/b", split("default", "train", &["rows.csv"])),
            (
                vec!["data/sft-00000-of-00002.parquet", "data/sft-00001-of-00002.parquet"],
                "a/b",
                split(
                    "default",
                    "sft",
                    &["data/sft-00000-of-00002.parquet", "data/sft-00001-of-00002.parquet"],
                ),
            ),
            (
                vec!["math/train-00000-of-00001.parquet", "code/train-00000-of-00001.parquet"],
                "a/b:math/train",
                split("math", "train", &["math/train-00000-of-00001.parquet"]),
            ),
            (
                vec!["en/dev/part.jsonl", "en/train/part.jsonl", "dataset_infos.json"],
                "a/b:validation",
                split("en", "validation", &["en/dev/part.jsonl"]),
            ),
            // One format counts.
            (
                vec!["data/test.jsonl", "data/test.parquet", "data/train.csv"],
                "a/b:test",
                split("default", "test", &["data/test.parquet"]),
            ),
        ] {
            assert_eq!(choose(&files, name), Ok(expected), "{files:?}");
        }
    }

    #[test]
    fn an_error_lists_what_there_is() {
        let two = ["de/train/0000.parquet", "en/train/0000.parquet"];
        let partial = ["default/partial-train/0000.parquet", "default/test/0000.parquet"];
        for (files, name, words) in [
            (&two[..], "a/b", "name one of the configs, as in :de/train; there are de, en"),
            (&two, "a/b:fr/train", "no config \"fr\"; there are de, en"),
            (&two, "a/b:en/test", "no split \"test\"; config \"en\" has train"),
            (&partial, "a/b:train", "only a part of \"train\""),
            (&["README.md"], "a/b", "no .parquet"),
        ] {
            let error = choose(files, name).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(choose(&partial, "a/b:test").is_ok());
    }
}
