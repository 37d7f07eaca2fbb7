//! The files and directories of a disk, and what a power cut leaves of them.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    time::SystemTime,
};

use fuser::{Errno, FileAttr, FileType, INodeNo, RenameFlags};

use crate::{
    EntryDurability, LostChanges, UnsyncedChanges,
    content::FileContent,
    entry_log::{EntryChange, EntryLog, EntryOperation},
};

/// A number of a file or directory. A power cut gives all of them new numbers, so that the kernel
/// caches nothing of the time before.
pub(crate) type Inode = u64;

pub(crate) const ROOT: Inode = 1;

/// A larger file would exhaust the memory.
const FILE_BYTES_MAX: u64 = 4 << 30;

const BLOCK_BYTES: u64 = 512;

#[derive(Debug)]
pub(crate) struct FileTree {
    nodes: BTreeMap<Inode, Node>,
    next: Inode,
    unsynced: EntryLog,
    durability: EntryDurability,
}

#[derive(Debug)]
struct Node {
    attributes: Attributes,
    /// The number of live names; of a directory 0 or 1.
    links: u32,
    body: NodeBody,
}

#[derive(Debug)]
pub(crate) enum NodeBody {
    File(FileContent),
    Directory(DirectoryEntries),
    Symlink(PathBuf),
    /// A pipe or a socket, which has no content.
    Special(FileType),
}

#[derive(Debug, Default)]
pub(crate) struct DirectoryEntries {
    live: BTreeMap<OsString, Inode>,
    durable: BTreeMap<OsString, Inode>,
}

/// Permissions, owner and times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) accessed: SystemTime,
    pub(crate) modified: SystemTime,
}

impl Attributes {
    pub(crate) fn new(mode: u32, uid: u32, gid: u32) -> Self {
        let now = SystemTime::now();
        Self { mode, uid, gid, accessed: now, modified: now }
    }
}

impl NodeBody {
    fn file_type(&self) -> FileType {
        match self {
            Self::File(_) => FileType::RegularFile,
            Self::Directory(_) => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
            Self::Special(kind) => *kind,
        }
    }

    fn byte_count(&self) -> u64 {
        let count = match self {
            Self::File(content) => content.live().len(),
            Self::Symlink(target) => target.as_os_str().len(),
            Self::Directory(_) | Self::Special(_) => 0,
        };
        u64::try_from(count).expect("a size in memory fits 64 bits")
    }
}

impl FileTree {
    pub(crate) fn new(durability: EntryDurability) -> Self {
        let body = NodeBody::Directory(DirectoryEntries::default());
        let root = Node { attributes: Attributes::new(0o755, 0, 0), links: 1, body };
        let nodes = BTreeMap::from([(ROOT, root)]);
        Self { nodes, next: ROOT + 1, unsynced: EntryLog::default(), durability }
    }

    fn node(&self, inode: Inode) -> Result<&Node, Errno> {
        self.nodes.get(&inode).ok_or(Errno::EIO)
    }

