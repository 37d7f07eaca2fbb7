//! `manifest.json`: the files of a tree with their digests, and the tree's metadata. The same files
//! and the same metadata give the same bytes, and therefore the same digest, on any machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wire::Digest;

use crate::{parts::PARTS_FILE, path::RelativePath, removal::REMOVAL_FILE};

/// The file name of a tree's manifest.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The file with the digests of a tree's files, in the format of `b3sum`.
pub(crate) const SUMS_FILE: &str = "B3SUMS";
pub(crate) const MAX_FILES: usize = 10_000;
pub(crate) const MAX_MANIFEST_BYTES: u64 = 16 << 20;
const SCHEMA: &str = "flotilla.tree/1";

/// Lineage and kind of a tree: the key `about` of its manifest. It is part of the tree's identity.
/// Times, hosts, agents and run names do not belong here, because two equal runs would get
/// different digests.
pub type TreeMetadata = BTreeMap<String, Value>;

/// The files of a tree with their sizes and digests, and the tree's metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeManifest {
    pub files: Vec<TreeFile>,
    pub about: TreeMetadata,
}

/// One file of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFile {
    pub path: RelativePath,
    pub bytes: u64,
    /// The BLAKE3 digest of the content.
    pub digest: Digest,
}

/// The reason why a manifest cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("it is not a manifest (S106)")]
    Syntax(#[source] serde_json::Error),
    #[error("its schema is {0:?}, this version reads {SCHEMA:?}: update flotilla (E111)")]
    Schema(String),
    #[error("it lists {0} files, the limit is {MAX_FILES} (S107)")]
    TooManyFiles(usize),
    #[error("it is larger than {MAX_MANIFEST_BYTES} bytes (S107)")]
    TooLarge,
    /// A file has a name that the store reserves for itself.
    #[error("it lists {0}, a name the store keeps for itself (S106)")]
    Reserved(RelativePath),
    /// A path is listed twice, or is both a file and a directory.
    #[error("it lists {0} more than once, or both as a file and as a directory (S106)")]
    Clash(RelativePath),
}

#[derive(Serialize)]
struct ManifestJson<'a> {
    schema: &'static str,
    files: &'a [TreeFile],
    about: &'a TreeMetadata,
}

#[derive(Deserialize)]
struct ParsedManifest {
    schema: String,
    files: Vec<TreeFile>,
    #[serde(default)]
    about: TreeMetadata,
}

impl TreeManifest {
    /// Sorts the files and the metadata's keys, and checks the files.
    pub(crate) fn new(
        mut files: Vec<TreeFile>,
        about: TreeMetadata,
    ) -> Result<Self, ManifestError> {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        check_files(&files)?;
        let about = about.into_iter().map(|(key, value)| (key, sort_keys(value))).collect();
        Ok(Self { files, about })
    }

    /// Parses a `manifest.json`. Fails also when it lists a file that could not be published.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let read: ParsedManifest = serde_json::from_slice(bytes).map_err(ManifestError::Syntax)?;
        if read.schema != SCHEMA {
            return Err(ManifestError::Schema(read.schema));
        }
        Self::new(read.files, read.about)
    }

    /// Returns the bytes of `manifest.json`. Fails when they are larger than a store accepts.
    pub fn to_json(&self) -> Result<Vec<u8>, ManifestError> {
        let written = ManifestJson { schema: SCHEMA, files: &self.files, about: &self.about };
        let mut json = serde_json::to_vec_pretty(&written).map_err(ManifestError::Syntax)?;
        json.push(b'\n');
        if json.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge);
        }
        Ok(json)
    }

    /// Returns the text of `B3SUMS`, which `b3sum -c` reads.
    pub(crate) fn to_sums(&self) -> String {
        let mut sums = String::new();
        for file in &self.files {
            let _ = writeln!(sums, "{}  {}", file.digest.to_hex(), file.path);
        }
        sums
    }

    /// Returns the digest of the files alone (of `B3SUMS`), independent of the metadata.
    pub fn content_digest(&self) -> Digest {
        Digest::hash_bytes(self.to_sums().as_bytes())
    }

    /// Returns the total size of all files in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    pub fn find_file(&self, path: &str) -> Option<&TreeFile> {
        self.files.iter().find(|file| file.path.as_str() == path)
    }
}

fn check_files(files: &[TreeFile]) -> Result<(), ManifestError> {
    if files.len() > MAX_FILES {
        return Err(ManifestError::TooManyFiles(files.len()));
    }
    let mut taken = BTreeSet::new();
    for file in files {
        let path = file.path.as_str();
        if [MANIFEST, SUMS_FILE, PARTS_FILE, REMOVAL_FILE].contains(&path) {
            return Err(ManifestError::Reserved(file.path.clone()));
        }
        if !taken.insert(path) {
            return Err(ManifestError::Clash(file.path.clone()));
        }
    }
    let below_a_file =
        |path: &str| path.match_indices('/').any(|(at, _)| taken.contains(&path[..at]));
    match files.iter().find(|file| below_a_file(file.path.as_str())) {
        Some(file) => Err(ManifestError::Clash(file.path.clone())),
        None => Ok(()),
    }
}

/// Sorts the keys of all objects in a JSON value, because the maps of `serde_json` keep insertion
/// order when any crate of the build enables that feature.
fn sort_keys(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let by_key: BTreeMap<_, _> = map.into_iter().map(|(k, v)| (k, sort_keys(v))).collect();
            Value::Object(by_key.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sort_keys).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(path: &str) -> TreeFile {
        let path = RelativePath::new(path).unwrap();
        TreeFile { bytes: 1, digest: Digest::hash_bytes(path.as_str().as_bytes()), path }
    }

    #[test]
    fn the_same_content_gives_the_same_bytes_in_any_order() {
        let about = |text: &str| serde_json::from_str::<TreeMetadata>(text).unwrap();
        let one = TreeManifest::new(
            vec![file("b"), file("a/c")],
            about(r#"{"base":{"x":1,"a":[{"q":1,"b":2}]},"alpha":2}"#),
        );
        let two = TreeManifest::new(
            vec![file("a/c"), file("b")],
            about(r#"{"alpha":2,"base":{"a":[{"b":2,"q":1}],"x":1}}"#),
        );
        let json = one.unwrap().to_json().unwrap();
        assert_eq!(json, two.unwrap().to_json().unwrap());
        assert_eq!(TreeManifest::parse(&json).unwrap().to_json().unwrap(), json);
    }

    #[test]
    fn a_manifest_that_could_write_elsewhere_is_refused() {
        let digest = Digest::hash_bytes(b"").to_string();
        for path in
            ["../x", "/x", "a\\b", "", "a/../../x", "a\u{0}b", "manifest.json", "B3SUMS", "B3PARTS"]
        {
            let file = json!({"path": path, "bytes": 0, "digest": digest});
            let text = json!({"schema": SCHEMA, "files": [file]}).to_string();
            assert!(TreeManifest::parse(text.as_bytes()).is_err(), "{path:?} was accepted");
        }
    }

    #[test]
    fn a_name_is_either_one_file_or_one_directory() {
        assert!(TreeManifest::new(vec![file("a"), file("a")], TreeMetadata::new()).is_err());
        assert!(
            TreeManifest::new(vec![file("a"), file("a-b"), file("a/b")], TreeMetadata::new())
                .is_err()
        );
        assert!(TreeManifest::new(vec![file("a-b"), file("a/b")], TreeMetadata::new()).is_ok());
    }
}
