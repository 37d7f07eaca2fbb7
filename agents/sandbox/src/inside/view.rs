//! The cell's view of the host: the system directories and the paths of the settings, read-only and
//! at their own paths; a few devices; nothing else. Everything is a mount in the cell's mount
//! namespace.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, symlink},
    path::{Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    fs::CWD,
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
        mount_change, move_mount, open_tree, unmount,
    },
    process::pivot_root,
};

use crate::{PathVisibility, syscalls::restrict_mounts};

use super::identity::ID;

/// The place of the view before it becomes the root; it exists on every host.
const NEW_ROOT: &str = "/tmp";

const SYSTEM_PATHS: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/gnu/store",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
];

const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

const LINKS: &[(&str, &str)] = &[
    ("tmp", "/room/tmp"),
    ("var/tmp", "/room/tmp"),
    ("dev/shm", "/room/shm"),
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
];

const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
const DEVICE: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// The root contains only mount points and links.
const ROOT_OPTIONS: &CStr = c"mode=755,size=4m,nr_inodes=4k";
const MASK_OPTIONS: &CStr = c"mode=000,size=4k,nr_inodes=1";

enum ShownEntry {
    /// A copy of a mount that is not yet attached to a namespace.
    Tree {
        tree: OwnedFd,
        directory: bool,
    },
    Link(PathBuf),
}

pub(crate) struct CellView {
    shown: BTreeMap<PathBuf, ShownEntry>,
    /// Hidden paths below shown ones, each with true for a directory.
    masked: Vec<(PathBuf, bool)>,
}

/// Opens everything that the view shows, while this process can still access it.
pub(crate) fn gather_view(policy: &PathVisibility) -> io::Result<CellView> {
    // Mounts must not propagate between this namespace and the host.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let mut shown = BTreeMap::new();
    for path in SYSTEM_PATHS {
        let path = Path::new(path);
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(with_path(path)(error)),
            Ok(what) if what.is_symlink() => {
                shown.insert(
                    path.into(),
                    ShownEntry::Link(fs::read_link(path).map_err(with_path(path))?),
                );
            }
            Ok(_) => _ = shown.insert(path.into(), clone_mount(path, READ_ONLY)?),
        }
    }
    for path in DEVICES {
        shown.insert(path.into(), clone_mount(Path::new(path), DEVICE)?);
    }
    let mut masked = Vec::new();
    for path in policy.hidden.iter().filter_map(|path| path.canonicalize().ok()) {
        masked.push((path.clone(), path.is_dir()));
    }
    let mut wanted = Vec::new();
    for path in &policy.read_only {
        wanted.push((path, path.canonicalize().map_err(with_path(path))?));
    }
    // A directory sorts before the paths below it.
    wanted.sort_by(|(_, one), (_, other)| one.cmp(other));
    for (path, real) in wanted {
        add_path(&mut shown, &masked, path, real)?;
    }
    masked.retain(|(path, _)| is_covered(&shown, path));
    Ok(CellView { shown, masked })
}

/// Adds a path and the symbolic link by which it was named.
fn add_path(
    shown: &mut BTreeMap<PathBuf, ShownEntry>,
    masked: &[(PathBuf, bool)],
    path: &Path,
    real: PathBuf,
) -> io::Result<()> {
    if let Some((hidden, _)) = masked.iter().find(|(hidden, _)| real.starts_with(hidden)) {
        let problem = format!("to be shown, but in {}, which is hidden", hidden.display());
        return Err(with_path(path)(io::Error::other(problem)));
    }
    if real.parent().is_none() || !path.is_absolute() {
        let problem = "only an absolute path other than / can be shown";
        return Err(with_path(path)(io::Error::other(problem)));
    }
    if path != real && !is_covered(shown, path) {
        shown.insert(path.to_owned(), ShownEntry::Link(real.clone()));
    }
    if !is_covered(shown, &real) {
        let tree = clone_mount(&real, READ_ONLY)?;
        shown.insert(real, tree);
    }
    Ok(())
}

