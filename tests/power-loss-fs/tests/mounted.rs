//! The promises of the file system, through real mounts.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use power_loss_fs::{EntryDurability, PowerLossDisk, UnsyncedChanges};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, getxattr, renameat_with, statvfs};
use tempfile::TempDir;

const PAGE: usize = 4096;

struct MountedDisk {
    disk: PowerLossDisk,
    /// The last field, because it must be dropped after the mount.
    _directory: TempDir,
}

impl MountedDisk {
    fn mount(durability: EntryDurability) -> Option<Self> {
        if !requirements::require_fuse() {
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let disk = PowerLossDisk::mount(directory.path(), durability).expect("a mount");
        Some(Self { disk, _directory: directory })
    }

    /// Mounts a disk whose names need an fsync of their directory.
    fn strict() -> Option<Self> {
        Self::mount(EntryDurability::OwnDirectory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> File {
        let mut file = File::create(self.path(name)).expect("a file");
        file.write_all(text.as_bytes()).expect("room");
        file
    }

    /// Writes a file that survives.
    fn write_durable(&self, name: &str, text: &str) -> File {
        let file = self.write(name, text);
        file.sync_all().expect("it syncs");
        self.sync_directory(".");
        file
    }

    fn sync_directory(&self, name: &str) {
        File::open(self.path(name)).expect("a directory").sync_all().expect("it syncs");
    }

    fn lose_power(&self, unsynced: UnsyncedChanges) {
        self.disk.cut_power(unsynced);
        self.disk.restore_power();
    }

    fn read(&self, name: &str) -> Option<String> {
        match fs::read_to_string(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            text => Some(text.expect("a readable file")),
        }
    }

    fn names(&self) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let entries = fs::read_dir(self.disk.path()).expect("a directory");
        entries.map(|entry| name(entry).into_string().expect("UTF-8")).collect()
    }
}

#[test]
fn content_survives_only_if_it_was_synced() {
    let Some(disk) = MountedDisk::strict() else { return };
    let mut all = disk.write_durable("all", "old ");
    let data = disk.write_durable("data", "old ");
    let mut none = disk.write_durable("none", "old ");
    all.write_all(b"new").expect("room");
    all.sync_all().expect("it syncs");
    data.write_at(b"new", 4).expect("room");
    data.sync_data().expect("it syncs");
    none.write_all(b"new").expect("room");
    assert_eq!(disk.read("none").as_deref(), Some("old new"), "it is there before");
    disk.lose_power(UnsyncedChanges::Lost);
    let found = ["all", "data", "none"].map(|name| disk.read(name));
    assert_eq!(found, ["old new", "old new", "old "].map(|text| Some(text.to_owned())));
}

#[test]
fn a_forgotten_truncation_gives_the_content_back() {
    let Some(disk) = MountedDisk::strict() else { return };
    disk.write_durable("shortened", "a long text").set_len(6).expect("a length");
    drop(disk.write_durable("replaced", "old"));
    drop(disk.write("replaced", "new and longer"));
    disk.lose_power(UnsyncedChanges::Lost);
    assert_eq!(disk.read("shortened").as_deref(), Some("a long text"));
    assert_eq!(disk.read("replaced").as_deref(), Some("old"));
}

#[test]
fn writes_to_a_synchronous_file_survive_at_once() {
    let Some(disk) = MountedDisk::strict() else { return };
    for (name, flag) in [("sync", libc::O_SYNC), ("dsync", libc::O_DSYNC)] {
        drop(disk.write_durable(name, ""));
        let file = OpenOptions::new().append(true).custom_flags(flag).open(disk.path(name));
        file.expect("a file").write_all(b"text").expect("room");
    }
    disk.lose_power(UnsyncedChanges::Lost);
    assert_eq!(disk.read("sync").as_deref(), Some("text"));
    assert_eq!(disk.read("dsync").as_deref(), Some("text"));
}

#[test]
fn a_new_name_survives_with_its_directory_or_with_any_sync_by_mode() {
    for durability in [EntryDurability::OwnDirectory, EntryDurability::AnySync] {
        let Some(disk) = MountedDisk::mount(durability) else { return };
        disk.write("synced", "text").sync_all().expect("it syncs");
        let expected = (durability == EntryDurability::AnySync).then(|| "text".to_owned());
        disk.lose_power(UnsyncedChanges::Lost);
        assert_eq!(disk.read("synced"), expected, "{durability:?}");
        disk.write("synced", "text").sync_all().expect("it syncs");
        disk.sync_directory(".");
        disk.lose_power(UnsyncedChanges::Lost);
        assert_eq!(disk.read("synced").as_deref(), Some("text"), "{durability:?}");
    }
}

#[test]
fn a_directory_survives_only_with_its_own_name() {
    let Some(disk) = MountedDisk::strict() else { return };
    for top in ["lost", "kept"] {
        fs::create_dir_all(disk.path(top).join("inner")).expect("directories");
        disk.write(&format!("{top}/inner/file"), "text").sync_all().expect("it syncs");
        disk.sync_directory(&format!("{top}/inner"));
        disk.sync_directory(top);
    }
    fs::rename(disk.path("lost"), disk.path("lost-2")).expect("a rename");
    disk.sync_directory("kept");
    assert_eq!(disk.names(), ["kept", "lost-2"]);
    disk.lose_power(UnsyncedChanges::Lost);
    assert_eq!(disk.names(), [""; 0], "the names in the root were not synced");
    fs::create_dir_all(disk.path("kept/inner")).expect("directories");
    disk.sync_directory(".");
    disk.lose_power(UnsyncedChanges::Lost);
    assert!(disk.path("kept").is_dir() && !disk.path("kept/inner").exists());
}

#[test]
fn renamed_removed_and_linked_names_are_forgotten_until_their_directory_is_synced() {
    let Some(disk) = MountedDisk::strict() else { return };
    let change = || {
        fs::rename(disk.path("new"), disk.path("replaced")).expect("a rename");
        fs::remove_file(disk.path("removed")).expect("it was there");
        fs::hard_link(disk.path("replaced"), disk.path("linked")).expect("a link");
        symlink("replaced", disk.path("symlink")).expect("a symbolic link");
    };
    for name in ["new", "removed", "replaced"] {
        drop(disk.write_durable(name, name));
    }
    change();
    disk.lose_power(UnsyncedChanges::Lost);
    assert_eq!(disk.names(), ["new", "removed", "replaced"]);
    assert_eq!(disk.read("replaced").as_deref(), Some("replaced"));
    change();
    disk.sync_directory(".");
    disk.lose_power(UnsyncedChanges::Lost);
    assert_eq!(disk.names(), ["linked", "replaced", "symlink"]);
    assert_eq!(disk.read("symlink").as_deref(), Some("new"));
    // Both names are still one file.
    drop(disk.write_durable("linked", "changed"));
    assert_eq!(disk.read("replaced").as_deref(), Some("changed"));
}

#[test]
fn a_seed_keeps_the_first_writes_of_a_file_torn_at_a_page() {
    let Some(disk) = MountedDisk::strict() else { return };
    let mut lengths = Vec::new();
    for seed in (0..32).flat_map(|seed| [seed, seed]) {
        let mut file = disk.write_durable("file", "");
        for letter in [b"a", b"b", b"c"] {
            file.write_all(&letter.repeat(2 * PAGE)).expect("room");
        }
        drop(file);
        disk.lose_power(UnsyncedChanges::PartlyKept { seed });
        let found = fs::read(disk.path("file")).expect("a file");
        let written = [b"a", b"b", b"c"].map(|letter| letter.repeat(2 * PAGE)).concat();
        assert_eq!(found, written[..found.len()]);
        assert_eq!(found.len() % PAGE, 0, "torn within a page");
        lengths.push(found.len() / PAGE);
    }
    assert!(lengths.chunks(2).all(|pair| pair[0] == pair[1]), "a seed repeats: {lengths:?}");
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() >= 6, "{lengths:?}");
}

/// Returns the sets of names, out of ten created in order, that survive with 32 seeds.
fn surviving_names(durability: EntryDurability) -> Option<Vec<Vec<usize>>> {
    let mut found = Vec::new();
    for seed in 0..32 {
        let disk = MountedDisk::mount(durability)?;
        (0..10).for_each(|number| drop(disk.write(&number.to_string(), "")));
        disk.lose_power(UnsyncedChanges::PartlyKept { seed });
        found.push(disk.names().iter().map(|name| name.parse().expect("a number")).collect());
    }
    Some(found)
}

#[test]
fn a_seed_keeps_a_random_part_of_the_names_or_the_first_few_by_mode() {
    let Some(random) = surviving_names(EntryDurability::OwnDirectory) else { return };
    let Some(ordered) = surviving_names(EntryDurability::AnySync) else { return };
    let is_prefix = |names: &Vec<usize>| names.iter().copied().eq(0..names.len());
    assert!(ordered.iter().all(is_prefix), "{ordered:?}");
    assert!(!random.iter().all(is_prefix), "{random:?}");
    let different = |mut found: Vec<Vec<usize>>| {
        found.sort();
        found.dedup();
        found.len()
    };
    assert!(different(ordered) >= 6);
    assert!(different(random) >= 16);
}

#[test]
fn a_rename_survives_as_a_whole_or_not_at_all() {
    let mut names = Vec::new();
    for seed in 0..32 {
        let Some(disk) = MountedDisk::strict() else { return };
        for directory in ["from", "to"] {
            fs::create_dir(disk.path(directory)).expect("a directory");
        }
        disk.sync_directory(".");
        disk.write("from/file", "text").sync_all().expect("it syncs");
        disk.sync_directory("from");
        fs::rename(disk.path("from/file"), disk.path("to/file")).expect("a rename");
        disk.lose_power(UnsyncedChanges::PartlyKept { seed });
        let found = ["from/file", "to/file"].map(|name| disk.read(name).is_some());
        assert_ne!(found[0], found[1], "seed {seed}");
        names.push(found);
    }
    assert!(names.contains(&[true, false]) && names.contains(&[false, true]));
}

fn is_io_error<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
}

