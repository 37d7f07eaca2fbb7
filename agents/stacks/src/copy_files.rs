//! Copies a directory of programs with their libraries.

use std::{fs, io, path::Path};

use anyhow::{Context, bail};

/// Maximum number of entries, more than any build of llama.cpp has.
const ENTRIES_MAX: usize = 10_000;
const DEPTH_MAX: usize = 8;

/// Copies files, directories and relative links below a directory. The target must not exist.
pub(crate) fn copy_directory(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut entries = 0;
    copy_below(from, to, DEPTH_MAX, &mut entries)
}

fn copy_below(from: &Path, to: &Path, depth: usize, entries: &mut usize) -> anyhow::Result<()> {
    if depth == 0 {
        bail!("{}: more than {DEPTH_MAX} directories deep (A119)", from.display());
    }
    let named = || format!("copy {} to {}", from.display(), to.display());
    fs::create_dir(to).with_context(named)?;
    for entry in fs::read_dir(from).with_context(named)? {
        *entries += 1;
        if *entries > ENTRIES_MAX {
            bail!("{}: more than {ENTRIES_MAX} files (A119)", from.display());
        }
        let entry = entry.with_context(named)?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().with_context(named)?;
        if kind.is_dir() {
            copy_below(&source, &target, depth - 1, entries)?;
        } else if kind.is_symlink() {
            copy_link(&source, &target).with_context(named)?;
        } else if kind.is_file() {
            fs::copy(&source, &target).with_context(named)?;
        }
    }
    Ok(())
}

/// Copies a link. One that leads out of the directory becomes a copy of the file that it names.
fn copy_link(source: &Path, target: &Path) -> io::Result<()> {
    let named = fs::read_link(source)?;
    if named.components().count() == 1 && named.is_relative() {
        std::os::unix::fs::symlink(named, target)
    } else {
        fs::copy(source, target).map(drop)
    }
}