fn is_covered(shown: &BTreeMap<PathBuf, ShownEntry>, path: &Path) -> bool {
    path.ancestors().any(|above| shown.contains_key(above))
}

fn clone_mount(path: &Path, attributes: u64) -> io::Result<ShownEntry> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, path, flags).map_err(|error| with_path(path)(error.into()))?;
    restrict_mounts(&tree, Path::new(""), attributes).map_err(with_path(path))?;
    Ok(ShownEntry::Tree { tree, directory: path.is_dir() })
}

fn with_path(path: &Path) -> impl Fn(io::Error) -> io::Error + use<> {
    let path = path.to_owned();
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

impl CellView {
    pub(crate) fn build_view(self) -> io::Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("root", NEW_ROOT, "tmpfs", flags, ROOT_OPTIONS)
            .map_err(|e| with_path(Path::new(NEW_ROOT))(e.into()))?;
        for directory in ["dev", "etc", "proc", "room", "var"] {
            create_directories(&Path::new(NEW_ROOT).join(directory))?;
        }
        for (path, shown) in self.shown {
            attach_entry(&new_root_path(&path), shown).map_err(with_path(&path))?;
        }
        for (link, to) in LINKS {
            match symlink(to, Path::new(NEW_ROOT).join(link)) {
                // A path below it is shown; programs then have only the directories in the room.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked?,
            }
        }
        for (path, directory) in self.masked {
            mask_path(&new_root_path(&path), directory).map_err(with_path(&path))?;
        }
        write_accounts(&Path::new(NEW_ROOT).join("etc"))
    }
}

fn new_root_path(path: &Path) -> PathBuf {
    Path::new(NEW_ROOT).join(path.strip_prefix("/").unwrap_or(path))
}

/// Creates parents too, with mode 755.
fn create_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn attach_entry(target: &Path, shown: ShownEntry) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        create_directories(parent)?;
    }
    match shown {
        ShownEntry::Link(to) => symlink(to, target)?,
        ShownEntry::Tree { tree, directory } => {
            if directory {
                create_directories(target)?;
            } else {
                File::create(target)?;
            }
            move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
    }
    Ok(())
}

/// Covers a directory with an empty unreadable one, or a file with an empty one.
pub(crate) fn mask_path(target: &Path, directory: bool) -> io::Result<()> {
    if directory {
        let flags =
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
        mount("hidden", target, "tmpfs", flags, MASK_OPTIONS)?;
    } else {
        let ShownEntry::Tree { tree, .. } = clone_mount(Path::new("/dev/null"), DEVICE)? else {
            return Ok(());
        };
        move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

/// Writes accounts for programs that look up users; the host's are not shown.
fn write_accounts(etc: &Path) -> io::Result<()> {
    let nobody = 65534;
    let passwd = format!(
        "sandbox:x:{ID}:{ID}::{home}:/bin/sh\nnobody:x:{nobody}:{nobody}::/:/bin/false\n",
        home = super::WORK
    );
    fs::write(etc.join("passwd"), passwd)?;
    fs::write(etc.join("group"), format!("sandbox:x:{ID}:\nnogroup:x:{nobody}:\n"))?;
    fs::write(etc.join("nsswitch.conf"), "passwd: files\ngroup: files\nhosts: files\n")?;
    fs::write(etc.join("hosts"), "127.0.0.1 localhost\n::1 localhost\n")
}

/// Mounts the cell's own `/proc`, which monitors programs and which the kernel requires for
/// mounting theirs.
pub(crate) fn mount_cell_proc() -> io::Result<()> {
    mount_proc(&Path::new(NEW_ROOT).join("proc"))?;
    Ok(())
}

pub(crate) fn mount_proc(at: &Path) -> Result<(), Errno> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    mount("proc", at, "proc", flags, None)
}

/// Makes the view the root permanently: all other mounts are removed, and nothing is writable.
pub(crate) fn enter_view() -> io::Result<()> {
    std::env::set_current_dir(NEW_ROOT)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    restrict_mounts(CWD, Path::new("/"), libc::MOUNT_ATTR_RDONLY)
}
