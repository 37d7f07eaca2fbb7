//! Finds the base model of an adapter on this box.

use std::path::{Path, PathBuf};

use anyhow::Context;
use formats::{HubCache, find_model};

/// Finds a directory, or a repository in the Hugging Face cache. A relative path is resolved from
/// the current directory and from the parent of the watched directory, as the trainer's working
/// directory is unknown.
pub(crate) fn find_base(name: &str, watched: &Path) -> anyhow::Result<PathBuf> {
    let beside = watched.parent().map(|parent| parent.join(name)).filter(|path| path.is_dir());
    let cache = HubCache::from_environment(|name| std::env::var_os(name));
    let found = match beside {
        Some(beside) if !Path::new(name).is_dir() => find_model(&beside.to_string_lossy(), &cache),
        _ => find_model(name, &cache),
    };
    let found = found.with_context(|| {
        format!(
            "the adapters' base {name:?} is not on this box; pass its directory with \
                 --watch-base"
        )
    })?;
    found.canonicalize().with_context(|| format!("use {}", found.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_a_directory_or_says_what_to_do() {
        let box_ = tempfile::tempdir().unwrap();
        let (watched, base) = (box_.path().join("out"), box_.path().join("model"));
        std::fs::create_dir_all(&base).unwrap();
        std::fs::write(base.join("config.json"), "{}").unwrap();
        let whole = base.canonicalize().unwrap();
        assert_eq!(find_base(base.to_str().unwrap(), &watched).unwrap(), whole);
        assert_eq!(find_base("./model", &watched).unwrap(), whole);
        for name in ["/nowhere", "org/none", "../../x/y", "org/../x"] {
            let error = find_base(name, &watched).unwrap_err().to_string();
            assert!(error.contains("--watch-base") && error.contains(name), "{error}");
        }
    }
}
