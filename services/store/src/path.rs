//! Names inside the store. Input from outside (manifests, facts, directories) is parsed into a
//! [`RelativePath`] once. The path can then neither leave its root nor contain characters that are
//! dangerous in a shell.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use wire::{Digest, RunId, v1};

const MAX_PATH_BYTES: usize = 768;
const MAX_SEGMENT_BYTES: usize = 200;
/// The number of the manifest's 64 hex digits in a directory name: enough to tell the contents of
/// one place apart.
pub(crate) const MANIFEST_SUFFIX_HEX: usize = 12;

/// A relative path such as `a/b/c`, without `..`, `.`, empty segments, backslashes and control
/// characters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelativePath(String);

/// The reason why a path may not be used in the store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("path {path:?} may not be used in the store: {reason} (S109)")]
pub struct PathError {
    /// The rejected path, shortened to 100 characters.
    pub path: String,
    pub reason: &'static str,
}

impl RelativePath {
    /// Checks a path. Fails when it could leave its root, or cannot be written on every file system
    /// and store.
    pub fn new(path: impl Into<String>) -> Result<Self, PathError> {
        let path = path.into();
        match find_path_fault(&path) {
            Some(reason) => Err(PathError { path: shorten_path(path), reason }),
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

fn find_path_fault(path: &str) -> Option<&'static str> {
    if path.is_empty() {
        return Some("it is empty");
    }
    if path.len() > MAX_PATH_BYTES {
        return Some("it is longer than 768 bytes");
    }
    if path.starts_with('/') {
        return Some("it is absolute");
    }
    path.split('/').find_map(find_segment_fault)
}

fn find_segment_fault(segment: &str) -> Option<&'static str> {
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
    // `object_store` names its own unfinished local files like `name#3`.
    let ends_like_staging = segment
        .rsplit_once('#')
        .is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    ends_like_staging.then_some("a part of it ends in '#' and digits")
}

/// Shortens a path to 100 characters, so that the message about a hostile path stays readable.
fn shorten_path(path: String) -> String {
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

/// The place of a tree: `parent/name-<12 hex of its manifest>`. Because of the suffix, two writers
/// can publish different bytes for one place side by side, and neither overwrites a committed tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreePlace {
    parent: RelativePath,
    name: RelativePath,
}

impl TreePlace {
    /// Builds a place from a parent directory and a name.
    pub fn new(parent: &str, name: &str) -> Result<Self, PathError> {
        let (parent, name) = (RelativePath::new(parent)?, RelativePath::new(name)?);
        if name.as_str().contains('/') {
            return Err(PathError { path: name.0, reason: "it must be one part, without '/'" });
        }
        parent.join(&name)?;
        Ok(Self { parent, name })
    }

    /// Returns the place of a checkpoint: `runs/<run>/checkpoints/c<cycle>-s<step>-…`.
    pub fn for_checkpoint(run: &RunId, cycle: u32, step: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/checkpoints")),
            name: RelativePath(format!("c{cycle}-s{step}")),
        }
    }

    /// Parses the path of a checkpoint's tree into run, cycle and step. `None` for other trees.
    pub fn parse_checkpoint_path(path: &str) -> Option<(RunId, u32, u32)> {
        let (run, name) = path.strip_prefix("runs/")?.split_once("/checkpoints/c")?;
        let (cycle, step) = name.split_once("-s")?;
        let (step, _suffix) = step.split_once('-')?;
        Some((RunId::new(run).ok()?, cycle.parse().ok()?, step.parse().ok()?))
    }

    /// Returns the place of the optimizer state of a checkpoint:
    /// `runs/<run>/resume/c<cycle>-s<step>-…`.
    pub fn for_resume_state(run: &RunId, cycle: u32, step: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/resume")),
            name: RelativePath(format!("c{cycle}-s{step}")),
        }
    }

    /// Returns the place of the weights of a slice, in a training on several boxes:
    /// `runs/<run>/deltas/c<cycle>-o<outer step>-<slice>-…`.
    pub fn for_delta(run: &RunId, cycle: u32, outer: u32, slice: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/deltas")),
            name: RelativePath(format!("c{cycle}-o{outer}-{slice}")),
        }
    }

    /// Returns the place of merged weights, or of the `momentum` of the merge:
    /// `runs/<run>/merges/c<cycle>-o<outer step>-…`.
    pub fn for_merge(run: &RunId, cycle: u32, outer: u32, is_momentum: bool) -> Self {
        let suffix = if is_momentum { "-momentum" } else { "" };
        Self {
            parent: RelativePath(format!("runs/{run}/merges")),
            name: RelativePath(format!("c{cycle}-o{outer}{suffix}")),
        }
    }

    /// Returns the place of the archive of a cycle: `runs/<run>/cycles/c<cycle>-…`.
    pub fn for_archive(run: &RunId, cycle: u32) -> Self {
        Self {
            parent: RelativePath(format!("runs/{run}/cycles")),
            name: RelativePath(format!("c{cycle}")),
        }
    }

    /// Returns the place of a model: `models/<name>-…`.
    pub fn for_model(name: &str) -> Result<Self, PathError> {
        Self::new("models", name)
    }

    /// Returns true if the tree is at this place.
    pub fn contains_tree(&self, tree: &v1::Tree) -> bool {
        let manifest = tree.manifest.parse::<Digest>();
        manifest.is_ok_and(|manifest| self.tree_path(manifest).as_str() == tree.path)
    }

    pub(crate) fn parent_path(&self) -> &RelativePath {
        &self.parent
    }

    pub(crate) fn tree_path(&self, manifest: Digest) -> RelativePath {
        let hex = manifest.to_hex();
        RelativePath(format!("{}/{}-{}", self.parent, self.name, &hex[..MANIFEST_SUFFIX_HEX]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_checkpoint_names_its_run_cycle_and_step() {
        let run = RunId::new("raft-1").unwrap();
        let path =
            TreePlace::for_checkpoint(&run, 2, 48).tree_path(Digest::hash_bytes(b"a manifest"));
        assert_eq!(TreePlace::parse_checkpoint_path(path.as_str()), Some((run, 2, 48)));
        for other in ["models/tiny-0123456789ab", "runs/raft-1/resume/c2-s48-0123456789ab", ""] {
            assert_eq!(TreePlace::parse_checkpoint_path(other), None, "{other}");
        }
    }

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
        let digest = Digest::hash_bytes(b"manifest");
        let path = TreePlace::for_checkpoint(&run, 3, 200).tree_path(digest);
        let expected = format!("runs/raft-1/checkpoints/c3-s200-{}", &digest.to_hex()[..12]);
        assert_eq!(path.as_str(), expected);
        assert!(TreePlace::for_model("a/b").is_err());
    }
}
