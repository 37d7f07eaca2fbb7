//! The requests of the kernel, answered from a [`FileTree`].

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::{
    EntryDurability, LostChanges, UnsyncedChanges,
    content::FileContent,
    file_tree::{Attributes, DirectoryEntries, FileTree, Inode, NodeBody},
};

/// The kernel keeps no names and attributes, because a power cut changes them.
const CACHE_TIME: Duration = Duration::ZERO;

/// Numbers are never used again.
const GENERATION: Generation = Generation(0);

/// The size in `statfs`, in blocks of 4096 bytes: 64 GiB, always free.
const DISK_BLOCKS: u64 = 1 << 24;

/// The state that the mount and its handle share.
#[derive(Debug)]
pub(crate) struct DiskState(Mutex<Disk>);

#[derive(Debug)]
struct Disk {
    tree: FileTree,
    has_power: bool,
    /// The names of each open directory at the time it was opened.
    listings: BTreeMap<u64, Vec<(Inode, FileType, OsString)>>,
    next_listing: u64,
}

impl DiskState {
    pub(crate) fn new(durability: EntryDurability) -> Self {
        let tree = FileTree::new(durability);
        let listings = BTreeMap::new();
        Self(Mutex::new(Disk { tree, has_power: true, listings, next_listing: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn cut_power(&self, unsynced: UnsyncedChanges) -> LostChanges {
        let mut disk = self.lock();
        disk.has_power = false;
        disk.listings.clear();
        disk.tree.cut_power(unsynced)
    }

    pub(crate) fn restore_power(&self) {
        self.lock().has_power = true;
    }
}

pub(crate) struct PowerLossFs(Arc<DiskState>);

impl PowerLossFs {
    pub(crate) fn new(state: Arc<DiskState>) -> Self {
        Self(state)
    }

    /// Carries out an operation, unless the power is cut.
    fn with_disk<T>(
        &self,
        operation: impl FnOnce(&mut Disk) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut disk = self.0.lock();
        if disk.has_power { operation(&mut disk) } else { Err(Errno::EIO) }
    }

    fn create_node(
        &self,
        request: &Request,
        (parent, name): (INodeNo, &OsStr),
        mode: u32,
        body: NodeBody,
    ) -> Result<FileAttr, Errno> {
        let attributes = Attributes::new(mode & 0o7777, request.uid(), request.gid());
        self.with_disk(|disk| {
            let inode = disk.tree.create_node(parent.0, name, attributes, body)?;
            disk.tree.file_attr(inode)
        })
    }
}

fn reply_entry(result: Result<FileAttr, Errno>, reply: ReplyEntry) {
    match result {
        Ok(attr) => reply.entry(&CACHE_TIME, &attr, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn reply_attr(result: Result<FileAttr, Errno>, reply: ReplyAttr) {
    match result {
        Ok(attr) => reply.attr(&CACHE_TIME, &attr),
        Err(error) => reply.error(error),
    }
}

fn reply_empty(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn resolve_time(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

impl Filesystem for PowerLossFs {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.with_disk(|disk| {
            let inode = disk.tree.find_entry(parent.0, name)?;
            disk.tree.file_attr(inode)
        });
        reply_entry(found, reply);
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply_attr(self.with_disk(|disk| disk.tree.file_attr(inode.0)), reply);
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.with_disk(|disk| {
            if let Some(size) = size {
                disk.tree.set_file_length(inode.0, size)?;
            }
            let now = disk.tree.attributes_mut(inode.0)?;
            *now = Attributes {
                mode: mode.unwrap_or(now.mode),
                uid: uid.unwrap_or(now.uid),
                gid: gid.unwrap_or(now.gid),
                accessed: accessed.map_or(now.accessed, resolve_time),
                modified: modified.map_or(now.modified, resolve_time),
            };
            disk.tree.file_attr(inode.0)
        });
        reply_attr(changed, reply);
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        match self.with_disk(|disk| disk.tree.symlink_target(inode.0).map(Path::to_owned)) {
            Ok(target) => reply.data(target.as_os_str().as_encoded_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let body = match mode & libc::S_IFMT {
            libc::S_IFREG => NodeBody::File(FileContent::default()),
            libc::S_IFIFO => NodeBody::Special(FileType::NamedPipe),
            libc::S_IFSOCK => NodeBody::Special(FileType::Socket),
            _ => return reply.error(Errno::EPERM),
        };
        reply_entry(self.create_node(request, (parent, name), mode, body), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let body = NodeBody::Directory(DirectoryEntries::default());
        reply_entry(self.create_node(request, (parent, name), mode, body), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(self.with_disk(|disk| disk.tree.remove_entry(parent.0, name)), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(self.with_disk(|disk| disk.tree.remove_entry(parent.0, name)), reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let body = NodeBody::Symlink(target.to_owned());
        reply_entry(self.create_node(request, (parent, name), 0o777, body), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((parent.0, name), (new_parent.0, new_name));
        reply_empty(self.with_disk(|disk| disk.tree.rename_entry(from, to, flags)), reply);
    }

    fn link(
        &self,
        _: &Request,
        inode: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let linked = self.with_disk(|disk| {
            disk.tree.link_file(inode.0, new_parent.0, new_name)?;
            disk.tree.file_attr(inode.0)
        });
        reply_entry(linked, reply);
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.with_disk(|disk| disk.tree.file_attr(inode.0)) {
            Ok(_) => reply.opened(FileHandle(0), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let body = NodeBody::File(FileContent::default());
        match self.create_node(request, (parent, name), mode, body) {
            Ok(attr) => {
                let (handle, flags) = (FileHandle(0), FopenFlags::empty());
                reply.created(&CACHE_TIME, &attr, GENERATION, handle, flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.with_disk(|disk| disk.tree.read_file(inode.0, offset, size).map(<[u8]>::to_vec))
        {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.with_disk(|disk| {
            disk.tree.write_file(inode.0, offset, bytes)?;
            // O_SYNC contains O_DSYNC.
            if flags.0 & libc::O_DSYNC != 0 {
                disk.tree.sync_file(inode.0)?;
            }
            u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)
        });
        match written {
            Ok(count) => reply.written(count),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply_empty(self.with_disk(|disk| disk.tree.sync_file(inode.0)), reply);
    }

    fn fsyncdir(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply_empty(self.with_disk(|disk| disk.tree.sync_directory(inode.0)), reply);
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let opened = self.with_disk(|disk| {
            let parts = [".", ".."].map(|name| (inode.0, FileType::Directory, name.into()));
            let mut listing = Vec::from(parts);
            listing.extend(disk.tree.list_entries(inode.0)?);
            disk.next_listing += 1;
            disk.listings.insert(disk.next_listing, listing);
            Ok(disk.next_listing)
        });
        match opened {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.with_disk(|disk| {
            let listing = disk.listings.get(&handle.0).ok_or(Errno::EIO)?;
            for (next, (inode, kind, name)) in (1..).zip(listing) {
                if next > offset && reply.add(INodeNo(*inode), next, *kind, name) {
                    break;
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.0.lock().listings.remove(&handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let files = DISK_BLOCKS;
        reply.statfs(DISK_BLOCKS, DISK_BLOCKS, DISK_BLOCKS, files, files, 4096, 255, 4096);
    }
}
