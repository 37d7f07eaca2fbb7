//! Whether a `checkpoint-N` directory is complete. Pure: names, sizes, times and the ends of
//! files come in, a verdict goes out.
//!
//! Hugging Face's Trainer writes in place, in an order and without any end marker of its own:
//! weights, settings, what the optimizer remembers, `trainer_state.json` last. A save over an
//! older one leaves that one's `trainer_state.json` until its own end.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    files::{self, Content},
    safetensors,
    trainer_state::TrainerState,
};

/// What a file system says of a file. Two equal listings in a row mean that nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Stat {
    pub bytes: u64,
    pub modified_ns: i64,
    pub inode: u64,
    pub is_dir: bool,
}

/// The files of a directory, by name.
pub(crate) type Listing = BTreeMap<String, Stat>;

/// As much of a file as a verdict needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Peek {
    /// All of it.
    Text(Vec<u8>),
    /// Whether it is JSON.
    Parses(bool),
    /// Of a safetensors file: its length field and header.
    Header(Vec<u8>),
    /// The first four bytes, and the last of a file at whose end a zip's directory should be.
    Ends([u8; 4], Vec<u8>),
    /// Why it cannot be looked at.
    Unreadable(String),
}

/// Looks into files, by name.
pub(crate) type Peeks = BTreeMap<String, Peek>;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    /// Complete as far as one look can tell; that nothing is written any more takes a second.
    Ready(Checkpoint),
    /// Somebody still writes, or died writing.
    NotYet(String),
    /// However long one waits, it cannot be published; says what would help.
    Broken(String),
}

/// What a complete directory holds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Checkpoint {
    pub content: Content,
    /// Those that are published.
    pub files: Vec<String>,
    /// Absent where the writer left a marker and no `trainer_state.json`.
    pub state: Option<TrainerState>,
    /// What an adapter's settings call their base.
    pub base_name: Option<String>,
    /// Several processes wrote it, one of them perhaps still does.
    pub ranks: bool,
}

/// Left by a writer behind its last file: no guessing is needed.
pub(crate) const MARKERS: [&str; 2] = [".flotilla-complete", "STABLE"];
const INCOMPLETE: &str = "checkpoint-is-incomplete.txt";
pub(crate) const TRAINER_STATE: &str = "trainer_state.json";

/// `checkpoint-N`'s N; nothing for other names, `tmp-checkpoint-N` among them.
pub fn step_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("checkpoint-")?;
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// Whether looking into files is worth it: while a save goes on, names and times say so.
pub(crate) fn may_be_complete(listing: &Listing) -> bool {
    let last = MARKERS.iter().chain([&TRAINER_STATE]).find_map(|name| listing.get(*name));
    last.is_some_and(|last| newer_than(last, listing).is_none())
}

/// Whether a name says anything about a save. Others may come and go.
pub(crate) fn matters(name: &str) -> bool {
    let marks = MARKERS.contains(&name) || name == INCOMPLETE || name == TRAINER_STATE;
    let shards = name == ".metadata"
        || ["pytorch_model", "global_step", "zero_to_fp32", ".tmp"]
            .iter()
            .any(|p| name.starts_with(p));
    marks || shards || files::is_published(name) || files::is_torch(name)
}

/// The files a verdict looks into.
pub(crate) fn to_peek(listing: &Listing) -> Vec<String> {
    let looked_into = |name: &&String| {
        name.as_str() == TRAINER_STATE || files::is_published(name) || files::is_torch(name)
    };
    let of_files = listing.iter().filter(|(_, stat)| !stat.is_dir).map(|(name, _)| name);
    of_files.filter(looked_into).cloned().collect()
}

/// Whether several processes write this directory.
pub(crate) fn has_ranks(listing: &Listing) -> bool {
    listing.contains_key("rng_state_0.pth")
}

pub(crate) fn judge(step: u32, listing: &Listing, peeks: &Peeks) -> Verdict {
    match examine(step, listing, peeks) {
        Ok(checkpoint) => Verdict::Ready(checkpoint),
        Err(verdict) => verdict,
    }
}

fn not_yet<T>(why: impl Into<String>) -> Result<T, Verdict> {
    Err(Verdict::NotYet(why.into()))
}

fn broken<T>(why: impl Into<String>) -> Result<T, Verdict> {
    Err(Verdict::Broken(why.into()))
}

