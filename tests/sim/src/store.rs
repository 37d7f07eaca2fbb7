//! A model of the store: files by digest, which may be lost or damaged, and disks that may be full.

use std::{collections::BTreeMap, rc::Rc};

use wire::{Digest, Fact, FactBody, Record, v1};

/// The result of reading or writing files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreOutcome {
    Done,
    /// The store is not available, or has no space.
    Away,
    /// A file is missing, or its content has another digest.
    Damaged,
    /// The disk of the reader is full.
    DiskFull,
}

#[derive(Debug, Default)]
pub(crate) struct Store {
    /// Each with the end of its damage, if any.
    files: BTreeMap<String, u64>,
    archives: BTreeMap<String, Rc<Vec<Rc<Record>>>>,
}

impl Store {
    /// Does not repair a damaged file: a file that exists is not written again.
    pub(crate) fn put_file(&mut self, digest: &str) {
        if !self.files.contains_key(digest) {
            self.files.insert(digest.to_owned(), 0);
        }
    }

    pub(crate) fn put_archive(&mut self, records: &Rc<Vec<Rc<Record>>>) {
        let digest = archive_digest(records);
        self.put_file(&digest);
        self.archives.insert(digest, records.clone());
    }

    pub(crate) fn find_archive(&self, digest: &str) -> Option<&[Rc<Record>]> {
        self.archives.get(digest).map(|records| records.as_slice())
    }

    pub(crate) fn read_files(&self, now_ms: u64, digests: &[String]) -> StoreOutcome {
        let is_good = |digest: &String| self.files.get(digest).is_some_and(|end| *end <= now_ms);
        if digests.iter().all(is_good) { StoreOutcome::Done } else { StoreOutcome::Damaged }
    }

    /// Damages a file until `end_ms`. Returns its digest; `None` if there are no files.
    pub(crate) fn damage_file(
        &mut self,
        random: &mut fastrand::Rng,
        end_ms: u64,
    ) -> Option<&String> {
        let file = random.usize(0..self.files.len().max(1));
        let (digest, end) = self.files.iter_mut().nth(file)?;
        *end = end_ms;
        Some(digest)
    }

    pub(crate) fn repair_files(&mut self) {
        self.files.values_mut().for_each(|end| *end = 0);
    }

    /// Returns a file that the fact names and that was never stored.
    pub(crate) fn find_missing_file(&self, fact: &Fact) -> Option<String> {
        named_files(fact).into_iter().find(|digest| !self.files.contains_key(digest))
    }
}

/// Returns the digest of the facts of a cycle. The log is write-once, so positions identify them.
pub(crate) fn archive_digest(records: &[Rc<Record>]) -> String {
    let line = |r: &Rc<Record>| format!("{} {} {}\n", r.sequence, r.time_ms, r.fact.subject);
    let lines: String = records.iter().map(line).collect();
    Digest::hash_bytes(lines.as_bytes()).to_string()
}

/// Returns the digests of the files that must be in the store before a fact.
pub(crate) fn named_files(fact: &Fact) -> Vec<String> {
    let blob = |blob: &Option<v1::Blob>| blob.as_ref().map(|blob| blob.digest.clone());
    let tree = |tree: &Option<v1::Tree>| tree.as_ref().map(|tree| tree.manifest.clone());
    let base = |base: &Option<v1::Base>| base.as_ref().and_then(|base| tree(&base.tree));
    let files = match &fact.body {
        FactBody::Spec(spec) => {
            let suites = spec.suites.iter().map(|suite| blob(&suite.text));
            let data = match &spec.kind {
                Some(v1::spec::Kind::Raft(raft)) => {
                    raft.prompt_sets().map(|set| set.file.map(|file| file.digest.clone())).collect()
                }
                Some(v1::spec::Kind::Sft(sft)) => vec![blob(&sft.dataset)],
                Some(v1::spec::Kind::Watched(_)) | None => Vec::new(),
            };
            suites.chain([base(&spec.base)]).chain(data).collect()
        }
        FactBody::GenerateOrder(order) => vec![tree(&order.base), tree(&order.adapter)],
        FactBody::TrainOrder(order) => {
            let mut files = vec![base(&order.base), tree(&order.adapter), blob(&order.dataset)];
            match &order.part {
                Some(v1::train_order::Part::Slice(slice)) => {
                    files.extend(start_files(slice.start.as_ref(), &slice.derivation));
                }
                Some(v1::train_order::Part::Merge(merge)) => {
                    files.extend(start_files(merge.start.as_ref(), &merge.derivation));
                    files.extend(merge.deltas.iter().map(|delta| tree(&delta.tree)));
                }
                None => {}
            }
            files
        }
        FactBody::Selected(selected) => vec![blob(&selected.dataset)],
        FactBody::Checkpoint(checkpoint) => vec![tree(&checkpoint.base), tree(&checkpoint.tree)],
        FactBody::Delta(delta) => vec![tree(&delta.tree)],
        FactBody::Merge(merge) => vec![tree(&merge.tree).filter(|_| !merge.derived)],
        FactBody::Archived(archived) => vec![tree(&archived.tree)],
        _ => Vec::new(),
    };
    files.into_iter().flatten().collect()
}

/// Returns the digests of the files from which a box can have the start of a part, even if it joins
/// the training only now.
fn start_files(
    start: Option<&v1::Tree>,
    derivation: &[v1::train_order::Merge],
) -> Vec<Option<String>> {
    let digest = |tree: &v1::Tree| tree.manifest.clone();
    let Some(first) = derivation.first() else { return vec![start.map(digest)] };
    let changes = derivation.iter().flat_map(|merge| &merge.deltas);
    let changes = changes.map(|delta| delta.tree.as_ref().map(digest));
    changes.chain([first.start.as_ref().map(digest)]).collect()
}
