//! The names of models on the hub, and the origin of a file by its path in the hub's cache.

use std::{fmt, path::Path, str::FromStr};

/// The hub's limit of each part of a name.
const PART_BYTES_MAX: usize = 96;

/// A model's name: `org/name`, or `org/name@revision` with a branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelId {
    /// `org/name`
    pub repo: String,
    /// `None` for the default branch.
    pub revision: Option<String>,
}

/// A model at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRevision {
    /// `org/name`
    pub repo: String,
    pub commit: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a hub model; write org/name or org/name@revision (H106)")]
pub struct ModelIdError(String);

impl FromStr for ModelId {
    type Err = ModelIdError;

    fn from_str(text: &str) -> Result<Self, ModelIdError> {
        let wrong = || ModelIdError(text.chars().take(200).collect());
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let parts: Vec<&str> = repo.split('/').collect();
        // A revision may contain slashes (refs/pr/1), but must stay below the directory `refs` of
        // the cache.
        let legal_revision = |text: &str| text.split('/').all(is_valid_part);
        if parts.len() != 2 || !parts.iter().all(|part| is_valid_part(part)) {
            return Err(wrong());
        }
        if !revision.is_none_or(legal_revision) {
            return Err(wrong());
        }
        Ok(Self { repo: repo.to_owned(), revision: revision.map(str::to_owned) })
    }
}

/// Allows letters, digits, `-`, `_` and `.`, without `..`.
fn is_valid_part(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let bytes = text.as_bytes();
    bytes.len() <= PART_BYTES_MAX
        && bytes.iter().all(|b| legal(*b))
        && edge(bytes.first())
        && !text.contains("..")
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.revision {
            Some(revision) => write!(f, "{}@{revision}", self.repo),
            None => f.write_str(&self.repo),
        }
    }
}

impl ModelRevision {
    /// Reads `models--<org>--<name>/snapshots/<commit>`, the path of a snapshot in the hub's cache.
    pub fn from_snapshot_path(dir: &Path) -> Option<Self> {
        let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
        let commit = name(dir)?;
        let snapshots = dir.parent()?;
        if name(snapshots)? != "snapshots" {
            return None;
        }
        let repo = name(snapshots.parent()?)?.strip_prefix("models--")?.replacen("--", "/", 1);
        let id: ModelId = format!("{repo}@{commit}").parse().ok()?;
        Some(Self { repo: id.repo, commit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_by_organisation_and_name() {
        let id: ModelId = "Qwen/Qwen2.5-0.5B@refs/pr/1".parse().unwrap();
        assert_eq!(
            (id.repo.as_str(), id.revision.as_deref()),
            ("Qwen/Qwen2.5-0.5B", Some("refs/pr/1"))
        );
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in
            ["", "gpt2", "a/b/c", "../b", "a/..", "./a", "a/b@", "a/b@../x", "/a/b", "a/b ", "a/-"]
        {
            assert!(wrong.parse::<ModelId>().is_err(), "{wrong:?} was accepted");
        }
    }

    #[test]
    fn the_path_of_a_snapshot_contains_its_model_and_commit() {
        let of = |path: &str| ModelRevision::from_snapshot_path(Path::new(path));
        let found = of("/c/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc").unwrap();
        assert_eq!((found.repo.as_str(), found.commit.as_str()), ("Qwen/Qwen2.5-0.5B", "0123abc"));
        for other in ["/models/qwen", "/c/datasets--a--b/snapshots/1", "/c/models--a/snapshots/1"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