fn examine(step: u32, listing: &Listing, peeks: &Peeks) -> Result<Checkpoint, Verdict> {
    if listing.contains_key(INCOMPLETE) {
        return not_yet(format!("{INCOMPLETE} is there"));
    }
    if let Some(name) = listing.keys().find(|name| name.starts_with(".tmp")) {
        return not_yet(format!("{name} is being written"));
    }
    if let Some((name, why)) = peeks.iter().find_map(unreadable) {
        return broken(format!("cannot read {name}: {why}; run the agent as the user who trains"));
    }
    let marked = marker(listing)?;
    let state = trainer_state(step, listing, peeks, marked)?;
    let (content, weights) = weights(listing, peeks)?;
    for name in &weights {
        whole_tensors(name, listing, peeks)?;
    }
    let files = published(content, &weights, listing);
    whole_texts(&files, peeks)?;
    if !marked {
        whole_torch_files(listing, peeks)?;
        all_ranks(listing)?;
    }
    let base_name = base_name(content, peeks)?;
    Ok(Checkpoint { content, files, state, base_name, ranks: has_ranks(listing) })
}

fn unreadable<'a>((name, peek): (&'a String, &'a Peek)) -> Option<(&'a str, &'a str)> {
    match peek {
        Peek::Unreadable(why) => Some((name, why)),
        _ => None,
    }
}

/// Files whose age tells whether a save has ended.
fn counts(name: &str) -> bool {
    let rng = name.starts_with("rng_state");
    !rng && (files::is_weights(name) || files::is_settings(name) || files::is_torch(name))
}

/// A file of the save that is newer than this one.
fn newer_than<'a>(stat: &Stat, listing: &'a Listing) -> Option<&'a String> {
    let newer = |(name, other): &(&String, &Stat)| {
        counts(name) && !other.is_dir && other.modified_ns > stat.modified_ns
    };
    listing.iter().find(newer).map(|(name, _)| name)
}

/// Whether the writer left a marker. One that is older than what it marks is an older save's.
fn marker(listing: &Listing) -> Result<bool, Verdict> {
    let Some((name, stat)) = MARKERS.iter().find_map(|name| listing.get_key_value(*name)) else {
        return Ok(false);
    };
    match newer_than(stat, listing) {
        Some(newer) => not_yet(format!("{newer} is newer than {name}: it is saved again")),
        None => Ok(true),
    }
}

