//! Decides if a `checkpoint-N` directory is complete. Pure: the inputs are names, sizes, times and
//! parts of files; the output is a [`SaveReadiness`].
//!
//! Hugging Face's Trainer writes in place and without an end marker, in this order: weights,
//! settings, optimizer state, `trainer_state.json`. A save over an older one leaves the older
//! `trainer_state.json` until the end of the save.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    checkpoint_files::{self, CheckpointContent},
    safetensors_header,
    trainer_state::TrainerState,
};

/// Two equal listings in a row mean that no file was written in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FileStat {
    /// 0 for a directory.
    pub bytes: u64,
    /// Nanoseconds since 1970, 0 for a directory.
    pub modified_ns: i64,
    pub inode: u64,
    pub is_dir: bool,
}

pub(crate) type DirectoryListing = BTreeMap<String, FileStat>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileProbe {
    Text(Vec<u8>),
    Parses(bool),
    /// The length field and header of a safetensors file.
    Header(Vec<u8>),
    /// The first four bytes, and the last bytes, where a zip file has its directory.
    Ends([u8; 4], Vec<u8>),
    Unreadable(String),
}

pub(crate) type FileProbes = BTreeMap<String, FileProbe>;

/// The readiness of a save.
///
/// ```text
/// NotYet -> Ready                    the trainer finishes the save
/// Ready  -> NotYet -> Ready          it saves the same step again
/// Broken                             permanent, until the files change
/// ```
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SaveReadiness {
    /// Complete at the time of this scan; the quiet period shows that writing has ended.
    Ready(CompleteCheckpoint),
    /// Still being written, or abandoned by a writer that died; contains the missing part.
    NotYet(String),
    /// Unpublishable, however long the wait; contains the reason and a remedy.
    Broken(String),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompleteCheckpoint {
    pub content: CheckpointContent,
    /// To publish, sorted.
    pub files: Vec<String>,
    /// Absent if the writer left a marker but no `trainer_state.json`.
    pub state: Option<TrainerState>,
    pub base_name: Option<String>,
    /// True if several processes wrote it, of which one may still write.
    pub ranks: bool,
}

/// A writer creates them after its last file, so one of them makes completeness certain.
pub(crate) const MARKERS: [&str; 2] = [".flotilla-complete", "STABLE"];
/// Exists while a save is incomplete.
const INCOMPLETE: &str = "checkpoint-is-incomplete.txt";
/// The last file of a save by Hugging Face's Trainer.
pub(crate) const TRAINER_STATE: &str = "trainer_state.json";

/// Returns N of `checkpoint-N`, or `None` for other names, including `tmp-checkpoint-N`.
pub fn parse_step(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("checkpoint-")?;
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// Returns true if names and times do not already show a save in progress.
pub(crate) fn may_be_complete(listing: &DirectoryListing) -> bool {
    let last = MARKERS.iter().chain([&TRAINER_STATE]).find_map(|name| listing.get(*name));
    last.is_some_and(|last| find_newer(last, listing).is_none())
}

/// Returns true if a file shows something about a save. Others may appear and disappear.
pub(crate) fn is_relevant(name: &str) -> bool {
    let marks = MARKERS.contains(&name) || name == INCOMPLETE || name == TRAINER_STATE;
    let shards = name == ".metadata"
        || ["pytorch_model", "global_step", "zero_to_fp32", ".tmp"]
            .iter()
            .any(|p| name.starts_with(p));
    marks || shards || checkpoint_files::is_published(name) || checkpoint_files::is_torch(name)
}

pub(crate) fn files_to_probe(listing: &DirectoryListing) -> Vec<String> {
    let looked_into = |name: &&String| {
        name.as_str() == TRAINER_STATE
            || checkpoint_files::is_published(name)
            || checkpoint_files::is_torch(name)
    };
    let of_files = listing.iter().filter(|(_, stat)| !stat.is_dir).map(|(name, _)| name);
    of_files.filter(looked_into).cloned().collect()
}

/// Detects the random states of several processes.
pub(crate) fn has_multiple_ranks(listing: &DirectoryListing) -> bool {
    listing.contains_key("rng_state_0.pth")
}

pub(crate) fn judge_readiness(
    step: u32,
    listing: &DirectoryListing,
    probes: &FileProbes,
) -> SaveReadiness {
    match examine_save(step, listing, probes) {
        Ok(checkpoint) => SaveReadiness::Ready(checkpoint),
        Err(verdict) => verdict,
    }
}

fn not_yet<T>(why: impl Into<String>) -> Result<T, SaveReadiness> {
    Err(SaveReadiness::NotYet(why.into()))
}

fn broken_save<T>(why: impl Into<String>) -> Result<T, SaveReadiness> {
    Err(SaveReadiness::Broken(why.into()))
}

/// Checks all conditions of a complete save, in order of cost.
fn examine_save(
    step: u32,
    listing: &DirectoryListing,
    probes: &FileProbes,
) -> Result<CompleteCheckpoint, SaveReadiness> {
    if listing.contains_key(INCOMPLETE) {
        return not_yet(format!("{INCOMPLETE} is there"));
    }
    if let Some(name) = listing.keys().find(|name| name.starts_with(".tmp")) {
        return not_yet(format!("{name} is being written"));
    }
    if let Some((name, why)) = probes.iter().find_map(unreadable_reason) {
        return broken_save(format!(
            "cannot read {name}: {why}; run the agent as the user that trains"
        ));
    }
    let marked = check_marker(listing)?;
    let state = check_trainer_state(step, listing, probes, marked)?;
    let (content, weights) = find_weights(listing, probes)?;
    for name in &weights {
        check_tensors(name, listing, probes)?;
    }
    let files = published_files(content, &weights, listing);
    check_json_files(&files, probes)?;
    if !marked {
        check_torch_files(listing, probes)?;
        check_ranks(listing)?;
    }
    let base_name = read_base_name(content, probes)?;
    Ok(CompleteCheckpoint { content, files, state, base_name, ranks: has_multiple_ranks(listing) })
}

fn unreadable_reason<'a>((name, probe): (&'a String, &'a FileProbe)) -> Option<(&'a str, &'a str)> {
    match probe {
        FileProbe::Unreadable(why) => Some((name, why)),
        _ => None,
    }
}

/// Returns true if the file's time shows whether a save has ended.
fn is_dated_file(name: &str) -> bool {
    let rng = name.starts_with("rng_state");
    !rng && (checkpoint_files::is_weights(name)
        || checkpoint_files::is_settings(name)
        || checkpoint_files::is_torch(name))
}

fn find_newer<'a>(stat: &FileStat, listing: &'a DirectoryListing) -> Option<&'a String> {
    let newer = |(name, other): &(&String, &FileStat)| {
        is_dated_file(name) && !other.is_dir && other.modified_ns > stat.modified_ns
    };
    listing.iter().find(newer).map(|(name, _)| name)
}