#[test]
fn without_power_everything_fails_and_open_files_stay_unusable() {
    let Some(disk) = MountedDisk::strict() else { return };
    let mut open = disk.write_durable("file", "text");
    disk.disk.cut_power(UnsyncedChanges::Lost);
    assert!(is_io_error(open.write(b"more")));
    assert!(is_io_error(open.sync_all()));
    assert!(is_io_error(File::create(disk.path("other"))));
    assert!(is_io_error(fs::read_dir(disk.disk.path()).map(|_| ())));
    disk.disk.restore_power();
    assert!(is_io_error(open.write(b"more")));
    drop(open);
    assert_eq!(disk.read("file").as_deref(), Some("text"));
    assert_eq!(disk.names(), ["file"]);
}

#[test]
#[expect(unsafe_code, reason = "only this test changes the mapped file")]
fn a_shared_mapping_is_lost_until_it_is_flushed_to_the_disk() {
    let Some(disk) = MountedDisk::strict() else { return };
    for (flushed, expected) in [(false, "old"), (true, "new")] {
        drop(disk.write_durable("file", "old"));
        let file = File::options().read(true).write(true).open(disk.path("file")).expect("a file");
        // SAFETY: nobody else changes the file.
        let mut mapping = unsafe { memmap2::MmapMut::map_mut(&file) }.expect("a mapping");
        mapping.copy_from_slice(b"new");
        if flushed {
            mapping.flush().expect("it syncs");
        }
        disk.disk.cut_power(UnsyncedChanges::Lost);
        drop((mapping, file));
        disk.disk.restore_power();
        assert_eq!(disk.read("file").as_deref(), Some(expected));
    }
}

