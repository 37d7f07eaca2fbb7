//! The files of a directory that is to be published. Blocking.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use wire::Digest;

use crate::{
    error::PutError,
    file_hashing,
    manifest::{MANIFEST, MAX_FILES, ManifestError, SUMS_FILE, TreeFile, TreeManifest},
    parts::PARTS_FILE,
    path::RelativePath,
};

/// Finds and hashes all files below `dir`. Follows links to files (as in the Hugging Face cache),
/// and refuses links to directories, which may form loops.
pub(crate) fn scan_directory(dir: &Path) -> Result<Vec<TreeFile>, PutError> {
    let mut files = Vec::new();
    collect_files(dir, None, &mut files)?;
    if files.is_empty() {
        return Err(PutError::Empty { path: dir.to_owned() });
    }
    files
        .into_iter()
        .map(|(path, disk)| {
            let hashed = hash_path(&disk).map_err(|source| PutError::Read { path: disk, source });
            let (digest, bytes) = hashed?;
            Ok(TreeFile { path, bytes, digest })
        })
        .collect()
}

/// Paths in the tree and on disk.
type FoundFiles = Vec<(RelativePath, PathBuf)>;

/// Skips the files that the store writes itself.
fn collect_files(
    dir: &Path,
    below: Option<&RelativePath>,
    found: &mut FoundFiles,
) -> Result<(), PutError> {
    let unread = |source| PutError::Read { path: dir.to_owned(), source };
    for entry in fs::read_dir(dir).map_err(unread)? {
        let disk = entry.map_err(unread)?.path();
        let path =
            path_in_tree(&disk, below).map_err(|(path, source)| PutError::Path { path, source })?;
        if below.is_none() && is_store_file(&disk, path.as_str())? {
            continue;
        }
        let unread = |source| PutError::Read { path: disk.clone(), source };
        let target = fs::metadata(&disk).map_err(unread)?;
        if target.is_file() {
            found.push((path, disk));
        } else if fs::symlink_metadata(&disk).map_err(unread)?.is_dir() {
            collect_files(&disk, Some(&path), found)?;
        } else {
            return Err(PutError::Kind { path: disk });
        }
        if found.len() > MAX_FILES {
            let source = ManifestError::TooManyFiles(found.len());
            return Err(PutError::Manifest { path: dir.to_owned(), source });
        }
    }
    Ok(())
}

fn path_in_tree(
    disk: &Path,
    below: Option<&RelativePath>,
) -> Result<RelativePath, (PathBuf, crate::path::PathError)> {
    // A name that is not UTF-8 contains U+FFFD here, so opening the file fails later. It is never
    // renamed.
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let joined = match below {
        Some(below) => RelativePath::new(format!("{below}/{name}")),
        None => RelativePath::new(name),
    };
    joined.map_err(|source| (disk.to_owned(), source))
}

/// Reports whether the store itself wrote a file, as in a fetched tree that is published again. A
/// `manifest.json` of another program is an error and is not silently dropped.
fn is_store_file(disk: &Path, name: &str) -> Result<bool, PutError> {
    if name == SUMS_FILE || name == PARTS_FILE {
        return Ok(true);
    }
    if name != MANIFEST {
        return Ok(false);
    }
    let bytes =
        fs::read(disk).map_err(|source| PutError::Read { path: disk.to_owned(), source })?;
    match TreeManifest::parse(&bytes) {
        Ok(_) => Ok(true),
        Err(source) => Err(PutError::Manifest { path: disk.to_owned(), source }),
    }
}

pub(crate) fn hash_path(path: &Path) -> io::Result<(Digest, u64)> {
    let (digest, bytes, _) = file_hashing::hash_open_file(&File::open(path)?, &|_| ())?;
    Ok((digest, bytes))
}
