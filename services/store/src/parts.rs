//! Hashes of the parts of a large file, so that a receiver can verify each part as soon as it
//! arrives.
//!
//! BLAKE3 is a hash tree: the chaining values of aligned parts merge to the digest of the whole
//! file. Therefore a list of them needs no trust and is not part of a tree's identity. The list is
//! stored beside the manifest in `B3PARTS`; files of a tree without the list are fetched whole.

use std::{collections::BTreeMap, fmt::Write as _, ops::Range};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use serde::{Deserialize, Serialize};
use wire::Digest;

pub(crate) const PARTS_FILE: &str = "B3PARTS";
/// Files up to this size have no part hashes: reading them is not worth a request.
pub(crate) const FILE_BYTES_MIN: u64 = 1 << 20;
/// Smallest size of a part in bytes. A part takes a millisecond at 1 Gb/s, which is how long a host
/// that sends it delays its other peers.
const PART_BYTES_MIN: u64 = 128 << 10;
/// Largest number of parts of one file; larger files have larger parts.
pub(crate) const PARTS_MAX: u64 = 2048;
pub(crate) const LIST_BYTES_MAX: u64 = 16 << 20;
const PARTS_SCHEMA: &str = "flotilla.parts/1";

/// The expected hashes of the parts of one file. All parts have the same size except the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartHashes {
    bytes: u64,
    /// The size of each part but the last, in bytes.
    part_bytes: u64,
    /// BLAKE3 chaining values in the order of the parts.
    values: Vec<ChainingValue>,
}

impl PartHashes {
    /// Returns the size of the parts of a file of `bytes` bytes, or `None` if such a file is too
    /// small for parts.
    pub(crate) fn part_size(bytes: u64) -> Option<u64> {
        let enough = bytes.div_ceil(PARTS_MAX).next_power_of_two();
        (bytes > FILE_BYTES_MIN).then(|| PART_BYTES_MIN.max(enough))
    }

    /// Returns `None` if the number of values is wrong, or they do not merge to the file's digest.
    fn from_listed(digest: Digest, bytes: u64, values: Vec<ChainingValue>) -> Option<Self> {
        let part_bytes = Self::part_size(bytes)?;
        let as_many = values.len() as u64 == bytes.div_ceil(part_bytes);
        (as_many && merge_root(&values) == digest).then_some(Self { bytes, part_bytes, values })
    }

    /// Merges at least two chaining values to the digest of the file and its part hashes.
    pub(crate) fn from_values(
        bytes: u64,
        part_bytes: u64,
        values: Vec<ChainingValue>,
    ) -> (Digest, Self) {
        (merge_root(&values), Self { bytes, part_bytes, values })
    }

