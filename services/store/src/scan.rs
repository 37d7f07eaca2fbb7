//! What is in a directory that is to be published: names, sizes, digests. Blocking.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use wire::Digest;

use crate::{
    error::PutError,
    files,
    manifest::{MANIFEST, MAX_FILES, Manifest, ManifestError, SUMS, TreeFile},
    parts::PARTS,
    path::RelativePath,
};

/// All regular files below `dir`, hashed. Links to files are followed (as in the Hugging Face
/// cache); links to directories are refused, for they may be loops.
pub(crate) fn scan(dir: &Path) -> Result<Vec<TreeFile>, PutError> {
    let mut files = Vec::new();
    walk(dir, None, &mut files)?;
    if files.is_empty() {
        return Err(PutError::Empty { path: dir.to_owned() });
    }
    files
        .into_iter()
        .map(|(path, disk)| {
            let hashed = hash_file(&disk).map_err(|source| PutError::Read { path: disk, source });
            let (digest, bytes) = hashed?;
            Ok(TreeFile { path, bytes, digest })
        })
        .collect()
}

type Found = Vec<(RelativePath, PathBuf)>;

fn walk(dir: &Path, below: Option<&RelativePath>, found: &mut Found) -> Result<(), PutError> {
    let unread = |source| PutError::Read { path: dir.to_owned(), source };
    for entry in fs::read_dir(dir).map_err(unread)? {
        let disk = entry.map_err(unread)?.path();
        let path =
            name_of(&disk, below).map_err(|(path, source)| PutError::Path { path, source })?;
        if below.is_none() && is_ours(&disk, path.as_str())? {
            continue;
        }
        let unread = |source| PutError::Read { path: disk.clone(), source };
        let target = fs::metadata(&disk).map_err(unread)?;
        if target.is_file() {
            found.push((path, disk));
        } else if fs::symlink_metadata(&disk).map_err(unread)?.is_dir() {
            walk(&disk, Some(&path), found)?;
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

fn name_of(
    disk: &Path,
    below: Option<&RelativePath>,
) -> Result<RelativePath, (PathBuf, crate::path::PathError)> {
    // A name that is not UTF-8 keeps U+FFFD here and then fails to open: it is never renamed.
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let joined = match below {
        Some(below) => RelativePath::new(format!("{below}/{name}")),
        None => RelativePath::new(name),
    };
    joined.map_err(|source| (disk.to_owned(), source))
}

/// A fetched tree may be published again: its manifest and sums are written anew. A stranger's
/// `manifest.json` is not silently dropped.
fn is_ours(disk: &Path, name: &str) -> Result<bool, PutError> {
    if name == SUMS || name == PARTS {
        return Ok(true);
    }
    if name != MANIFEST {
        return Ok(false);
    }
    let bytes =
        fs::read(disk).map_err(|source| PutError::Read { path: disk.to_owned(), source })?;
    match Manifest::parse(&bytes) {
        Ok(_) => Ok(true),
        Err(source) => Err(PutError::Manifest { path: disk.to_owned(), source }),
    }
}

pub(crate) fn hash_file(path: &Path) -> io::Result<(Digest, u64)> {
    let (digest, bytes, _) = files::hash(&File::open(path)?, &|_| ())?;
    Ok((digest, bytes))
}
