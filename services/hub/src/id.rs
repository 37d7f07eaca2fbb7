//! How a model of the hub is named, and what the hub's cache says of where a file came from.

use std::{fmt, path::Path, str::FromStr};

/// The hub allows 96 bytes a part.
const PART_BYTES_MAX: usize = 96;

/// `org/name`, or `org/name@revision`: a branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelId {
    pub repo: String,
    pub revision: Option<String>,
}

/// A model as it was at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revision {
    pub repo: String,
    pub commit: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no model of the hub; write org/name or org/name@revision (H106)")]
pub struct IdError(String);

impl FromStr for ModelId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let wrong = || IdError(text.chars().take(200).collect());
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let parts: Vec<&str> = repo.split('/').collect();
        // A revision may have slashes (refs/pr/1) but must stay below the cache's `refs`.
        let legal_revision = |text: &str| text.split('/').all(is_part);
        if parts.len() != 2 || !parts.iter().all(|part| is_part(part)) {
            return Err(wrong());
        }
        if !revision.is_none_or(legal_revision) {
            return Err(wrong());
        }
        Ok(Self { repo: repo.to_owned(), revision: revision.map(str::to_owned) })
    }
}

fn is_part(text: &str) -> bool {
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

impl Revision {
    /// What a snapshot's place in the hub's cache says:
    /// `models--<org>--<name>/snapshots/<commit>`.
    pub fn of_snapshot(dir: &Path) -> Option<Self> {
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
    fn a_snapshot_tells_its_model_and_commit() {
        let of = |path: &str| Revision::of_snapshot(Path::new(path));
        let found = of("/c/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc").unwrap();
        assert_eq!((found.repo.as_str(), found.commit.as_str()), ("Qwen/Qwen2.5-0.5B", "0123abc"));
        for other in ["/models/qwen", "/c/datasets--a--b/snapshots/1", "/c/models--a/snapshots/1"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