    pub(crate) fn part_count(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn part_range(&self, index: usize) -> Range<u64> {
        let start = index as u64 * self.part_bytes;
        start..self.bytes.min(start + self.part_bytes)
    }

    pub(crate) fn matches_part(&self, index: usize, bytes: &[u8]) -> bool {
        let range = self.part_range(index);
        if range.end - range.start != bytes.len() as u64 {
            return false;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(range.start).update(bytes);
        hasher.finalize_non_root() == self.values[index]
    }
}

/// Merges chaining values to the digest of the file, as `blake3` does: the left side is the largest
/// power of two that leaves a value for the right side.
fn merge_root(values: &[ChainingValue]) -> Digest {
    let (left, right) = merge_halves(values);
    merge_subtrees_root(&left, &right, Mode::Hash).into()
}

fn merge_values(values: &[ChainingValue]) -> ChainingValue {
    if let [value] = values {
        return *value;
    }
    let (left, right) = merge_halves(values);
    merge_subtrees_non_root(&left, &right, Mode::Hash)
}

/// Merges the left and the right half of at least two values. A file with parts has more than
/// three.
fn merge_halves(values: &[ChainingValue]) -> (ChainingValue, ChainingValue) {
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    (merge_values(left), merge_values(right))
}

/// A hasher for a file of known size that also computes the hashes of its parts in the same pass.
pub(crate) struct PartHasher {
    part_bytes: Option<u64>,
    part: blake3::Hasher,
    values: Vec<ChainingValue>,
    count: u64,
}

impl PartHasher {
    pub(crate) fn new(bytes: u64) -> Self {
        let (part_bytes, part) = (PartHashes::part_size(bytes), blake3::Hasher::new());
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

    /// Returns a digest of the bytes received so far, to compare two readings of one file. It is
    /// not the BLAKE3 digest of those bytes.
    pub(crate) fn running_digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for value in &self.values {
            hasher.update(value);
        }
        if self.part.count() > 0 {
            hasher.update(&self.part.finalize_non_root());
        }
        hasher.finalize().into()
    }

    /// Returns the digest of the received bytes, their number, and the part hashes if the file has
    /// parts.
    pub(crate) fn finish(mut self) -> (Digest, u64, Option<PartHashes>) {
        let Some(part_bytes) = self.part_bytes else {
            return (self.part.finalize().into(), self.count, None);
        };
        if self.values.is_empty() {
            return (self.part.finalize().into(), self.count, None);
        }
        self.values.push(self.part.finalize_non_root());
        let (digest, parts) = PartHashes::from_values(self.count, part_bytes, self.values);
        (digest, self.count, Some(parts))
    }
}

/// The content of `B3PARTS`: part hashes of a tree's large files, by file digest.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartLists(BTreeMap<Digest, Vec<ChainingValue>>);

#[derive(Serialize, Deserialize)]
struct PartListsJson {
    schema: String,
    /// Chaining values in hex, concatenated, by file digest.
    parts: BTreeMap<Digest, String>,
}

impl PartLists {
    pub(crate) fn add_parts(&mut self, digest: Digest, parts: Option<PartHashes>) {
        if let Some(parts) = parts {
            self.0.insert(digest, parts.values);
        }
    }

    /// Returns the text of `B3PARTS`, or `None` when the list is empty or too large.
    pub(crate) fn to_json(&self) -> Option<Vec<u8>> {
        let hex = |values: &Vec<ChainingValue>| {
            let mut text = String::with_capacity(values.len() * 64);
            for byte in values.iter().flatten() {
                let _ = write!(text, "{byte:02x}");
            }
            text
        };
        let parts = self.0.iter().map(|(digest, values)| (*digest, hex(values))).collect();
        let written = PartListsJson { schema: PARTS_SCHEMA.to_owned(), parts };
        let json = serde_json::to_vec(&written).ok()?;
        (!self.0.is_empty() && json.len() as u64 <= LIST_BYTES_MAX).then_some(json)
    }

    /// Reads `B3PARTS` and skips entries that cannot be parsed. The values are verified later, in
    /// [`PartLists::parts_for`].
    pub(crate) fn parse(json: &[u8]) -> Self {
        let read = serde_json::from_slice::<PartListsJson>(json).ok();
        let read = read.filter(|read| read.schema == PARTS_SCHEMA).map(|read| read.parts);
        let listed = read.unwrap_or_default().into_iter();
        Self(listed.filter_map(|(digest, hex)| Some((digest, parse_values(&hex)?))).collect())
    }

    /// Returns the part hashes of a file, if the list contains them and they merge to the file's
    /// digest.
    pub(crate) fn parts_for(&self, digest: Digest, bytes: u64) -> Option<PartHashes> {
        PartHashes::from_listed(digest, bytes, self.0.get(&digest)?.clone())
    }
}

fn parse_values(hex: &str) -> Option<Vec<ChainingValue>> {
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
    /// Returns bytes in which no two pieces are equal.
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
        // The pieces differ from the parts.
        bytes.chunks(100_003).for_each(|piece| hasher.update(piece));
        let (digest, count, parts) = hasher.finish();
        assert_eq!((digest, count), (Digest::hash_bytes(bytes), bytes.len() as u64));
        let mut lists = PartLists::default();
        lists.add_parts(digest, parts);
        (digest, lists)
    }

    #[test]
    fn parts_merge_to_the_digest_of_the_whole_and_tell_what_is_wrong() {
        for len in [(1 << 20) + 1, 5 << 18, 3_000_000, 4 << 20, (4 << 20) + 1] {
            let bytes = noise(len);
            let (digest, lists) = listed(&bytes);
            let lists = PartLists::parse(&lists.to_json().unwrap());
            let parts = lists.parts_for(digest, len as u64).unwrap();
            for index in 0..parts.part_count() {
                let range = parts.part_range(index);
                let mut part = bytes
                    [usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()]
                    .to_vec();
                assert!(parts.matches_part(index, &part), "part {index} of {len}");
                assert!(!parts.matches_part((index + 1) % parts.part_count(), &part));
                part[0] ^= 1;
                assert!(!parts.matches_part(index, &part));
                assert!(!parts.matches_part(index, &part[1..]));
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
        assert!(PartLists::parse(json.as_bytes()).parts_for(digest, 3 << 20).is_some());
        assert!(PartLists::parse(other.as_bytes()).parts_for(digest, 3 << 20).is_none());
        assert!(PartLists::parse(json.as_bytes()).parts_for(digest, (3 << 20) + 1).is_none());
        for broken in
            ["", "{}", "[1]", &json.replace(PARTS_SCHEMA, "other"), &json.replace(hex, "0\"}}")]
        {
            assert!(PartLists::parse(broken.as_bytes()).parts_for(digest, 3 << 20).is_none());
        }
    }

    #[test]
    fn small_files_have_no_parts_and_the_largest_have_no_more_than_others() {
        assert!(listed(&noise(1 << 20)).1.to_json().is_none());
        assert_eq!(PartHashes::part_size(40_000_000), Some(128 << 10));
        for bytes in [1_u64 << 30, 60_000_000_000, 1 << 40] {
            assert!(bytes.div_ceil(PartHashes::part_size(bytes).unwrap()) <= PARTS_MAX);
        }
    }
}