/// Returns true for a marker of this save. One that is older than a file belongs to an older save,
/// and the new one is not ready.
fn check_marker(listing: &DirectoryListing) -> Result<bool, SaveReadiness> {
    let Some((name, stat)) = MARKERS.iter().find_map(|name| listing.get_key_value(*name)) else {
        return Ok(false);
    };
    match find_newer(stat, listing) {
        Some(newer) => not_yet(format!("{newer} is newer than {name}: being saved again")),
        None => Ok(true),
    }
}

/// Checks that the state belongs to this step and is the newest file. It may be missing only with a
/// marker.
fn check_trainer_state(
    step: u32,
    listing: &DirectoryListing,
    probes: &FileProbes,
    marked: bool,
) -> Result<Option<TrainerState>, SaveReadiness> {
    let Some(stat) = listing.get(TRAINER_STATE) else {
        return if marked { Ok(None) } else { not_yet(format!("no {TRAINER_STATE} yet")) };
    };
    if !marked && let Some(newer) = find_newer(stat, listing) {
        return not_yet(format!("{newer} is newer than {TRAINER_STATE}: being saved again"));
    }
    let Some(FileProbe::Text(text)) = probes.get(TRAINER_STATE) else {
        return not_yet(format!("{TRAINER_STATE} came later"));
    };
    let Some(state) = TrainerState::parse(text) else {
        return not_yet(format!("{TRAINER_STATE} is not JSON yet"));
    };
    if state.global_step != u64::from(step) {
        return broken_save(format!(
            "{TRAINER_STATE} is of step {}: rename the directory back",
            state.global_step
        ));
    }
    Ok(Some(state))
}

