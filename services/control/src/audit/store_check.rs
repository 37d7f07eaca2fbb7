//! Checks the objects that a run's facts name: names and sizes, the lineage in the manifests, and
//! on request every byte.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use serde_json::{Value, json};
use store::{
    GetError, LEFTOVER_AGE, ObjectDefect, Store, TreeFile, TreeManifest, TreeRemoval,
    UploadLeftovers, VerifyReport,
};
use wire::{FactBody, Record, v1};

use super::{
    AuditDepth, AuditFinding, AuditReport, FindingSource, ProgressCallback, TaskProgress,
    error_chain,
};

const CONCURRENT_LOOKUPS: usize = 8;

/// Each hash takes a few parts of 16 MiB in memory at most.
const CONCURRENT_HASHES: usize = 2;

/// An audit does not wait for an unavailable store.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct ReferencedObjects {
    /// Keyed by path and manifest digest.
    trees: BTreeMap<String, ReferencedTree>,
    blobs: BTreeMap<String, ReferencedBlob>,
    datasets: BTreeMap<u32, String>,
    /// A run that adopts an external training.
    is_watched: bool,
}

#[derive(Debug, Clone)]
struct FactReference {
    subject: String,
    sequence: u64,
}

/// Entries that a manifest must contain.
type ExpectedEntries = Vec<(&'static str, Value)>;

impl ReferencedObjects {
    pub(super) fn add_record(&mut self, record: &Record) {
        match &record.fact.body {
            FactBody::Spec(spec) => self.add_spec(record, spec),
            FactBody::Selected(selected) => self.add_selection(record, selected),
            FactBody::Checkpoint(checkpoint) => self.add_checkpoint(record, checkpoint),
            FactBody::Channel(named) => {
                self.add_tree(record, named.base.as_ref(), ExpectedEntries::new());
                self.add_tree(record, named.adapter.as_ref(), ExpectedEntries::new());
                let learning =
                    named.learning.iter().flat_map(|it| it.spec.iter().chain(it.files.values()));
                learning.for_each(|blob| self.add_blob(record, Some(blob)));
            }
            FactBody::Archived(archived) => {
                self.add_tree(record, archived.tree.as_ref(), ExpectedEntries::new());
            }
            _ => {}
        }
    }

    fn add_selection(&mut self, record: &Record, selected: &v1::Selected) {
        if let Some(dataset) = &selected.dataset {
            self.datasets.insert(selected.cycle, dataset.digest.clone());
        }
        // An empty selection has a dataset that is never trained on.
        self.add_blob(record, selected.dataset.as_ref().filter(|_| selected.kept > 0));
    }

    fn add_checkpoint(&mut self, record: &Record, checkpoint: &v1::Checkpoint) {
        let about = self.expected_lineage(checkpoint);
        self.add_tree(record, checkpoint.tree.as_ref(), about);
        self.add_tree(record, checkpoint.base.as_ref(), ExpectedEntries::new());
        self.add_tree(record, checkpoint.parent.as_ref(), ExpectedEntries::new());
    }

    fn add_spec(&mut self, record: &Record, spec: &v1::Spec) {
        let base = spec.base.as_ref().and_then(|base| base.tree.as_ref());
        self.add_tree(record, base, ExpectedEntries::new());
        let adapter = spec.base.as_ref().and_then(|base| base.adapter.as_ref());
        self.add_tree(record, adapter, ExpectedEntries::new());
        for forked in spec.fork.iter().flat_map(|fork| &fork.cycles) {
            forked.selected.iter().for_each(|selected| self.add_selection(record, selected));
            forked.checkpoints.iter().for_each(|it| self.add_checkpoint(record, it));
        }
        for suite in &spec.suites {
            self.add_blob(record, suite.text.as_ref());
        }
        match &spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => {
                raft.prompt_sets().for_each(|set| self.add_blob(record, set.file));
                self.add_tree(record, raft.teacher.as_ref(), ExpectedEntries::new());
                let given = raft.dataset.as_ref().and_then(|dataset| dataset.lines.as_ref());
                self.add_blob(record, given);
            }
            Some(v1::spec::Kind::Sft(sft)) => {
                self.datasets.extend(sft.dataset.as_ref().map(|blob| (0, blob.digest.clone())));
                self.add_blob(record, sft.dataset.as_ref());
            }
            Some(v1::spec::Kind::Watched(_)) => self.is_watched = true,
            None => {}
        }
    }

    /// Returns the lineage entries that the manifest must contain; none for an adopted base.
    fn expected_lineage(&self, checkpoint: &v1::Checkpoint) -> ExpectedEntries {
        let v1::Checkpoint { cycle, step, steps, base, parent, .. } = checkpoint;
        let adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
        if self.is_watched {
            let content = if adapter { "adapter" } else { "model" };
            let base = parent.as_ref().map(|base| base.manifest.as_str());
            let entries = [("content", json!(content)), ("base", json!(base))];
            let numbers = [("cycle", json!(cycle)), ("step", json!(step)), ("steps", json!(steps))];
            return entries.into_iter().chain(numbers).collect();
        }
        let Some(parent) = parent else { return ExpectedEntries::new() };
        let trained = base.as_ref().filter(|_| adapter).unwrap_or(parent);
        vec![
            ("content", json!(if adapter { "adapter" } else { "model" })),
            ("base", json!(trained.manifest)),
            ("parent", json!(parent.manifest)),
            ("dataset", json!(self.datasets.get(cycle))),
            ("cycle", json!(cycle)),
            ("step", json!(step)),
            ("steps", json!(steps)),
        ]
    }

    fn add_tree(&mut self, record: &Record, tree: Option<&v1::Tree>, about: ExpectedEntries) {
        let Some(tree) = tree else { return };
        // Two paths may hold the same content; both must be complete.
        let key = format!("{} {}", tree.path, tree.manifest);
        let new = || (FactReference::for_record(record), tree.clone(), ExpectedEntries::new());
        let known = self.trees.entry(key).or_insert_with(new);
        if !about.is_empty() {
            known.2 = about;
        }
    }

    fn add_blob(&mut self, record: &Record, blob: Option<&v1::Blob>) {
        let Some(blob) = blob else { return };
        let new = || (FactReference::for_record(record), blob.clone());
        self.blobs.entry(blob.digest.clone()).or_insert_with(new);
    }
}