    fn node_mut(&mut self, inode: Inode) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&inode).ok_or(Errno::EIO)
    }

    fn entries(&self, directory: Inode) -> Result<&BTreeMap<OsString, Inode>, Errno> {
        match &self.node(directory)?.body {
            NodeBody::Directory(entries) => Ok(&entries.live),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub(crate) fn find_entry(&self, directory: Inode, name: &OsStr) -> Result<Inode, Errno> {
        self.entries(directory)?.get(name).copied().ok_or(Errno::ENOENT)
    }

    pub(crate) fn list_entries(
        &self,
        directory: Inode,
    ) -> Result<Vec<(Inode, FileType, OsString)>, Errno> {
        let listed = |(name, &inode): (&OsString, &Inode)| {
            Ok((inode, self.node(inode)?.body.file_type(), name.clone()))
        };
        self.entries(directory)?.iter().map(listed).collect()
    }

    pub(crate) fn file_attr(&self, inode: Inode) -> Result<FileAttr, Errno> {
        let Node { attributes, links, body } = self.node(inode)?;
        let size = body.byte_count();
        Ok(FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size.div_ceil(BLOCK_BYTES),
            atime: attributes.accessed,
            mtime: attributes.modified,
            ctime: attributes.modified,
            crtime: attributes.modified,
            kind: body.file_type(),
            perm: u16::try_from(attributes.mode & 0o7777).expect("12 bits"),
            nlink: *links,
            uid: attributes.uid,
            gid: attributes.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    pub(crate) fn attributes_mut(&mut self, inode: Inode) -> Result<&mut Attributes, Errno> {
        Ok(&mut self.node_mut(inode)?.attributes)
    }

    pub(crate) fn symlink_target(&self, inode: Inode) -> Result<&Path, Errno> {
        match &self.node(inode)?.body {
            NodeBody::Symlink(target) => Ok(target),
            _ => Err(Errno::EINVAL),
        }
    }

    fn content_mut(&mut self, inode: Inode) -> Result<&mut FileContent, Errno> {
        match &mut self.node_mut(inode)?.body {
            NodeBody::File(content) => Ok(content),
            _ => Err(Errno::EISDIR),
        }
    }

    pub(crate) fn read_file(&self, inode: Inode, offset: u64, count: u32) -> Result<&[u8], Errno> {
        let NodeBody::File(content) = &self.node(inode)?.body else { return Err(Errno::EISDIR) };
        let live = content.live();
        let limit = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(live.len());
        Ok(&live[limit(offset)..limit(offset.saturating_add(u64::from(count)))])
    }

    pub(crate) fn write_file(
        &mut self,
        inode: Inode,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let end = offset.checked_add(bytes.len() as u64).ok_or(Errno::EFBIG)?;
        checked_size(end)?;
        self.content_mut(inode)?.write(checked_size(offset)?, bytes);
        self.attributes_mut(inode)?.modified = SystemTime::now();
        Ok(())
    }

    pub(crate) fn set_file_length(&mut self, inode: Inode, length: u64) -> Result<(), Errno> {
        self.content_mut(inode)?.set_length(checked_size(length)?);
        self.attributes_mut(inode)?.modified = SystemTime::now();
        Ok(())
    }

    pub(crate) fn create_node(
        &mut self,
        directory: Inode,
        name: &OsStr,
        attributes: Attributes,
        body: NodeBody,
    ) -> Result<Inode, Errno> {
        self.check_free(directory, name)?;
        let inode = self.next;
        self.next += 1;
        self.nodes.insert(inode, Node { attributes, links: 0, body });
        self.change_entries(vec![change(directory, name, Some(inode))])?;
        Ok(inode)
    }

    pub(crate) fn link_file(
        &mut self,
        inode: Inode,
        directory: Inode,
        name: &OsStr,
    ) -> Result<(), Errno> {
        self.check_free(directory, name)?;
        self.node(inode)?;
        self.change_entries(vec![change(directory, name, Some(inode))])
    }

    pub(crate) fn remove_entry(&mut self, directory: Inode, name: &OsStr) -> Result<(), Errno> {
        let inode = self.find_entry(directory, name)?;
        self.check_removable(inode)?;
        self.change_entries(vec![change(directory, name, None)])
    }

    pub(crate) fn rename_entry(
        &mut self,
        from: (Inode, &OsStr),
        to: (Inode, &OsStr),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        let moved = self.find_entry(from.0, from.1)?;
        let replaced = self.find_entry(to.0, to.1).ok();
        let mut left_behind = None;
        if flags.contains(RenameFlags::RENAME_EXCHANGE) {
            left_behind = Some(replaced.ok_or(Errno::ENOENT)?);
        } else if let Some(replaced) = replaced {
            if flags.contains(RenameFlags::RENAME_NOREPLACE) {
                return Err(Errno::EEXIST);
            }
            // Two names of one file: rename(2) does nothing.
            if replaced == moved {
                return Ok(());
            }
            self.check_removable(replaced)?;
        }
        self.change_entries(vec![
            change(from.0, from.1, left_behind),
            change(to.0, to.1, Some(moved)),
        ])
    }

    fn check_free(&self, directory: Inode, name: &OsStr) -> Result<(), Errno> {
        let is_taken = self.entries(directory)?.contains_key(name);
        if is_taken { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// Fails for a directory that is not empty.
    fn check_removable(&self, inode: Inode) -> Result<(), Errno> {
        match &self.node(inode)?.body {
            NodeBody::Directory(entries) if !entries.live.is_empty() => Err(Errno::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    fn change_entries(&mut self, operation: EntryOperation) -> Result<(), Errno> {
        for EntryChange { directory, name, target } in &operation {
            let node = self.node_mut(*directory)?;
            node.attributes.modified = SystemTime::now();
            let NodeBody::Directory(entries) = &mut node.body else { return Err(Errno::ENOTDIR) };
            let before = match target {
                Some(target) => entries.live.insert(name.clone(), *target),
                None => entries.live.remove(name),
            };
            if let Some(before) = before {
                self.node_mut(before)?.links -= 1;
            }
            if let Some(target) = target {
                self.node_mut(*target)?.links += 1;
            }
        }
        self.unsynced.push(operation);
        Ok(())
    }

    pub(crate) fn sync_file(&mut self, inode: Inode) -> Result<(), Errno> {
        self.content_mut(inode)?.sync();
        if self.durability == EntryDurability::AnySync {
            self.sync_entries(None);
        }
        Ok(())
    }

    pub(crate) fn sync_directory(&mut self, inode: Inode) -> Result<(), Errno> {
        self.entries(inode)?;
        let only = (self.durability == EntryDurability::OwnDirectory).then_some(inode);
        self.sync_entries(only);
        Ok(())
    }

    /// Makes the changed names of one directory durable, or all.
    fn sync_entries(&mut self, only: Option<Inode>) {
        let is_selected = |operation: &EntryOperation| {
            only.is_none_or(|only| operation.iter().any(|change| change.directory == only))
        };
        let operations = self.unsynced.take_selected(is_selected);
        self.make_durable(operations);
    }

    fn make_durable(&mut self, operations: Vec<EntryOperation>) {
        for EntryChange { directory, name, target } in operations.into_iter().flatten() {
            let node = self.nodes.get_mut(&directory);
            let Some(Node { body: NodeBody::Directory(entries), .. }) = node else { continue };
            match target {
                Some(target) => entries.durable.insert(name, target),
                None => entries.durable.remove(&name),
            };
        }
    }

    /// Replaces the live state by the durable one and what survives of the unsynced changes.
    pub(crate) fn cut_power(&mut self, unsynced: UnsyncedChanges) -> LostChanges {
        let mut random = fastrand::Rng::with_seed(match unsynced {
            UnsyncedChanges::PartlyKept { seed } => seed,
            UnsyncedChanges::Lost => 0,
        });
        if let UnsyncedChanges::PartlyKept { .. } = unsynced {
            let survivors = match self.durability {
                EntryDurability::AnySync => {
                    let count = random.usize(..=self.unsynced.len());
                    self.unsynced.take_first(count)
                }
                EntryDurability::OwnDirectory => self.unsynced.take_selected(|_| random.bool()),
            };
            self.make_durable(survivors);
        }
        let entries = std::mem::take(&mut self.unsynced).len();
        let writes = self.rebuild_nodes(unsynced, &mut random);
        LostChanges { writes, entries }
    }

    /// Rebuilds the tree from the durable names, with new numbers. Returns the number of lost
    /// writes.
    fn rebuild_nodes(&mut self, unsynced: UnsyncedChanges, random: &mut fastrand::Rng) -> usize {
        let mut old = std::mem::take(&mut self.nodes);
        let mut numbers = BTreeMap::from([(ROOT, ROOT)]);
        let (mut waiting, mut lost) = (vec![ROOT], 0);
        while let Some(inode) = waiting.pop() {
            let Some(Node { attributes, body, .. }) = old.remove(&inode) else { continue };
            let body = match body {
                NodeBody::File(content) => {
                    let (content, lost_here) = content.after_power_cut(unsynced, random);
                    lost += lost_here;
                    NodeBody::File(content)
                }
                NodeBody::Directory(DirectoryEntries { durable, .. }) => {
                    let mut renumber = |inode: Inode| {
                        waiting.push(inode);
                        *numbers.entry(inode).or_insert_with(|| {
                            self.next += 1;
                            self.next - 1
                        })
                    };
                    let live: BTreeMap<_, _> =
                        durable.into_iter().map(|(name, inode)| (name, renumber(inode))).collect();
                    NodeBody::Directory(DirectoryEntries { durable: live.clone(), live })
                }
                other => other,
            };
            self.nodes.insert(numbers[&inode], Node { attributes, links: 0, body });
        }
        self.count_links();
        lost
    }

    fn count_links(&mut self) {
        let mut links = BTreeMap::from([(ROOT, 1)]);
        for node in self.nodes.values() {
            if let NodeBody::Directory(entries) = &node.body {
                entries.live.values().for_each(|&inode| *links.entry(inode).or_default() += 1);
            }
        }
        for (inode, node) in &mut self.nodes {
            node.links = links.get(inode).copied().unwrap_or_default();
        }
    }
}

fn change(directory: Inode, name: &OsStr, target: Option<Inode>) -> EntryChange {
    EntryChange { directory, name: name.to_owned(), target }
}

fn checked_size(bytes: u64) -> Result<usize, Errno> {
    if bytes > FILE_BYTES_MAX {
        return Err(Errno::EFBIG);
    }
    usize::try_from(bytes).map_err(|_| Errno::EFBIG)
}