const SHARDED: &str = "the weights are in shards of a distributed run; save them whole: with FSDP \
                       `fsdp_state_dict_type: FULL_STATE_DICT`, with DeepSpeed ZeRO-3 \
                       `stage3_gather_16bit_weights_on_model_save: true`, or consolidate them \
                       (`accelerate merge-weights`, `zero_to_fp32.py`)";

const PICKLED: &str = "the weights are a pickle, which is never published; save with \
                       `save_safetensors=True`, the default";

fn find_weights(
    listing: &DirectoryListing,
    probes: &FileProbes,
) -> Result<(CheckpointContent, Vec<String>), SaveReadiness> {
    let there = |name: &str| listing.get(name).is_some_and(|stat| !stat.is_dir);
    if there(checkpoint_files::ADAPTER_FILE) {
        if !there(checkpoint_files::ADAPTER_CONFIG) {
            return not_yet(format!("no {} yet", checkpoint_files::ADAPTER_CONFIG));
        }
        return Ok((CheckpointContent::Adapter, vec![checkpoint_files::ADAPTER_FILE.to_owned()]));
    }
    let shards = if there(checkpoint_files::MODEL_FILE) {
        vec![checkpoint_files::MODEL_FILE.to_owned()]
    } else if there(checkpoint_files::INDEX_FILE) {
        read_index(probes)?
    } else {
        return Err(explain_no_weights(listing));
    };
    if let Some(missing) = shards.iter().find(|name| !there(name)) {
        return not_yet(format!("no {missing} yet"));
    }
    if !there(checkpoint_files::MODEL_CONFIG) {
        return not_yet(format!("no {} yet", checkpoint_files::MODEL_CONFIG));
    }
    Ok((CheckpointContent::Model, shards))
}

/// Treats sharded and pickled weights as permanent; others may still come.
fn explain_no_weights(listing: &DirectoryListing) -> SaveReadiness {
    let sharded = |(name, _): (&String, &FileStat)| {
        let fsdp = name.starts_with("pytorch_model_fsdp") || name == ".metadata";
        let deepspeed = name.starts_with("global_step") || name == "zero_to_fp32.py";
        fsdp || deepspeed
    };
    let pickled = |name: &String| {
        let model = name.starts_with("pytorch_model") || name.starts_with("adapter_model");
        model && name.contains(".bin")
    };
    if listing.iter().any(sharded) {
        return SaveReadiness::Broken(SHARDED.into());
    }
    if listing.keys().any(pickled) {
        return SaveReadiness::Broken(PICKLED.into());
    }
    SaveReadiness::NotYet("no weights yet".into())
}

fn read_index(probes: &FileProbes) -> Result<Vec<String>, SaveReadiness> {
    let Some(FileProbe::Text(text)) = probes.get(checkpoint_files::INDEX_FILE) else {
        return not_yet(format!("{} came later", checkpoint_files::INDEX_FILE));
    };
    let Ok(index) = serde_json::from_slice::<serde_json::Value>(text) else {
        return not_yet(format!("{} is not JSON yet", checkpoint_files::INDEX_FILE));
    };
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let names: BTreeSet<String> = map
        .into_iter()
        .flat_map(|map| map.values())
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let plain = |name: &String| checkpoint_files::is_weights(name) && !name.contains('/');
    if names.is_empty() || !names.iter().all(plain) {
        return broken_save(format!(
            "{} does not list safetensors files beside it",
            checkpoint_files::INDEX_FILE
        ));
    }
    Ok(names.into_iter().collect())
}

/// Checks that the file has the length its header states, and no empty tensor.
fn check_tensors(
    name: &str,
    listing: &DirectoryListing,
    probes: &FileProbes,
) -> Result<(), SaveReadiness> {
    let Some(FileProbe::Header(header)) = probes.get(name) else {
        return not_yet(format!("{name} came later"));
    };
    let bytes = listing.get(name).map_or(0, |stat| stat.bytes);
    match safetensors_header::parse_header(header) {
        None => not_yet(format!("{name} has no whole header yet")),
        Some(seen) if seen.file_bytes > bytes => {
            not_yet(format!("{name} has {bytes} of {} bytes", seen.file_bytes))
        }
        Some(seen) if seen.file_bytes < bytes => broken_save(format!(
            "{name} has {bytes} bytes, its header declares {}",
            seen.file_bytes
        )),
        Some(safetensors_header::TensorFileInfo { empty_tensor: Some(tensor), .. }) => {
            broken_save(format!("{name} holds no element of {tensor}: {SHARDED}"))
        }
        Some(_) => Ok(()),
    }
}

