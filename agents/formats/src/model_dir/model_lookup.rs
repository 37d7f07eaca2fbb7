//! Finds the directory of a model from what a user types: a directory, a directory of the Hugging
//! Face cache, or the name of a model that a Hugging Face client has downloaded. It downloads
//! nothing itself.

use super::{ModelDirError, join_names, list_names, read_bounded};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// The directory into which the Hugging Face clients download, unless the environment names none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubCache(Option<PathBuf>);

impl HubCache {
    /// Resolves the directory in the order of the Hugging Face clients: `HF_HUB_CACHE`,
    /// `HUGGINGFACE_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HOME`. `value` looks up a variable;
    /// empty ones are ignored.
    pub fn from_environment(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let value = |name| value(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || Some(value("HOME")?.join(".cache"));
        let hub = || {
            let shared = || Some(value("XDG_CACHE_HOME").or_else(home)?.join("huggingface"));
            Some(value("HF_HOME").or_else(shared)?.join("hub"))
        };
        Self(value("HF_HUB_CACHE").or_else(|| value("HUGGINGFACE_HUB_CACHE")).or_else(hub))
    }

    /// Creates a cache at a directory.
    pub fn at_directory(directory: impl Into<PathBuf>) -> Self {
        Self(Some(directory.into()))
    }
}

/// Finds the directory of a model, which has a `config.json`. `name` is one of:
///
/// - a directory, which takes precedence over a model of the same name
/// - a directory of the Hugging Face cache (`models--org--name`)
/// - a model in that cache, `org/name[@revision]`; the revision is `main` by default
pub fn find_model(name: &str, cache: &HubCache) -> Result<PathBuf, ModelDirError> {
    let path = Path::new(name);
    if path.is_dir() {
        return resolve_directory(path);
    }
    if path.exists() {
        return Err(ModelDirError::NotADirectory { path: path.into() });
    }
    let (repository, revision) = match name.split_once('@') {
        Some((repository, revision)) => (repository, revision),
        None => (name, DEFAULT_REVISION),
    };
    if !is_repository(repository) || !is_revision(revision) {
        return Err(ModelDirError::Name { name: name.into() });
    }
    let folder = format!("models--{}", repository.replace('/', "--"));
    let downloaded = cache.0.as_ref().map(|hub| hub.join(folder)).filter(|path| path.is_dir());
    match downloaded {
        Some(downloaded) => require_config(find_snapshot(&downloaded, revision)?),
        None => {
            let cache = cache.0.as_ref().map_or("any cache (HOME is not set)".into(), |hub| {
                format!("the Hugging Face cache {}", hub.display())
            });
            Err(ModelDirError::NotDownloaded { name: name.into(), cache })
        }
    }
}

/// For a name without a revision.
const DEFAULT_REVISION: &str = "main";
/// A file in `refs` holds a commit of 40 digits.
const REF_BYTES_MAX: u64 = 256;

/// Accepts a model directory, or a directory of the cache for its default snapshot.
fn resolve_directory(path: &Path) -> Result<PathBuf, ModelDirError> {
    if path.join("snapshots").is_dir() && !path.join("config.json").exists() {
        return require_config(find_snapshot(path, DEFAULT_REVISION)?);
    }
    require_config(path.into())
}

fn require_config(path: PathBuf) -> Result<PathBuf, ModelDirError> {
    if path.join("config.json").exists() { Ok(path) } else { Err(ModelDirError::NoConfig { path }) }
}

/// Returns true for `org/name` or `name` with the hub's characters.
fn is_repository(name: &str) -> bool {
    let part = |part: &str| {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(legal) && !part.starts_with('.')
    };
    name.split('/').count() <= 2 && name.split('/').all(part)
}

/// Returns true for a commit, or a branch or tag, which may contain slashes. A path that leads out
/// of the directory is refused.
fn is_revision(revision: &str) -> bool {
    let mut parts = Path::new(revision).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Finds a revision in the cache's layout: `refs/<name>` holds a commit, `snapshots/<commit>` its
/// files. Without a reference for `main`, the only snapshot is taken. The error lists the
/// snapshots.
fn find_snapshot(model: &Path, revision: &str) -> Result<PathBuf, ModelDirError> {
    let snapshots = model.join("snapshots");
    let reference = model.join("refs").join(revision);
    let commit = if reference.is_file() {
        read_bounded(&reference, REF_BYTES_MAX)?.trim().to_owned()
    } else {
        revision.to_owned()
    };
    let known = list_names(&snapshots);
    match known.as_slice() {
        names if names.contains(&commit) => Ok(snapshots.join(commit)),
        [only] if revision == DEFAULT_REVISION && !reference.exists() => Ok(snapshots.join(only)),
        names => Err(ModelDirError::Revision {
            path: model.into(),
            revision: revision.into(),
            known: join_names(names).unwrap_or_else(|| "none".into()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn environment(values: &[(&str, &str)]) -> HubCache {
        let of = |name: &str| values.iter().find(|(other, _)| *other == name);
        HubCache::from_environment(|name| of(name).map(|(_, value)| value.into()))
    }

    #[test]
    fn the_cache_is_where_the_client_libraries_have_it() {
        let at = |path: &str| HubCache::at_directory(path);
        assert_eq!(environment(&[]), HubCache(None));
        assert_eq!(environment(&[("HOME", "/h")]), at("/h/.cache/huggingface/hub"));
        let shared = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(environment(&shared), at("/x/huggingface/hub"));
        let home = [("HOME", "/h"), ("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(environment(&home), at("/f/hub"));
        assert_eq!(environment(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]), at("/c"));
        assert_eq!(environment(&[("HF_HUB_CACHE", ""), ("HF_HOME", "/f")]), at("/f/hub"));
    }

    /// A cache with one model in two revisions, one of them with names.
    #[cfg(unix)]
    fn cache() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("models--Qwen--Qwen2.5-0.5B");
        fs::create_dir_all(model.join("blobs")).unwrap();
        fs::create_dir_all(model.join("refs/pr")).unwrap();
        fs::write(model.join("blobs/1"), "{}").unwrap();
        for commit in ["aaaa", "bbbb"] {
            fs::create_dir_all(model.join("snapshots").join(commit)).unwrap();
            let link = model.join("snapshots").join(commit).join("config.json");
            std::os::unix::fs::symlink("../../blobs/1", link).unwrap();
        }
        fs::write(model.join("refs/main"), "bbbb").unwrap();
        fs::write(model.join("refs/pr/1"), "aaaa\n").unwrap();
        (root, model)
    }

    #[cfg(unix)]
    #[test]
    fn a_model_is_found_by_its_name_and_by_the_cache_s_directory() {
        let (root, model) = cache();
        let hub = HubCache::at_directory(root.path());
        let found = |name: &str| find_model(name, &hub).unwrap();
        let commit = |name| model.join("snapshots").join(name);
        assert_eq!(found("Qwen/Qwen2.5-0.5B"), commit("bbbb"));
        assert_eq!(found("Qwen/Qwen2.5-0.5B@main"), commit("bbbb"));
        assert_eq!(found("Qwen/Qwen2.5-0.5B@pr/1"), commit("aaaa"));
        assert_eq!(found("Qwen/Qwen2.5-0.5B@aaaa"), commit("aaaa"));
        assert_eq!(found(model.to_str().unwrap()), commit("bbbb"));
        assert_eq!(found(commit("aaaa").to_str().unwrap()), commit("aaaa"));
        fs::remove_file(model.join("refs/main")).unwrap();
        let error = find_model("Qwen/Qwen2.5-0.5B", &hub).unwrap_err().to_string();
        assert!(error.contains("no revision `main`; downloaded: aaaa, bbbb"), "{error}");
        fs::remove_dir_all(commit("bbbb")).unwrap();
        assert_eq!(found("Qwen/Qwen2.5-0.5B"), commit("aaaa"));
        fs::remove_file(model.join("blobs/1")).unwrap();
        let error = find_model("Qwen/Qwen2.5-0.5B", &hub).unwrap_err().to_string();
        assert!(error.contains("config.json"), "a link to nothing: {error}");
    }

    #[test]
    fn what_is_not_there_is_told_with_where_it_was_looked_for() {
        let root = tempfile::tempdir().unwrap();
        let hub = HubCache::at_directory(root.path());
        let refused = |name: &str, hub: &HubCache| find_model(name, hub).unwrap_err().to_string();
        let message = refused("org/name", &hub);
        assert!(message.contains("hf download org/name"), "{message}");
        assert!(message.contains(root.path().to_str().unwrap()), "{message}");
        assert!(refused("org/name", &HubCache(None)).contains("HOME"));
        for name in ["", "a/b/c", "/nowhere", "../up", "org/name@../../x", "org/name@", "a b"] {
            assert!(refused(name, &hub).contains("is neither a directory"), "{name}");
        }
        let directory = root.path().to_str().unwrap();
        assert!(refused(directory, &hub).contains("not a model directory"));
        let file = root.path().join("model.gguf");
        fs::write(&file, "").unwrap();
        assert!(refused(file.to_str().unwrap(), &hub).contains("is a file"));
    }
}