fn trainer_state(
    step: u32,
    listing: &Listing,
    peeks: &Peeks,
    marked: bool,
) -> Result<Option<TrainerState>, Verdict> {
    let Some(stat) = listing.get(TRAINER_STATE) else {
        return if marked { Ok(None) } else { not_yet(format!("no {TRAINER_STATE} yet")) };
    };
    if !marked && let Some(newer) = newer_than(stat, listing) {
        return not_yet(format!("{newer} is newer than {TRAINER_STATE}: it is saved again"));
    }
    let Some(Peek::Text(text)) = peeks.get(TRAINER_STATE) else {
        return not_yet(format!("{TRAINER_STATE} came later"));
    };
    let Some(state) = TrainerState::parse(text) else {
        return not_yet(format!("{TRAINER_STATE} is no JSON yet"));
    };
    if state.global_step != u64::from(step) {
        return broken(format!(
            "{TRAINER_STATE} is of step {}: give the directory its own name back",
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

/// What it holds, and in which files.
fn weights(listing: &Listing, peeks: &Peeks) -> Result<(Content, Vec<String>), Verdict> {
    let there = |name: &str| listing.get(name).is_some_and(|stat| !stat.is_dir);
    if there(files::ADAPTER) {
        if !there(files::ADAPTER_CONFIG) {
            return not_yet(format!("no {} yet", files::ADAPTER_CONFIG));
        }
        return Ok((Content::Adapter, vec![files::ADAPTER.to_owned()]));
    }
    let shards = if there(files::MODEL) {
        vec![files::MODEL.to_owned()]
    } else if there(files::INDEX) {
        shards(peeks)?
    } else {
        return Err(no_weights(listing));
    };
    if let Some(missing) = shards.iter().find(|name| !there(name)) {
        return not_yet(format!("no {missing} yet"));
    }
    if !there(files::CONFIG) {
        return not_yet(format!("no {} yet", files::CONFIG));
    }
    Ok((Content::Model, shards))
}

fn no_weights(listing: &Listing) -> Verdict {
    let sharded = |(name, _): (&String, &Stat)| {
        let fsdp = name.starts_with("pytorch_model_fsdp") || name == ".metadata";
        let deepspeed = name.starts_with("global_step") || name == "zero_to_fp32.py";
        fsdp || deepspeed
    };
    let pickled = |name: &String| {
        let model = name.starts_with("pytorch_model") || name.starts_with("adapter_model");
        model && name.contains(".bin")
    };
    if listing.iter().any(sharded) {
        return Verdict::Broken(SHARDED.into());
    }
    if listing.keys().any(pickled) {
        return Verdict::Broken(PICKLED.into());
    }
    Verdict::NotYet("no weights yet".into())
}

/// The files an index lists.
fn shards(peeks: &Peeks) -> Result<Vec<String>, Verdict> {
    let Some(Peek::Text(text)) = peeks.get(files::INDEX) else {
        return not_yet(format!("{} came later", files::INDEX));
    };
    let Ok(index) = serde_json::from_slice::<serde_json::Value>(text) else {
        return not_yet(format!("{} is no JSON yet", files::INDEX));
    };
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let names: BTreeSet<String> = map
        .into_iter()
        .flat_map(|map| map.values())
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let plain = |name: &String| files::is_weights(name) && !name.contains('/');
    if names.is_empty() || !names.iter().all(plain) {
        return broken(format!("{} does not list safetensors files beside it", files::INDEX));
    }
    Ok(names.into_iter().collect())
}

fn whole_tensors(name: &str, listing: &Listing, peeks: &Peeks) -> Result<(), Verdict> {
    let Some(Peek::Header(header)) = peeks.get(name) else {
        return not_yet(format!("{name} came later"));
    };
    let bytes = listing.get(name).map_or(0, |stat| stat.bytes);
    match safetensors::look(header) {
        None => not_yet(format!("{name} has no whole header yet")),
        Some(seen) if seen.bytes > bytes => {
            not_yet(format!("{name} has {bytes} of {} bytes", seen.bytes))
        }
        Some(seen) if seen.bytes < bytes => {
            broken(format!("{name} has {bytes} bytes, its header speaks of {}", seen.bytes))
        }
        Some(safetensors::Seen { empty: Some(tensor), .. }) => {
            broken(format!("{name} holds no element of {tensor}: {SHARDED}"))
        }
        Some(_) => Ok(()),
    }
}

fn published(content: Content, weights: &[String], listing: &Listing) -> Vec<String> {
    let there = |name: &&&str| listing.get(**name).is_some_and(|stat| !stat.is_dir);
    let mut names: Vec<String> = weights.to_vec();
    names.extend(files::beside(content).iter().filter(there).map(|name| (*name).to_owned()));
    if content == Content::Model && !weights.iter().any(|name| name == files::MODEL) {
        names.push(files::INDEX.to_owned());
    }
    names.sort();
    names
}

fn whole_texts(published: &[String], peeks: &Peeks) -> Result<(), Verdict> {
    let is_json = |text: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok();
    for name in published.iter().filter(|name| name.ends_with(".json")) {
        let whole = match peeks.get(name) {
            Some(Peek::Text(text)) => is_json(text),
            Some(Peek::Parses(parses)) => *parses,
            _ => false,
        };
        if !whole {
            return not_yet(format!("{name} is no JSON yet"));
        }
    }
    Ok(())
}

/// `torch.save` writes a zip, whose directory is at its end. Other formats tell nothing.
fn whole_torch_files(listing: &Listing, peeks: &Peeks) -> Result<(), Verdict> {
    let torch = listing.iter().filter(|(name, stat)| files::is_torch(name) && !stat.is_dir);
    for (name, stat) in torch {
        let whole = match peeks.get(name) {
            _ if stat.bytes == 0 => false,
            Some(Peek::Ends([b'P', b'K', ..], tail)) => ends_a_zip(tail),
            Some(Peek::Ends(..)) => true,
            _ => false,
        };
        if !whole {
            return not_yet(format!("{name} is not written to its end yet"));
        }
    }
    Ok(())
}

/// The record that ends a zip: its signature, 18 bytes, and a comment of the length it states.
pub(crate) const ZIP_END_BYTES: usize = 22;

fn ends_a_zip(tail: &[u8]) -> bool {
    let at = |start: usize| {
        let record = &tail[start..];
        let comment = usize::from(u16::from_le_bytes([record[20], record[21]]));
        record.starts_with(b"PK\x05\x06") && record.len() == ZIP_END_BYTES + comment
    };
    (0..(tail.len() + 1).saturating_sub(ZIP_END_BYTES)).rev().any(at)
}

/// Each process writes its own; the last may be late.
fn all_ranks(listing: &Listing) -> Result<(), Verdict> {
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

fn base_name(content: Content, peeks: &Peeks) -> Result<Option<String>, Verdict> {
    if content == Content::Model {
        return Ok(None);
    }
    let Some(Peek::Text(text)) = peeks.get(files::ADAPTER_CONFIG) else {
        return not_yet(format!("{} came later", files::ADAPTER_CONFIG));
    };
    let Ok(serde_json::Value::Object(map)) = serde_json::from_slice(text) else {
        return broken(format!("{} is no JSON object", files::ADAPTER_CONFIG));
    };
    let name = map.get("base_model_name_or_path").and_then(serde_json::Value::as_str);
    Ok(name.filter(|name| !name.is_empty()).map(str::to_owned))
}

#[cfg(test)]
mod tests;
