//! The parts of a large file, so that whoever gets one can tell at once whether it is right.
//!
//! BLAKE3 is a tree: the values of aligned parts merge to the digest of the whole. So a list of
//! them needs no trust and is no part of a tree's identity; it lies beside the manifest in
//! `B3PARTS`, and a tree without one is fetched as it always was.

use std::{collections::BTreeMap, fmt::Write as _, ops::Range};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use serde::{Deserialize, Serialize};
use wire::Digest;

/// Beside a tree's manifest.
pub(crate) const PARTS: &str = "B3PARTS";
/// A list of parts is not worth a request for less.
pub(crate) const FILE_BYTES_MIN: u64 = 1 << 20;
/// Of a part: at 1 Gb/s a millisecond, which is how long a box that has it keeps the others.
const PART_BYTES_MIN: u64 = 128 << 10;
/// Of a file; larger files have larger parts.
pub(crate) const PARTS_MAX: u64 = 2048;
/// Of `B3PARTS`; what does not fit is left out.
pub(crate) const LIST_BYTES_MAX: u64 = 16 << 20;
const SCHEMA: &str = "flotilla.parts/1";

/// What the parts of one file must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parts {
    bytes: u64,
    part_bytes: u64,
    values: Vec<ChainingValue>,
}

impl Parts {
    /// How large the parts of such a file are; `None` when it has none.
    pub(crate) fn part_bytes(bytes: u64) -> Option<u64> {
        let enough = bytes.div_ceil(PARTS_MAX).next_power_of_two();
        (bytes > FILE_BYTES_MIN).then(|| PART_BYTES_MIN.max(enough))
    }

    /// If these are the parts of that file.
    fn checked(digest: Digest, bytes: u64, values: Vec<ChainingValue>) -> Option<Self> {
        let part_bytes = Self::part_bytes(bytes)?;
        let as_many = values.len() as u64 == bytes.div_ceil(part_bytes);
        (as_many && root(&values) == digest).then_some(Self { bytes, part_bytes, values })
    }

    /// The parts of a file by their values, of which there are two at least, and its digest.
    pub(crate) fn merge(bytes: u64, part_bytes: u64, values: Vec<ChainingValue>) -> (Digest, Self) {
        (root(&values), Self { bytes, part_bytes, values })
    }

    pub(crate) fn count(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a part lies.
    pub(crate) fn range(&self, index: usize) -> Range<u64> {
        let start = index as u64 * self.part_bytes;
        start..self.bytes.min(start + self.part_bytes)
    }

    pub(crate) fn is(&self, index: usize, bytes: &[u8]) -> bool {
        let range = self.range(index);
        if range.end - range.start != bytes.len() as u64 {
            return false;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(range.start).update(bytes);
        hasher.finalize_non_root() == self.values[index]
    }
}

/// As `blake3` would: the left side is the largest power of two that leaves something.
fn root(values: &[ChainingValue]) -> Digest {
    let (left, right) = halves(values);
    merge_subtrees_root(&left, &right, Mode::Hash).into()
}

fn merged(values: &[ChainingValue]) -> ChainingValue {
    if let [value] = values {
        return *value;
    }
    let (left, right) = halves(values);
    merge_subtrees_non_root(&left, &right, Mode::Hash)
}

/// Of two values at least: a file with parts has more than three.
fn halves(values: &[ChainingValue]) -> (ChainingValue, ChainingValue) {
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    (merged(left), merged(right))
}

/// Hashes a file of known size, and its parts on the way.
pub(crate) struct PartHasher {
    part_bytes: Option<u64>,
    part: blake3::Hasher,
    values: Vec<ChainingValue>,
    /// Of all that came.
    count: u64,
}

impl PartHasher {
    pub(crate) fn new(bytes: u64) -> Self {
        let (part_bytes, part) = (Parts::part_bytes(bytes), blake3::Hasher::new());
        Self { part_bytes, part, values: Vec::new(), count: 0 }
    }

    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        self.count += bytes.len() as u64;
        let Some(part_bytes) = self.part_bytes else {
            self.part.update(bytes);
            return;
        };
        while !bytes.is_empty() {
            if self.part.count() == part_bytes {
                self.end_part(part_bytes);
            }
            let room = usize::try_from(part_bytes - self.part.count()).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.part.update(now);
            bytes = later;
        }
    }

    fn end_part(&mut self, part_bytes: u64) {
        self.values.push(self.part.finalize_non_root());
        self.part = blake3::Hasher::new();
        self.part.set_input_offset(self.values.len() as u64 * part_bytes);
    }

    /// A digest of what came so far, for who compares two readings of one file.
    pub(crate) fn so_far(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for value in &self.values {
            hasher.update(value);
        }
        if self.part.count() > 0 {
            hasher.update(&self.part.finalize_non_root());
        }
        hasher.finalize().into()
    }

    /// The digest of what came, how much it was, and its parts if there are any.
    pub(crate) fn finish(mut self) -> (Digest, u64, Option<Parts>) {
        let Some(part_bytes) = self.part_bytes else {
            return (self.part.finalize().into(), self.count, None);
        };
        if self.values.is_empty() {
            // Shorter than was said.
            return (self.part.finalize().into(), self.count, None);
        }
        self.values.push(self.part.finalize_non_root());
        let (digest, parts) = Parts::merge(self.count, part_bytes, self.values);
        (digest, self.count, Some(parts))
    }
}

/// The parts of a tree's large files, by their digests.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartLists(BTreeMap<Digest, Vec<ChainingValue>>);

#[derive(Serialize, Deserialize)]
struct Written {
    schema: String,
    /// In hex, one after the other.
    parts: BTreeMap<Digest, String>,
}

impl PartLists {
    pub(crate) fn add(&mut self, digest: Digest, parts: Option<Parts>) {
        if let Some(parts) = parts {
            self.0.insert(digest, parts.values);
        }
    }

