//! What a cell shows of the box: the system and what the policy names, read-only, at their own
//! paths; a few devices; nothing else. Everything is a mount of the cell's own namespace.

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

use crate::{Policy, kernel::restrict_mounts};

use super::identity::ID;

/// Where the view is built before it becomes the root; any directory that every box has.
const NEW: &str = "/tmp";

/// Of the system, as far as the box has them.
const SYSTEM: &[&str] = &[
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

/// Links of the view, and where they lead.
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

/// Of the root itself, which holds only mount points and links.
const ROOT_OPTIONS: &CStr = c"mode=755,size=4m,nr_inodes=4k";
const MASK_OPTIONS: &CStr = c"mode=000,size=4k,nr_inodes=1";

/// What is shown at a path.
enum Shown {
    /// A copy of a mount, which belongs to no namespace yet.
    Tree {
        tree: OwnedFd,
        directory: bool,
    },
    Link(PathBuf),
}

/// All that is shown, by its path.
pub(crate) struct View {
    shown: BTreeMap<PathBuf, Shown>,
    /// Paths below something shown, and whether each is a directory.
    masked: Vec<(PathBuf, bool)>,
}

/// Takes hold of everything to be shown, while this process may still reach it.
pub(crate) fn gather(policy: &Policy) -> io::Result<View> {
    // What is mounted here must not appear outside, nor the other way.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let mut shown = BTreeMap::new();
    for path in SYSTEM {
        let path = Path::new(path);
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(path)(error)),
            Ok(what) if what.is_symlink() => {
                shown.insert(path.into(), Shown::Link(fs::read_link(path).map_err(at(path))?));
            }
            Ok(_) => _ = shown.insert(path.into(), take(path, READ_ONLY)?),
        }
    }
    for path in DEVICES {
        shown.insert(path.into(), take(Path::new(path), DEVICE)?);
    }
    let mut masked = Vec::new();
    for path in policy.hidden.iter().filter_map(|path| path.canonicalize().ok()) {
        masked.push((path.clone(), path.is_dir()));
    }
    let mut wanted = Vec::new();
    for path in &policy.read_only {
        wanted.push((path, path.canonicalize().map_err(at(path))?));
    }
    // A directory comes before what is below it.
    wanted.sort_by(|(_, one), (_, other)| one.cmp(other));
    for (path, real) in wanted {
        show_wanted(&mut shown, &masked, path, real)?;
    }
    masked.retain(|(path, _)| is_covered(&shown, path));
    Ok(View { shown, masked })
}

/// Adds what a policy names, and the link by which it was named.
fn show_wanted(
    shown: &mut BTreeMap<PathBuf, Shown>,
    masked: &[(PathBuf, bool)],
    path: &Path,
    real: PathBuf,
) -> io::Result<()> {
    if let Some((hidden, _)) = masked.iter().find(|(hidden, _)| real.starts_with(hidden)) {
        let problem = format!("to be shown, but in {}, which is hidden", hidden.display());
        return Err(at(path)(io::Error::other(problem)));
    }
    if real.parent().is_none() || !path.is_absolute() {
        let problem = "only an absolute path other than / can be shown";
        return Err(at(path)(io::Error::other(problem)));
    }
    if path != real && !is_covered(shown, path) {
        shown.insert(path.to_owned(), Shown::Link(real.clone()));
    }
    if !is_covered(shown, &real) {
        let tree = take(&real, READ_ONLY)?;
        shown.insert(real, tree);
    }
    Ok(())
}

fn is_covered(shown: &BTreeMap<PathBuf, Shown>, path: &Path) -> bool {
    path.ancestors().any(|above| shown.contains_key(above))
}

fn take(path: &Path, attributes: u64) -> io::Result<Shown> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, path, flags).map_err(|error| at(path)(error.into()))?;
    restrict_mounts(&tree, Path::new(""), attributes).map_err(at(path))?;
    Ok(Shown::Tree { tree, directory: path.is_dir() })
}

/// An error says which path it is about.
fn at(path: &Path) -> impl Fn(io::Error) -> io::Error + use<> {
    let path = path.to_owned();
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

impl View {
    /// Builds it at [`NEW`].
    pub(crate) fn build(self) -> io::Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("root", NEW, "tmpfs", flags, ROOT_OPTIONS)
            .map_err(|e| at(Path::new(NEW))(e.into()))?;
        for directory in ["dev", "etc", "proc", "room", "var"] {
            make_directories(&Path::new(NEW).join(directory))?;
        }
        for (path, shown) in self.shown {
            place(&below_new(&path), shown).map_err(at(&path))?;
        }
        for (link, to) in LINKS {
            match symlink(to, Path::new(NEW).join(link)) {
                // Something is shown below it; then programs have only the room's own.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked?,
            }
        }
        for (path, directory) in self.masked {
            mask(&below_new(&path), directory).map_err(at(&path))?;
        }
        write_accounts(&Path::new(NEW).join("etc"))
    }
}

fn below_new(path: &Path) -> PathBuf {
    Path::new(NEW).join(path.strip_prefix("/").unwrap_or(path))
}

fn make_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn place(target: &Path, shown: Shown) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        make_directories(parent)?;
    }
    match shown {
        Shown::Link(to) => symlink(to, target)?,
        Shown::Tree { tree, directory } => {
            if directory {
                make_directories(target)?;
            } else {
                File::create(target)?;
            }
            move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
    }
    Ok(())
}

/// Covers a directory with an empty one that nobody may read, a file with nothing.
fn mask(target: &Path, directory: bool) -> io::Result<()> {
    if directory {
        let flags =
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
        mount("hidden", target, "tmpfs", flags, MASK_OPTIONS)?;
    } else {
        let Shown::Tree { tree, .. } = take(Path::new("/dev/null"), DEVICE)? else { return Ok(()) };
        move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

/// Who the user is, for programs that ask; the box's own accounts are nobody's business.
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

/// Mounts the `/proc` of the cell, by which it looks after programs and the kernel gives them
/// theirs.
pub(crate) fn proc_of_cell() -> io::Result<()> {
    mount_proc(&Path::new(NEW).join("proc"))?;
    Ok(())
}

/// Mounts a `/proc` of the namespace that this process is in.
pub(crate) fn mount_proc(at: &Path) -> Result<(), Errno> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    mount("proc", at, "proc", flags, None)
}

/// Makes the view the root, for good: nothing else stays mounted, and nothing is writable.
pub(crate) fn enter() -> io::Result<()> {
    std::env::set_current_dir(NEW)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    restrict_mounts(CWD, Path::new("/"), libc::MOUNT_ATTR_RDONLY)
}
