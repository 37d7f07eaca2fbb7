//! The content of a file: live, durable, and the changes between them.

use crate::UnsyncedChanges;

/// The unit in which a write that the power cut interrupts reaches the disk.
const PAGE_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct FileContent {
    live: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<ContentChange>,
}

#[derive(Debug)]
enum ContentChange {
    Write { offset: usize, bytes: Vec<u8> },
    SetLength(usize),
}

impl ContentChange {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::SetLength(length) => content.resize(*length, 0),
            Self::Write { offset, bytes } => write_at(content, *offset, bytes),
        }
    }

    /// Applies the first pages of a write. A change of length is not divisible.
    fn apply_torn(&self, content: &mut Vec<u8>, random: &mut fastrand::Rng) {
        if let Self::Write { offset, bytes } = self {
            let pages = random.usize(..=(offset % PAGE_BYTES + bytes.len()) / PAGE_BYTES);
            let end = (pages * PAGE_BYTES).saturating_sub(offset % PAGE_BYTES);
            if end > 0 {
                write_at(content, *offset, &bytes[..end]);
            }
        }
    }
}

fn write_at(content: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[offset..end].copy_from_slice(bytes);
}

impl FileContent {
    pub(crate) fn live(&self) -> &[u8] {
        &self.live
    }

    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.change(ContentChange::Write { offset, bytes: bytes.to_vec() });
    }

    pub(crate) fn set_length(&mut self, length: usize) {
        self.change(ContentChange::SetLength(length));
    }

    fn change(&mut self, change: ContentChange) {
        change.apply(&mut self.live);
        self.unsynced.push(change);
    }

    pub(crate) fn sync(&mut self) {
        for change in self.unsynced.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// Returns the content after a power cut, and the number of lost changes.
    pub(crate) fn after_power_cut(
        mut self,
        unsynced: UnsyncedChanges,
        random: &mut fastrand::Rng,
    ) -> (Self, usize) {
        let mut lost = self.unsynced.len();
        if let UnsyncedChanges::PartlyKept { .. } = unsynced {
            let kept = random.usize(..=self.unsynced.len());
            lost -= kept;
            self.unsynced[..kept].iter().for_each(|change| change.apply(&mut self.durable));
            if let Some(torn) = self.unsynced.get(kept) {
                torn.apply_torn(&mut self.durable, random);
            }
        }
        let content = self.durable;
        (Self { live: content.clone(), durable: content, unsynced: Vec::new() }, lost)
    }
}
