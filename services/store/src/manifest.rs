//! `manifest.json`: the files of a tree with their digests, and what they are. The same
//! files and the same `about` give the same bytes, hence the same digest, on any machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wire::Digest;

use crate::{parts::PARTS, path::RelativePath};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const SUMS: &str = "B3SUMS";
pub(crate) const MAX_FILES: usize = 10_000;
pub(crate) const MAX_MANIFEST_BYTES: u64 = 16 << 20;
const SCHEMA: &str = "flotilla.tree/1";

/// Lineage and kind of a tree. It is part of the tree's identity: times, hosts, agents and
/// run names do not belong here, or two equal runs get different digests.
pub type About = BTreeMap<String, Value>;

#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// In order of their paths.
    pub files: Vec<TreeFile>,
    pub about: About,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFile {
    pub path: RelativePath,
    pub bytes: u64,
    pub digest: Digest,
}

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
    #[error("it lists {0}, a name the store keeps for itself (S106)")]
    Reserved(RelativePath),
    #[error("it lists {0} more than once, or both as a file and as a directory (S106)")]
    Clash(RelativePath),
}

#[derive(Serialize)]
struct Written<'a> {
    schema: &'static str,
    files: &'a [TreeFile],
    about: &'a About,
}

#[derive(Deserialize)]
struct Read {
    schema: String,
    files: Vec<TreeFile>,
    #[serde(default)]
    about: About,
}

impl Manifest {
    pub(crate) fn new(mut files: Vec<TreeFile>, about: About) -> Result<Self, ManifestError> {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        check_files(&files)?;
        let about = about.into_iter().map(|(key, value)| (key, sorted(value))).collect();
        Ok(Self { files, about })
    }

    /// Reads a `manifest.json`.
    ///
    /// # Errors
    /// When it is none, or lists a file that could not be published.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let read: Read = serde_json::from_slice(bytes).map_err(ManifestError::Syntax)?;
        if read.schema != SCHEMA {
            return Err(ManifestError::Schema(read.schema));
        }
        Self::new(read.files, read.about)
    }

    /// The bytes of `manifest.json`.
    ///
    /// # Errors
    /// When it is larger than a store accepts.
    pub fn to_json(&self) -> Result<Vec<u8>, ManifestError> {
        let written = Written { schema: SCHEMA, files: &self.files, about: &self.about };
        let mut json = serde_json::to_vec_pretty(&written).map_err(ManifestError::Syntax)?;
        json.push(b'\n');
        if json.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge);
        }
        Ok(json)
    }

    /// The text `b3sum -c` reads.
    pub(crate) fn to_sums(&self) -> String {
        let mut sums = String::new();
        for file in &self.files {
            // Writing to a string does not fail.
            let _ = writeln!(sums, "{}  {}", file.digest.to_hex(), file.path);
        }
        sums
    }

    /// The digest of the files alone (of `B3SUMS`), whatever `about` says.
    pub fn content_digest(&self) -> Digest {
        Digest::of(self.to_sums().as_bytes())
    }

    /// Of all files together.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    pub fn file(&self, path: &str) -> Option<&TreeFile> {
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
        if [MANIFEST, SUMS, PARTS].contains(&path) {
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

/// `serde_json`'s maps keep insertion order when any crate of the build asks for it.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let by_key: BTreeMap<_, _> = map.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            Value::Object(by_key.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(path: &str) -> TreeFile {
        let path = RelativePath::new(path).unwrap();
        TreeFile { bytes: 1, digest: Digest::of(path.as_str().as_bytes()), path }
    }

    #[test]
    fn the_same_content_gives_the_same_bytes_in_any_order() {
        let about = |text: &str| serde_json::from_str::<About>(text).unwrap();
        let one = Manifest::new(
            vec![file("b"), file("a/c")],
            about(r#"{"base":{"x":1,"a":[{"q":1,"b":2}]},"alpha":2}"#),
        );
        let two = Manifest::new(
            vec![file("a/c"), file("b")],
            about(r#"{"alpha":2,"base":{"a":[{"b":2,"q":1}],"x":1}}"#),
        );
        let json = one.unwrap().to_json().unwrap();
        assert_eq!(json, two.unwrap().to_json().unwrap());
        assert_eq!(Manifest::parse(&json).unwrap().to_json().unwrap(), json);
    }

    #[test]
    fn a_manifest_that_could_write_elsewhere_is_refused() {
        let digest = Digest::of(b"").to_string();
        for path in
            ["../x", "/x", "a\\b", "", "a/../../x", "a\u{0}b", "manifest.json", "B3SUMS", "B3PARTS"]
        {
            let file = json!({"path": path, "bytes": 0, "digest": digest});
            let text = json!({"schema": SCHEMA, "files": [file]}).to_string();
            assert!(Manifest::parse(text.as_bytes()).is_err(), "{path:?} was accepted");
        }
    }

    #[test]
    fn a_name_is_either_one_file_or_one_directory() {
        assert!(Manifest::new(vec![file("a"), file("a")], About::new()).is_err());
        assert!(Manifest::new(vec![file("a"), file("a-b"), file("a/b")], About::new()).is_err());
        assert!(Manifest::new(vec![file("a-b"), file("a/b")], About::new()).is_ok());
    }
}