impl FactReference {
    fn for_record(record: &Record) -> Self {
        Self { subject: record.fact.subject.to_string(), sequence: record.sequence }
    }

    /// Turns a defect of an object into a finding about the fact that names it.
    fn to_finding(&self, flaw: ObjectDefect) -> AuditFinding {
        let ObjectDefect { url, problem: what, expected, found } = flaw;
        AuditFinding {
            place: FindingSource::Store,
            what: what.to_owned(),
            subject: Some(self.subject.clone()),
            sequence: Some(self.sequence),
            url: Some(url),
            expected,
            found,
        }
    }
}

enum HashTarget<'a> {
    File(&'a FactReference, &'a v1::Tree, TreeFile),
    Sums(&'a FactReference, &'a v1::Tree, TreeManifest),
    Blob(&'a FactReference, &'a v1::Blob),
}

/// Stops early if the store does not answer.
pub(super) async fn check_objects(
    store: &Store,
    held: &ReferencedObjects,
    depth: AuditDepth,
    watch: ProgressCallback<'_>,
    report: &mut AuditReport,
) {
    let whole = match check_files(store, held, watch, report).await {
        Ok(whole) => whole,
        Err(error) => return report.not_checked.push(format!("files: {error}")),
    };
    report.checked.push("files");
    report.notes.extend(note_leftovers(store).await);
    if depth < AuditDepth::Bytes {
        return;
    }
    match check_bytes(store, whole, watch, report).await {
        Ok(()) => report.checked.push("bytes"),
        Err(error) => report.not_checked.push(format!("bytes: {}", error_chain(&error))),
    }
}

