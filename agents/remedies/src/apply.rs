//! Makes and undoes changes below a root directory.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use doctor::{Fix, FixChange};
use rustix::fs::OFlags;

use crate::journal::{FixJournal, FixRecord, FixStep};

const NEW_FILE_MODE: u32 = 0o644;

/// Maximum size of an edited file; larger files are not configuration files.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Mode, owner and group of a file.
type FileAttributes = (u32, u32, u32);

/// A host to change.
pub struct HostRoot<'a> {
    /// The directory in place of `/`.
    pub root: &'a Path,
    /// The directory of the journal.
    pub state: &'a Path,
    /// Runs a program with its arguments.
    pub run: &'a mut dyn FnMut(&[String]) -> anyhow::Result<()>,
}

/// Applies fixes one after another. Each change is recorded before it is made, so that
/// [`undo_fixes`] also undoes an interrupted fix.
///
/// # Errors
/// When a change cannot be made; earlier ones stay, and are in the journal.
pub fn apply_fixes(host: &mut HostRoot<'_>, fixes: &[Fix]) -> anyhow::Result<()> {
    let mut journal = FixJournal::read(host.state)?;
    for fix in fixes.iter().filter(|fix| fix.is_mechanical()) {
        journal.records.push(FixRecord {
            ids: fix.ids.iter().map(|id| (*id).to_owned()).collect(),
            summary: fix.summary.clone(),
            steps: Vec::new(),
        });
        for change in &fix.changes {
            let applied = apply_change(host, &mut journal, change);
            applied.with_context(|| {
                format!("{}; `flotilla doctor --undo` takes back what was done", fix.summary)
            })?;
        }
    }
    Ok(())
}

fn apply_change(
    host: &mut HostRoot<'_>,
    journal: &mut FixJournal,
    change: &FixChange,
) -> anyhow::Result<()> {
    let step = match change {
        FixChange::Write { path, content } => {
            let found = read_file(&host.place(path))?;
            let (before, attributes) = found.unzip();
            FixStep::File { path: path.clone(), before, attributes, after: content.clone() }
        }
        FixChange::Run { undo, .. } => FixStep::Command { undo: undo.clone(), is_done: false },
        FixChange::Manual(_) => return Ok(()),
    };
    if let Some(record) = journal.records.last_mut() {
        record.steps.push(step.clone());
    }
    journal.write(host.state)?;
    match (change, &step) {
        (FixChange::Run { command, .. }, _) => {
            (host.run)(command)?;
            if let Some(record) = journal.records.last_mut() {
                record.set_done(record.steps.len() - 1, true);
            }
            journal.write(host.state)
        }
        (_, FixStep::File { path, attributes, after, .. }) => {
            write_file(&host.place(path), after, *attributes)
        }
        _ => Ok(()),
    }
}

/// Undoes all applied fixes, the last one first: restores its files, byte for byte, then undoes its
/// commands. Returns the summaries of the undone fixes. The undo of a command that may not have
/// succeeded is allowed to fail, because there may be nothing to undo.
///
/// # Errors
/// When a file was changed after the fix or cannot be written, or a command fails. Undone fixes
/// leave the journal; the others stay in it.
pub fn undo_fixes(host: &mut HostRoot<'_>) -> anyhow::Result<Vec<String>> {
    let mut journal = FixJournal::read(host.state)?;
    let mut undone = Vec::new();
    while let Some(summary) = journal.records.last().map(|record| record.summary.clone()) {
        undo_last_record(host, &mut journal).with_context(|| format!("undo: {summary}"))?;
        undone.push(summary);
        journal.records.pop();
        journal.write(host.state)?;
    }
    Ok(undone)
}

fn undo_last_record(host: &mut HostRoot<'_>, journal: &mut FixJournal) -> anyhow::Result<()> {
    let steps = journal.records.last().map(|record| record.steps.clone()).unwrap_or_default();
    for step in steps.iter().rev() {
        if let FixStep::File { path, before, attributes, after } = step {
            let place = host.place(path);
            restore_file(&place, before.as_deref(), *attributes, after)?;
        }
    }
    for (at, step) in steps.iter().enumerate() {
        let FixStep::Command { undo, is_done } = step else { continue };
        if undo.is_empty() {
            continue;
        }
        if let Err(error) = (host.run)(undo)
            && *is_done
        {
            return Err(error);
        }
        // An interrupted undo is repeated from its start.
        if let Some(record) = journal.records.last_mut() {
            record.set_done(at, false);
        }
        journal.write(host.state)?;
    }
    Ok(())
}

impl HostRoot<'_> {
    fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// Returns the text and the attributes of a file; `None` if it does not exist.
fn read_file(path: &Path) -> anyhow::Result<Option<(String, FileAttributes)>> {
    let named = || format!("read {}", path.display());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        data if !data.as_ref().is_ok_and(fs::Metadata::is_file) => {
            data.with_context(named)?;
            bail!("{} is a link or no file; change what it names by hand (A118)", path.display());
        }
        _ => {}
    }
    // A user may put a link or a pipe there meanwhile.
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).with_context(named)?;
    let data = file.metadata().with_context(named)?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).with_context(named)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        bail!("{} has more than {FILE_BYTES_MAX} bytes; change it by hand (A118)", path.display());
    }
    Ok(Some((text, (data.permissions().mode() & 0o7777, data.uid(), data.gid()))))
}

fn write_file(path: &Path, text: &str, attributes: Option<FileAttributes>) -> anyhow::Result<()> {
    let named = || format!("write {}", path.display());
    if let Some(directory) = path.parent() {
        durable_files::create_directory(directory, 0o755).with_context(named)?;
    }
    let mode = attributes.map_or(NEW_FILE_MODE, |(mode, ..)| mode);
    let owner = attributes.map(|(_, user, group)| (user, group));
    durable_files::replace_owned_file(path, text.as_bytes(), mode, owner).with_context(named)
}

/// Restores the text, mode and owner of a file. Fails if its text is neither that before the fix
/// nor that after it, because then it was edited since.
fn restore_file(
    path: &Path,
    before: Option<&str>,
    attributes: Option<FileAttributes>,
    after: &str,
) -> anyhow::Result<()> {
    let (now, attributes_now) = read_file(path)?.unzip();
    let is_repaired = now.as_deref() == before;
    if is_repaired && attributes_now == attributes {
        return Ok(());
    }
    if !is_repaired && now.as_deref() != Some(after) {
        bail!("{} was changed since; restore it by hand (A118)", path.display());
    }
    match before {
        Some(text) => write_file(path, text, attributes),
        None => fs::remove_file(path)
            .and_then(|()| durable_files::sync_parent(path))
            .with_context(|| format!("remove {}", path.display())),
    }
}