    /// The text of `B3PARTS`; `None` when there is nothing to say, or too much.
    pub(crate) fn to_json(&self) -> Option<Vec<u8>> {
        let hex = |values: &Vec<ChainingValue>| {
            let mut text = String::with_capacity(values.len() * 64);
            for byte in values.iter().flatten() {
                // Writing to a string does not fail.
                let _ = write!(text, "{byte:02x}");
            }
            text
        };
        let parts = self.0.iter().map(|(digest, values)| (*digest, hex(values))).collect();
        let written = Written { schema: SCHEMA.to_owned(), parts };
        let json = serde_json::to_vec(&written).ok()?;
        (!self.0.is_empty() && json.len() as u64 <= LIST_BYTES_MAX).then_some(json)
    }

    /// What can be read of it; that it is right is found when parts are asked for.
    pub(crate) fn parse(json: &[u8]) -> Self {
        let read = serde_json::from_slice::<Written>(json).ok();
        let read = read.filter(|read| read.schema == SCHEMA).map(|read| read.parts);
        let listed = read.unwrap_or_default().into_iter();
        Self(listed.filter_map(|(digest, hex)| Some((digest, values(&hex)?))).collect())
    }

    /// The parts of a file, if they are in the list and merge to its digest.
    pub(crate) fn of(&self, digest: Digest, bytes: u64) -> Option<Parts> {
        Parts::checked(digest, bytes, self.0.get(&digest)?.clone())
    }
}

fn values(hex: &str) -> Option<Vec<ChainingValue>> {
    let digit = |byte: u8| u8::try_from(char::from(byte).to_digit(16)?).ok();
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> =
        pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    let bytes = bytes.filter(|bytes| rest.is_empty() && !bytes.is_empty())?;
    let (values, rest) = bytes.as_chunks::<32>();
    (rest.is_empty() && values.len() as u64 <= PARTS_MAX).then(|| values.to_vec())
}

#[cfg(test)]
pub(crate) mod testing {
    /// Bytes no two pieces of which are alike.
    pub(crate) fn noise(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::noise, *};

    fn listed(bytes: &[u8]) -> (Digest, PartLists) {
        let mut hasher = PartHasher::new(bytes.len() as u64);
        // In pieces that are no parts.
        bytes.chunks(100_003).for_each(|piece| hasher.update(piece));
        let (digest, count, parts) = hasher.finish();
        assert_eq!((digest, count), (Digest::of(bytes), bytes.len() as u64));
        let mut lists = PartLists::default();
        lists.add(digest, parts);
        (digest, lists)
    }

    #[test]
    fn parts_merge_to_the_digest_of_the_whole_and_tell_what_is_wrong() {
        for len in [(1 << 20) + 1, 5 << 18, 3_000_000, 4 << 20, (4 << 20) + 1] {
            let bytes = noise(len);
            let (digest, lists) = listed(&bytes);
            let lists = PartLists::parse(&lists.to_json().unwrap());
            let parts = lists.of(digest, len as u64).unwrap();
            for index in 0..parts.count() {
                let range = parts.range(index);
                let mut part = bytes
                    [usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()]
                    .to_vec();
                assert!(parts.is(index, &part), "part {index} of {len}");
                assert!(!parts.is((index + 1) % parts.count(), &part));
                part[0] ^= 1;
                assert!(!parts.is(index, &part));
                assert!(!parts.is(index, &part[1..]));
            }
        }
    }

    #[test]
    fn a_list_that_does_not_merge_to_the_digest_is_no_list() {
        let bytes = noise(3 << 20);
        let (digest, lists) = listed(&bytes);
        let json = String::from_utf8(lists.to_json().unwrap()).unwrap();
        let hex = json.rsplit_once("\":\"").unwrap().1;
        let digit = if hex.starts_with('0') { '1' } else { '0' };
        let other = json.replace(hex, &format!("{digit}{}", &hex[1..]));
        assert!(PartLists::parse(json.as_bytes()).of(digest, 3 << 20).is_some());
        assert!(PartLists::parse(other.as_bytes()).of(digest, 3 << 20).is_none());
        assert!(PartLists::parse(json.as_bytes()).of(digest, (3 << 20) + 1).is_none());
        for broken in ["", "{}", "[1]", &json.replace(SCHEMA, "other"), &json.replace(hex, "0\"}}")]
        {
            assert!(PartLists::parse(broken.as_bytes()).of(digest, 3 << 20).is_none());
        }
    }

    #[test]
    fn small_files_have_no_parts_and_the_largest_have_no_more_than_others() {
        assert!(listed(&noise(1 << 20)).1.to_json().is_none());
        assert_eq!(Parts::part_bytes(40_000_000), Some(128 << 10));
        for bytes in [1_u64 << 30, 60_000_000_000, 1 << 40] {
            assert!(bytes.div_ceil(Parts::part_bytes(bytes).unwrap()) <= PARTS_MAX);
        }
    }
}
