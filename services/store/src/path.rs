//! Names inside the store. What comes from outside (manifests, facts, directories)
//! becomes a `RelativePath` once, and can then neither leave its root nor surprise a shell.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use wire::{Digest, RunId};

const MAX_PATH_BYTES: usize = 768;
const MAX_SEGMENT_BYTES: usize = 200;
/// Of the manifest's 64 hex digits: enough that two contents of one place do not meet.
const SUFFIX_HEX: usize = 12;

/// `a/b/c`: no `..`, no `.`, no empty part, no backslash, no control character, not absolute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelativePath(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("path {path:?} may not be used in the store: {reason} (S109)")]
pub struct PathError {
    pub path: String,
    pub reason: &'static str,
}

impl RelativePath {
    /// # Errors
    /// When the path could leave its root or cannot be written everywhere.
    pub fn new(path: impl Into<String>) -> Result<Self, PathError> {
        let path = path.into();
        match path_fault(&path) {
            Some(reason) => Err(PathError { path: shortened(path), reason }),
            None => Ok(Self(path)),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn join(&self, below: &Self) -> Result<Self, PathError> {
        Self::new(format!("{self}/{below}"))
    }
}

fn path_fault(path: &str) -> Option<&'static str> {
    if path.is_empty() {
        return Some("it is empty");
    }
    if path.len() > MAX_PATH_BYTES {
        return Some("it is longer than 768 bytes");
    }
    if path.starts_with('/') {
        return Some("it is absolute");
    }
    path.split('/').find_map(segment_fault)
}

fn segment_fault(segment: &str) -> Option<&'static str> {
    match segment {
        "" => return Some("a part of it is empty"),
        "." | ".." => return Some("a part of it is '.' or '..'"),
        _ => {}
    }
    if segment.len() > MAX_SEGMENT_BYTES {
        return Some("a part of it is longer than 200 bytes");
    }
    if segment.contains('\\') {
        return Some("it holds a backslash");
    }
    if segment.chars().any(char::is_control) {
        return Some("it holds a control character");
    }
    // `name#3` is how object_store calls its own unfinished local files.
    let ends_like_staging = segment
        .rsplit_once('#')
        .is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    ends_like_staging.then_some("a part of it ends in '#' and digits")
}

/// Keeps an error message readable when the path is hostile.
fn shortened(path: String) -> String {
    if path.chars().count() <= 100 { path } else { path.chars().take(100).chain(['…']).collect() }
}

impl fmt::Display for RelativePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RelativePath {
    type Err = PathError;
    fn from_str(path: &str) -> Result<Self, PathError> {
        Self::new(path)
    }
}

impl TryFrom<String> for RelativePath {
    type Error = PathError;
    fn try_from(path: String) -> Result<Self, PathError> {
        Self::new(path)
    }
}

impl From<RelativePath> for String {
    fn from(path: RelativePath) -> String {
        path.0
    }
}

/// Where a tree goes: `parent/name-<12 hex of its manifest>`. The suffix lets two writers
/// publish different bytes for one place side by side, so neither overwrites a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreePlace {
    parent: RelativePath,
    name: RelativePath,
}

impl TreePlace {
    /// # Errors
    /// When parent or name may not be used in the store, or the name has more than one part.
    pub fn new(parent: &str, name: &str) -> Result<Self, PathError> {
        let (parent, name) = (RelativePath::new(parent)?, RelativePath::new(name)?);
        if name.as_str().contains('/') {
            return Err(PathError { path: name.0, reason: "it must be one part, without '/'" });
        }
        parent.join(&name)?;
        Ok(Self { parent, name })
    }

    /// `runs/<run>/checkpoints/c<cycle>-s<step>-…`
    pub fn checkpoint(run: &RunId, cycle: u32, step: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/checkpoints")),
            name: RelativePath(format!("c{cycle}-s{step}")),
        }
    }

    /// `runs/<run>/resume/c<cycle>-s<step>-…`: what the optimizer remembers at a checkpoint.
    pub fn resume(run: &RunId, cycle: u32, step: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/resume")),
            name: RelativePath(format!("c{cycle}-s{step}")),
        }
    }

    /// `models/<name>-…`
    ///
    /// # Errors
    /// When the name may not be used in the store, or has more than one part.
    pub fn model(name: &str) -> Result<Self, PathError> {
        Self::new("models", name)
    }

    pub(crate) fn parent(&self) -> &RelativePath {
        &self.parent
    }

    pub(crate) fn path(&self, manifest: Digest) -> RelativePath {
        let hex = manifest.to_hex();
        RelativePath(format!("{}/{}-{}", self.parent, self.name, &hex[..SUFFIX_HEX]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_could_leave_its_root_is_refused() {
        let long = "x/".repeat(400) + "x";
        let wide = "x".repeat(201);
        for bad in [
            "",
            "/etc/passwd",
            "..",
            "a/../b",
            "./a",
            "a//b",
            "a/",
            "a\\b",
            "a\0b",
            "a\nb",
            "a#12",
            &long,
            &wide,
        ] {
            assert!(RelativePath::new(bad).is_err(), "{bad:?} was accepted");
        }
        for good in ["a", "model-00001-of-00002.safetensors", "1_Pooling/config.json", "é", "a#b"]
        {
            assert!(RelativePath::new(good).is_ok(), "{good:?} was refused");
        }
    }

    #[test]
    fn the_place_of_a_checkpoint_names_its_content() {
        let run = RunId::new("raft-1").unwrap();
        let digest = Digest::of(b"manifest");
        let path = TreePlace::checkpoint(&run, 3, 200).path(digest);
        let expected = format!("runs/raft-1/checkpoints/c3-s200-{}", &digest.to_hex()[..12]);
        assert_eq!(path.as_str(), expected);
        assert!(TreePlace::model("a/b").is_err());
    }
}
