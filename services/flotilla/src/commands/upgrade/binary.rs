//! The installed binary and the one to come: what each says it is, and the exchange.

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

/// What a program may take to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(20);

/// The version a binary says it is; that it runs here at all is known then too.
pub(super) async fn version(binary: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(binary);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let ended = tokio::time::timeout(VERSION_LIMIT, command.output()).await;
    let output = ended
        .with_context(|| format!("{} says nothing within {VERSION_LIMIT:?}", binary.display()))?
        .with_context(|| format!("{} does not run here", binary.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim().split_once(' ') {
        Some(("flotilla", version)) if output.status.success() => Ok(version.to_owned()),
        _ => bail!("{} is no flotilla: it says {:?} (A109)", binary.display(), said.trim()),
    }
}

pub(super) fn same(one: &Path, other: &Path) -> anyhow::Result<bool> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    Ok(fs::metadata(one)?.len() == fs::metadata(other)?.len() && read(one)? == read(other)?)
}

fn beside(installed: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(installed);
    name.push(ending);
    name.into()
}

pub(super) fn previous(installed: &Path) -> PathBuf {
    beside(installed, ".previous")
}

/// Puts `new` in place of `installed`, which is kept as `.previous`. At every moment there is a
/// whole program under the installed name.
pub(super) fn swap(new: &Path, installed: &Path) -> anyhow::Result<()> {
    let (partial, kept) = (beside(installed, ".new"), beside(installed, ".kept"));
    let exchange = || -> io::Result<()> {
        // Copied, for it may lie on another disk.
        fs::copy(new, &partial)?;
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o755))?;
        File::open(&partial)?.sync_all()?;
        remove(&kept)?;
        fs::hard_link(installed, &kept)?;
        fs::rename(&kept, previous(installed))?;
        fs::rename(&partial, installed)?;
        sync_directory(installed)
    };
    exchange()
        .inspect_err(|_| drop(fs::remove_file(&partial)))
        .with_context(|| format!("put {} in place of {}", new.display(), installed.display()))
}

/// Undoes `swap`.
pub(super) fn put_back(installed: &Path) -> anyhow::Result<()> {
    let kept = previous(installed);
    fs::rename(&kept, installed)
        .and_then(|()| sync_directory(installed))
        .with_context(|| format!("put {} back as {}", kept.display(), installed.display()))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

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
        swap(&at("download"), &at("flotilla")).unwrap();
        assert_eq!((read("flotilla"), read("flotilla.previous")), ("new".into(), "old".into()));
        assert_eq!(at("flotilla").metadata().unwrap().permissions().mode() & 0o777, 0o755);
        put_back(&at("flotilla")).unwrap();
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
        let error = swap(&directory.path().join("missing"), &installed).unwrap_err();
        assert!(format!("{error:#}").contains("missing"), "{error:#}");
        assert_eq!(fs::read_to_string(&installed).unwrap(), "old");
        assert!(!previous(&installed).exists());
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
        assert_eq!(version(&good).await.unwrap(), "0.2.0+gabc");
        for (name, text) in [("other", "echo git 2.47"), ("broken", "echo flotilla 1; exit 1")] {
            let error = version(&script(name, text)).await.unwrap_err().to_string();
            assert!(error.contains("is no flotilla"), "{error}");
        }
        assert!(version(directory.path()).await.is_err());
    }
}