/// Checks names, sizes, manifests and lineage. Returns the objects that exist with the right size.
async fn check_files<'a>(
    store: &'a Store,
    held: &'a ReferencedObjects,
    watch: ProgressCallback<'_>,
    report: &mut AuditReport,
) -> Result<Vec<HashTarget<'a>>, String> {
    let total = (held.trees.len() + held.blobs.len()) as u64;
    let mut done = 0;
    let mut whole = Vec::new();
    let trees: Vec<_> = held.trees.values().map(|tree| examine_tree(store, tree)).collect();
    let mut trees = stream::iter(trees).buffered(CONCURRENT_LOOKUPS);
    while let Some(looked) = with_time_limit(trees.next()).await? {
        let (origin, tree, about, examined) = looked.map_err(|error| error_chain(&error))?;
        if let Some(manifest) = examined.manifest.clone() {
            check_lineage(store, tree, &manifest, about)
                .into_iter()
                .for_each(|flaw| report.add_finding(origin.to_finding(flaw)));
            report.notes.extend(external_files_note(store, tree, &manifest, &examined.external));
            whole.extend(hashable_objects(store, origin, tree, manifest, &examined));
        }
        report.notes.extend(examined.removal.map(|removal| removal_note(store, tree, &removal)));
        examined.defects.into_iter().for_each(|flaw| report.add_finding(origin.to_finding(flaw)));
        done += 1;
        watch(TaskProgress { unit: "files", done, total });
    }
    let blobs: Vec<_> = held.blobs.values().map(|blob| examine_blob(store, blob)).collect();
    let mut blobs = stream::iter(blobs).buffered(CONCURRENT_LOOKUPS);
    while let Some(looked) = with_time_limit(blobs.next()).await? {
        match looked.map_err(|error| error_chain(&error))? {
            (origin, _, Some(flaw)) => report.add_finding(origin.to_finding(flaw)),
            (origin, blob, None) => whole.push(HashTarget::Blob(origin, blob)),
        }
        done += 1;
        watch(TaskProgress { unit: "files", done, total });
    }
    Ok(whole)
}

type ReferencedTree = (FactReference, v1::Tree, ExpectedEntries);
type ReferencedBlob = (FactReference, v1::Blob);
type StoreLookup<'a, T> = BoxFuture<'a, Result<T, GetError>>;

fn examine_tree<'a>(
    store: &'a Store,
    (origin, tree, about): &'a ReferencedTree,
) -> StoreLookup<'a, (&'a FactReference, &'a v1::Tree, &'a ExpectedEntries, VerifyReport)> {
    async move { Ok((origin, tree, about, store.examine_tree(tree).await?)) }.boxed()
}

fn examine_blob<'a>(
    store: &'a Store,
    (origin, blob): &'a ReferencedBlob,
) -> StoreLookup<'a, (&'a FactReference, &'a v1::Blob, Option<ObjectDefect>)> {
    async move { Ok((origin, blob, store.examine_blob(blob).await?)) }.boxed()
}

/// Returns a finding if the content is wrong. `seen` receives the number of bytes of each part.
fn hash_object<'a>(
    store: &'a Store,
    object: &'a HashTarget<'_>,
    seen: store::ByteProgress<'a>,
) -> StoreLookup<'a, Option<AuditFinding>> {
    let hashed = async move {
        let flaw = match object {
            HashTarget::File(_, tree, file) => store.hash_tree_file(tree, file, seen).await?,
            HashTarget::Sums(_, tree, manifest) => store.hash_sums(tree, manifest).await?,
            HashTarget::Blob(_, blob) => store.hash_blob(blob, seen).await?,
        };
        Ok(flaw.map(|flaw| object.fact_reference().to_finding(flaw)))
    };
    hashed.boxed()
}

/// Waits at most [`LOOK_LIMIT`].
async fn with_time_limit<T>(look: impl Future<Output = T>) -> Result<T, String> {
    let silent = |_| format!("the store did not answer within {LOOK_LIMIT:?}");
    tokio::time::timeout(LOOK_LIMIT, look).await.map_err(silent)
}

/// Returns a defect for each manifest entry that differs from the facts.
fn check_lineage(
    store: &Store,
    tree: &v1::Tree,
    manifest: &TreeManifest,
    about: &ExpectedEntries,
) -> Vec<ObjectDefect> {
    let differs = |(key, expected): &(&'static str, Value)| {
        let found = manifest.about.get(*key);
        let told = |value: &Value| format!("{key} {value}");
        (found != Some(expected)).then(|| ObjectDefect {
            url: format!("{}/{}/manifest.json", store.url(), tree.path),
            problem: "has another lineage than the log",
            expected: Some(told(expected)),
            found: Some(found.map_or_else(|| format!("no {key}"), told)),
        })
    };
    about.iter().filter_map(differs).collect()
}

