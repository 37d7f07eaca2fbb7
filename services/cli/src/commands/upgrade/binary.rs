//! The installed program and the new one: their versions, and the exchange of files.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail};
use tokio::process::Command;

const VERSION_LIMIT: Duration = Duration::from_secs(20);

/// A printed version also shows that the program runs on this box.
pub(super) async fn read_version(binary: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(binary);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let ended = tokio::time::timeout(VERSION_LIMIT, command.output()).await;
    let output = ended
        .with_context(|| {
            format!("{} printed no version within {VERSION_LIMIT:?}", binary.display())
        })?
        .with_context(|| format!("{} does not run here", binary.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim().split_once(' ') {
        Some(("flotilla", version)) if output.status.success() => Ok(version.to_owned()),
        _ => bail!(
            "{} is not a flotilla binary: its version is {:?} (A109)",
            binary.display(),
            said.trim()
        ),
    }
}

pub(super) fn is_same_content(one: &Path, other: &Path) -> anyhow::Result<bool> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    Ok(fs::metadata(one)?.len() == fs::metadata(other)?.len() && read(one)? == read(other)?)
}

fn with_suffix(installed: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(installed);
    name.push(ending);
    name.into()
}

pub(super) fn previous_path(installed: &Path) -> PathBuf {
    with_suffix(installed, ".previous")
}

/// Puts `new` in place of `installed`, which is kept as `.previous`. A complete program exists
/// under the installed name at all times.
pub(super) fn swap_program(new: &Path, installed: &Path) -> anyhow::Result<()> {
    let (partial, kept) = (with_suffix(installed, ".new"), with_suffix(installed, ".kept"));
    let exchange = || -> io::Result<()> {
        // Copied instead of renamed, because it may be on another file system.
        fs::copy(new, &partial)?;
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o755))?;
        File::open(&partial)?.sync_all()?;
        remove_if_present(&kept)?;
        fs::hard_link(installed, &kept)?;
        fs::rename(&kept, previous_path(installed))?;
        fs::rename(&partial, installed)?;
        sync_directory(installed)
    };
    exchange()
        .inspect_err(|_| drop(fs::remove_file(&partial)))
        .with_context(|| format!("put {} in place of {}", new.display(), installed.display()))
}

pub(super) fn restore_previous(installed: &Path) -> anyhow::Result<()> {
    let kept = previous_path(installed);
    fs::rename(&kept, installed)
        .and_then(|()| sync_directory(installed))
        .with_context(|| format!("put {} back as {}", kept.display(), installed.display()))
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a rename durable.
fn sync_directory(of: &Path) -> io::Result<()> {
    File::open(of.parent().unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_binary_is_kept_and_can_be_put_back() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let read = |name: &str| fs::read_to_string(at(name)).unwrap();
        fs::write(at("flotilla"), "old").unwrap();
        fs::write(at("download"), "new").unwrap();
        swap_program(&at("download"), &at("flotilla")).unwrap();
        assert_eq!((read("flotilla"), read("flotilla.previous")), ("new".into(), "old".into()));
        assert_eq!(at("flotilla").metadata().unwrap().permissions().mode() & 0o777, 0o755);
        restore_previous(&at("flotilla")).unwrap();
        assert_eq!(read("flotilla"), "old");
        let mut left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|one| one.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["download", "flotilla"]);
    }

    #[test]
    fn what_cannot_be_copied_leaves_everything_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let installed = directory.path().join("flotilla");
        fs::write(&installed, "old").unwrap();
        let error = swap_program(&directory.path().join("missing"), &installed).unwrap_err();
        assert!(format!("{error:#}").contains("missing"), "{error:#}");
        assert_eq!(fs::read_to_string(&installed).unwrap(), "old");
        assert!(!previous_path(&installed).exists());
    }

    #[tokio::test]
    async fn a_binary_says_its_version_or_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let good = script("good", "echo flotilla 0.2.0+gabc");
        assert_eq!(read_version(&good).await.unwrap(), "0.2.0+gabc");
        for (name, text) in [("other", "echo git 2.47"), ("broken", "echo flotilla 1; exit 1")] {
            let error = read_version(&script(name, text)).await.unwrap_err().to_string();
            assert!(error.contains("is not a flotilla binary"), "{error}");
        }
        assert!(read_version(directory.path()).await.is_err());
    }
}
