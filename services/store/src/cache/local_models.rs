//! Files of base models that exist on this machine: in directories that the user names, and in the
//! cache of Hugging Face's tools. They are found by name and size and verified by digest. Blocking.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{digest_cache::DigestCache, manifest::TreeFile};

const ENTRIES_MAX: usize = 200_000;
const DEPTH_MAX: usize = 8;
/// The largest number of files of one name and size that are hashed; fine-tunes have the same names
/// and sizes.
const CANDIDATES_MAX: usize = 16;

pub(crate) struct LocalModels {
    roots: Vec<PathBuf>,
    digests: DigestCache,
}

type CandidatePaths = BTreeMap<(String, u64), Vec<PathBuf>>;

struct ModelSearch<'a> {
    wanted: &'a BTreeSet<String>,
    candidates: CandidatePaths,
    /// Visited directories by device and inode, because links may form loops.
    visited: BTreeSet<(u64, u64)>,
    entries: usize,
}

impl LocalModels {
    pub(crate) fn new(roots: Vec<PathBuf>, digests: DigestCache) -> Self {
        Self { roots, digests }
    }

    pub(crate) fn root_directories(&self) -> &[PathBuf] {
        &self.roots
    }

    pub(crate) fn matches_file(&self, path: &Path, wanted: &TreeFile) -> bool {
        // A file that cannot be read counts as missing.
        fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == wanted.bytes)
            && self
                .digests
                .digest_file(path, &|_| ())
                .is_ok_and(|(digest, _)| digest == wanted.digest)
    }

    /// Returns paths by name in the tree, without the files that were not found.
    pub(crate) fn find_files(&self, files: &[TreeFile]) -> BTreeMap<String, PathBuf> {
        let mut found = BTreeMap::new();
        let names: BTreeSet<String> = files.iter().map(|file| file_name(file).to_owned()).collect();
        let candidates = self.search_roots(&names);
        // Files of one model are in the same directory, and its small files identify it cheaply. So
        // small files are compared first, and for later files directories with earlier matches come
        // first.
        let mut by_size: Vec<&TreeFile> = files.iter().collect();
        by_size.sort_by_key(|file| file.bytes);
        let mut dirs: BTreeMap<PathBuf, usize> = BTreeMap::new();
        for file in by_size {
            let same = candidates.get(&(file_name(file).to_owned(), file.bytes));
            let mut same = same.cloned().unwrap_or_default();
            let held = |path: &Path| path.parent().and_then(|dir| dirs.get(dir)).copied();
            same.sort_by_key(|path| std::cmp::Reverse(held(path).unwrap_or(0)));
            let Some(path) = same.into_iter().find(|path| self.matches_file(path, file)) else {
                continue;
            };
            if let Some(dir) = path.parent() {
                *dirs.entry(dir.to_owned()).or_default() += 1;
            }
            found.insert(file.path.to_string(), path);
        }
        found
    }

    fn search_roots(&self, wanted: &BTreeSet<String>) -> CandidatePaths {
        let mut search = ModelSearch {
            wanted,
            candidates: CandidatePaths::new(),
            visited: BTreeSet::new(),
            entries: 0,
        };
        for root in &self.roots {
            // A directory that disappeared counts as empty; a warning was shown at the start.
            if let Err(error) = search.walk_directory(root, 0) {
                tracing::debug!(path = %root.display(), %error, "looking for a base's files");
            }
        }
        if search.entries >= ENTRIES_MAX {
            tracing::warn!(
                "the models' directories hold more than {ENTRIES_MAX} entries, the rest was not \
                 looked at; name fewer or smaller ones with --models"
            );
        }
        search.candidates
    }
}

impl ModelSearch<'_> {
    fn walk_directory(&mut self, dir: &Path, depth: usize) -> io::Result<()> {
        let meta = fs::metadata(dir)?;
        if !meta.is_dir() || depth > DEPTH_MAX || !self.visited.insert((meta.dev(), meta.ino())) {
            return Ok(());
        }
        for entry in fs::read_dir(dir)? {
            self.entries += 1;
            if self.entries >= ENTRIES_MAX {
                return Ok(());
            }
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
            // Links are followed: snapshots in the hub's cache are links, and users move models to
            // larger disks.
            let meta = if kind.is_dir() { None } else { fs::metadata(&path).ok() };
            if kind.is_dir() || meta.as_ref().is_some_and(fs::Metadata::is_dir) {
                // An unreadable directory counts as empty.
                let _ = self.walk_directory(&path, depth + 1);
            } else if let Some(meta) = meta.filter(|_| self.wanted.contains(name)) {
                let same = self.candidates.entry((name.to_owned(), meta.len())).or_default();
                if same.len() < CANDIDATES_MAX {
                    same.push(path);
                }
            }
        }
        Ok(())
    }
}

fn file_name(file: &TreeFile) -> &str {
    let path = file.path.as_str();
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use wire::Digest;

    use super::*;
    use crate::path::RelativePath;

    fn wanted(path: &str, bytes: &[u8]) -> TreeFile {
        TreeFile {
            path: RelativePath::new(path).unwrap(),
            bytes: bytes.len() as u64,
            digest: Digest::hash_bytes(bytes),
        }
    }

    #[test]
    fn files_are_found_through_links_and_loops_and_by_their_content() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        // A fine-tune of the same names and sizes.
        fs::write(at("a/config.json"), "{1}").unwrap();
        fs::write(at("a/model.safetensors"), "other").unwrap();
        fs::write(at("hub/models--o--n/blobs/c0"), "{2}").unwrap();
        fs::write(at("hub/models--o--n/blobs/w0"), "right").unwrap();
        for (name, blob) in [("config.json", "c0"), ("model.safetensors", "w0")] {
            let link = at(&format!("hub/models--o--n/snapshots/1/{name}"));
            symlink(format!("../../blobs/{blob}"), link).unwrap();
        }
        symlink(root.path(), at("hub/loop")).unwrap();
        symlink("nowhere", at("hub/dangling")).unwrap();
        let digests = DigestCache::at_path(at("digests.jsonl"));
        let roots = vec![root.path().to_owned(), root.path().join("absent")];
        let files = [
            wanted("config.json", b"{2}"),
            wanted("model.safetensors", b"right"),
            wanted("tokenizer.json", b"x"),
        ];
        let found = LocalModels::new(roots, digests).find_files(&files);
        let snapshot = at("hub/models--o--n/snapshots/1");
        let expected =
            ["config.json", "model.safetensors"].map(|name| (name.to_owned(), snapshot.join(name)));
        assert_eq!(found, BTreeMap::from(expected));
    }
}