#[test]
fn locks_exclude_each_other_and_end_with_the_power() {
    let Some(disk) = MountedDisk::strict() else { return };
    let first = disk.write_durable("lock", "");
    let try_lock = |file: &File| flock(file, FlockOperation::NonBlockingLockExclusive);
    try_lock(&first).expect("a free lock");
    let open = || File::open(disk.path("lock")).expect("a file");
    try_lock(&open()).expect_err("a taken lock");
    disk.lose_power(UnsyncedChanges::Lost);
    try_lock(&open()).expect("a free lock");
}

#[test]
fn files_behave_as_programs_expect() {
    let Some(disk) = MountedDisk::strict() else { return };
    drop(disk.write("log", "a"));
    for text in ["b", "c"] {
        let log = OpenOptions::new().append(true).open(disk.path("log"));
        log.expect("a file").write_all(text.as_bytes()).expect("room");
    }
    assert_eq!(disk.read("log").as_deref(), Some("abc"));

    let sparse = File::options().read(true).write(true).create_new(true).open(disk.path("sparse"));
    let mut sparse = sparse.expect("a file");
    sparse.set_len(1 << 20).expect("a length");
    sparse.write_at(b"end", (1 << 20) - 3).expect("room");
    let mut content = Vec::new();
    sparse.read_to_end(&mut content).expect("a readable file");
    assert_eq!(content.len(), 1 << 20);
    assert!(content.ends_with(b"\0\0end"));

    let size = statvfs(disk.disk.path()).expect("a size");
    assert_eq!(size.f_bavail * size.f_frsize, 64 << 30);
    let attribute = getxattr(disk.path("log"), "user.name", &mut [0_u8; 16][..]);
    assert_eq!(attribute, Err(rustix::io::Errno::OPNOTSUPP));
}

#[test]
fn renames_obey_their_flags() {
    let Some(disk) = MountedDisk::strict() else { return };
    for name in ["a", "b"] {
        drop(disk.write(name, name));
    }
    let rename = |flags| renameat_with(CWD, disk.path("a"), CWD, disk.path("b"), flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename(RenameFlags::EXCHANGE).expect("an exchange");
    assert_eq!(["a", "b"].map(|name| disk.read(name)), ["b", "a"].map(|it| Some(it.to_owned())));
    assert!(fs::remove_dir(disk.disk.path().join("a")).is_err());
}

#[test]
fn a_large_directory_can_be_removed() {
    let Some(disk) = MountedDisk::strict() else { return };
    let directory = disk.path("large");
    let file = |number: usize| directory.join(format!("{number}-{}", "x".repeat(200)));
    fs::create_dir(&directory).expect("a directory");
    (0..1000).for_each(|number| fs::write(file(number), "").expect("a file"));
    fs::remove_dir_all(&directory).expect("an empty directory");
    assert!(!Path::new(&directory).exists());
}
