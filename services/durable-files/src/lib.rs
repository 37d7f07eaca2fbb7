//! Files and directories that survive a power loss once a function has returned. The name of a new
//! file or directory is on disk only after its directory was synced too. Blocking.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::Path,
};

/// Creates a directory and its missing parents with this mode. An existing directory is left as it
/// is.
pub fn create_directory(path: &Path, mode: u32) -> io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|one| !one.exists()).collect();
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    missing.into_iter().try_for_each(sync_parent)
}

/// Writes a file with this mode, or replaces it atomically. Does not follow a link in its place.
pub fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, bytes, mode, |_| Ok(()))
}

/// Writes a file, or replaces it atomically, as [`replace_file`] does, with exactly this mode,
/// whatever the mask of the process is. `owner` is the user and the group to give it to; `None`
/// leaves it to the process. Changes nothing by its path, which others may redirect.
pub fn replace_owned_file(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    owner: Option<(u32, u32)>,
) -> io::Result<()> {
    replace_with(path, bytes, 0o600, |file| {
        let found = file.metadata()?;
        if let Some((user, group)) = owner
            && (user, group) != (found.uid(), found.gid())
        {
            fchown(file, Some(user), Some(group))?;
        }
        // After the owner, whose change takes bits from the mode.
        file.set_permissions(fs::Permissions::from_mode(mode))
    })
}

/// `finish` is called with the written file before it takes its place.
fn replace_with(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    finish: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    // A leftover may be readable by others, or a link.
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial)?;
    file.write_all(bytes)?;
    finish(&file)?;
    file.sync_all()?;
    fs::rename(&partial, path)?;
    sync_parent(path)
}

/// Syncs the directory that contains this path, after a file was created, renamed or removed there.
/// Does nothing on a file system that cannot sync directories.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match File::open(parent.unwrap_or(Path::new(".")))?.sync_all() {
        Err(error) if is_unsupported(&error) => Ok(()),
        synced => synced,
    }
}

/// EINVAL and ENOTSUP, see fsync(2).
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use power_loss_fs::{EntryDurability, PowerLossDisk, UnsyncedChanges};

    use super::*;

    #[test]
    fn directories_and_files_survive_a_power_loss() {
        if !requirements::require_fuse() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let disk = PowerLossDisk::mount(directory.path(), EntryDurability::OwnDirectory).unwrap();
        let path = disk.path().join("a/b/file");
        for text in ["old", "new"] {
            create_directory(path.parent().unwrap(), 0o700).unwrap();
            replace_file(&path, text.as_bytes(), 0o600).unwrap();
            disk.cut_power(UnsyncedChanges::Lost);
            disk.restore_power();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&disk.path().join("a")), mode(&path)), (0o700, 0o600));
    }

    #[test]
    fn a_link_in_place_of_a_file_is_replaced_and_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("shadow"), "root's").unwrap();
        for name in ["file", "file.partial"] {
            std::os::unix::fs::symlink(at("shadow"), at(name)).unwrap();
        }
        replace_file(&at("file"), b"ours", 0o644).unwrap();
        assert_eq!(fs::read_to_string(at("shadow")).unwrap(), "root's");
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "ours");
        assert!(at("file").symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn a_file_gets_its_mode_and_owner_before_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("theirs"), "theirs").unwrap();
        let own = fs::metadata(at("theirs")).unwrap();
        // No mask leaves these bits.
        let result = replace_owned_file(&at("file"), b"ours", 0o666, Some((own.uid(), own.gid())));
        result.unwrap();
        let found = fs::metadata(at("file")).unwrap();
        assert_eq!(found.permissions().mode() & 0o7777, 0o666);
        assert_eq!((found.uid(), found.gid()), (own.uid(), own.gid()));
        if own.uid() != 0 {
            // An owner that cannot be given leaves the file as it was.
            let result = replace_owned_file(&at("theirs"), b"ours", 0o666, Some((0, 0)));
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(fs::read_to_string(at("theirs")).unwrap(), "theirs");
        }
    }
}