/// Notes what uploads left that should have been removed.
async fn note_leftovers(store: &Store) -> Option<String> {
    let found = with_time_limit(store.find_leftovers(LEFTOVER_AGE)).await.ok()?.ok()?;
    let UploadLeftovers { count, bytes } = found;
    (!found.is_empty()).then(|| {
        format!(
            "{} has {count} unfinished uploads of {bytes} bytes: the fleet's coordinator removes \
             them when it starts, and every hour",
            store.url()
        )
    })
}

fn removal_note(store: &Store, tree: &v1::Tree, removal: &TreeRemoval) -> String {
    let TreeRemoval { at, by, rules } = removal;
    format!(
        "{}/{} was removed by retention, on {at} by {by} (kept: {rules}); what it had is not checked",
        store.url(),
        tree.path
    )
}

/// Returns a note if files of a base are not in the store because its user chose not to upload
/// them.
fn external_files_note(
    store: &Store,
    tree: &v1::Tree,
    manifest: &TreeManifest,
    elsewhere: &BTreeSet<String>,
) -> Option<String> {
    let place = format!("{}/{}", store.url(), tree.path);
    let origin = manifest.hub_revision().map_or_else(String::new, |revision| {
        format!(" (the hub's {}@{})", revision.repo, revision.commit)
    });
    (!elsewhere.is_empty()).then(|| {
        format!(
            "{} files of the base {place} are not in the store, as it was submitted; agents get \
             them from other sources{origin}",
            elsewhere.len()
        )
    })
}

/// Returns the files of a tree that have no defect and are in the store, and its `B3SUMS` file
/// under the same conditions.
fn hashable_objects<'a>(
    store: &Store,
    origin: &'a FactReference,
    tree: &'a v1::Tree,
    manifest: TreeManifest,
    VerifyReport { defects: flaws, external: elsewhere, .. }: &VerifyReport,
) -> Vec<HashTarget<'a>> {
    let flawed: BTreeSet<&str> = flaws.iter().map(|flaw| flaw.url.as_str()).collect();
    let is_whole = |name: &str| {
        let url = format!("{}/{}/{name}", store.url(), tree.path);
        !flawed.contains(url.as_str()) && !elsewhere.contains(name)
    };
    let files = manifest.files.iter().filter(|file| is_whole(file.path.as_str()));
    let mut objects: Vec<_> =
        files.map(|file| HashTarget::File(origin, tree, file.clone())).collect();
    if is_whole("B3SUMS") {
        objects.push(HashTarget::Sums(origin, tree, manifest));
    }
    objects
}

/// Adds a finding for each object whose content is wrong.
async fn check_bytes(
    store: &Store,
    objects: Vec<HashTarget<'_>>,
    watch: ProgressCallback<'_>,
    report: &mut AuditReport,
) -> Result<(), GetError> {
    let total = objects.iter().map(HashTarget::hashed_bytes).sum();
    let done = AtomicU64::new(0);
    let seen = |bytes: u64| {
        let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        watch(TaskProgress { unit: "bytes", done, total });
    };
    let hashes: Vec<_> = objects.iter().map(|object| hash_object(store, object, &seen)).collect();
    let mut hashes = stream::iter(hashes).buffered(CONCURRENT_HASHES);
    while let Some(hashed) = hashes.next().await {
        if let Some(finding) = hashed? {
            report.add_finding(finding);
        }
    }
    Ok(())
}

impl HashTarget<'_> {
    fn fact_reference(&self) -> &FactReference {
        match self {
            Self::File(origin, ..) | Self::Sums(origin, ..) | Self::Blob(origin, _) => origin,
        }
    }

    fn hashed_bytes(&self) -> u64 {
        match self {
            Self::File(_, _, file) => file.bytes,
            // A few lines, too small to count.
            Self::Sums(..) => 0,
            Self::Blob(_, blob) => blob.bytes,
        }
    }
}