/// Returns sorted names.
fn published_files(
    content: CheckpointContent,
    weights: &[String],
    listing: &DirectoryListing,
) -> Vec<String> {
    let there = |name: &&&str| listing.get(**name).is_some_and(|stat| !stat.is_dir);
    let mut names: Vec<String> = weights.to_vec();
    names.extend(
        checkpoint_files::side_files(content).iter().filter(there).map(|name| (*name).to_owned()),
    );
    if content == CheckpointContent::Model
        && !weights.iter().any(|name| name == checkpoint_files::MODEL_FILE)
    {
        names.push(checkpoint_files::INDEX_FILE.to_owned());
    }
    names.sort();
    names
}

fn check_json_files(published: &[String], probes: &FileProbes) -> Result<(), SaveReadiness> {
    let is_json = |text: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok();
    for name in published.iter().filter(|name| name.ends_with(".json")) {
        let whole = match probes.get(name) {
            Some(FileProbe::Text(text)) => is_json(text),
            Some(FileProbe::Parses(parses)) => *parses,
            _ => false,
        };
        if !whole {
            return not_yet(format!("{name} is not JSON yet"));
        }
    }
    Ok(())
}

/// Checks files of `torch.save`: zip files with a directory at the end. Older formats cannot be
/// checked.
fn check_torch_files(listing: &DirectoryListing, probes: &FileProbes) -> Result<(), SaveReadiness> {
    let torch =
        listing.iter().filter(|(name, stat)| checkpoint_files::is_torch(name) && !stat.is_dir);
    for (name, stat) in torch {
        let whole = match probes.get(name) {
            _ if stat.bytes == 0 => false,
            Some(FileProbe::Ends([b'P', b'K', ..], tail)) => ends_a_zip(tail),
            Some(FileProbe::Ends(..)) => true,
            _ => false,
        };
        if !whole {
            return not_yet(format!("{name} is not fully written yet"));
        }
    }
    Ok(())
}

/// 22 bytes, followed by a comment whose length the record states.
pub(crate) const ZIP_END_BYTES: usize = 22;

fn ends_a_zip(tail: &[u8]) -> bool {
    let at = |start: usize| {
        let record = &tail[start..];
        let comment = usize::from(u16::from_le_bytes([record[20], record[21]]));
        record.starts_with(b"PK\x05\x06") && record.len() == ZIP_END_BYTES + comment
    };
    (0..(tail.len() + 1).saturating_sub(ZIP_END_BYTES)).rev().any(at)
}

/// Requires the random states of all processes, the last of which may be late.
fn check_ranks(listing: &DirectoryListing) -> Result<(), SaveReadiness> {
    let number = |name: &String| -> Option<u32> {
        name.strip_prefix("rng_state_")?.strip_suffix(".pth")?.parse().ok()
    };
    let ranks: BTreeSet<u32> = listing.keys().filter_map(number).collect();
    let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    match (0..count).find(|rank| !ranks.contains(rank)) {
        Some(missing) => not_yet(format!("no rng_state_{missing}.pth yet")),
        None => Ok(()),
    }
}

fn read_base_name(
    content: CheckpointContent,
    probes: &FileProbes,
) -> Result<Option<String>, SaveReadiness> {
    if content == CheckpointContent::Model {
        return Ok(None);
    }
    let Some(FileProbe::Text(text)) = probes.get(checkpoint_files::ADAPTER_CONFIG) else {
        return not_yet(format!("{} came later", checkpoint_files::ADAPTER_CONFIG));
    };
    let Ok(serde_json::Value::Object(map)) = serde_json::from_slice(text) else {
        return broken_save(format!("{} is not a JSON object", checkpoint_files::ADAPTER_CONFIG));
    };
    let name = map.get("base_model_name_or_path").and_then(serde_json::Value::as_str);
    Ok(name.filter(|name| !name.is_empty()).map(str::to_owned))
}

#[cfg(test)]
mod tests;
