//! What a run's facts name, looked up in the store: names and sizes, lineage as the manifests
//! tell it, and, when asked, every byte.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use serde_json::{Value, json};
use store::{Examined, Flaw, GetError, Manifest, Store, TreeFile};
use wire::{Body, Record, v1};

use super::{AuditReport, Depth, Finding, Progress, Watch, Where, explain};

/// Requests for names and sizes at once.
const LOOKS_AT_ONCE: usize = 8;

/// Files hashed at once; each holds at most a few parts of 16 MiB.
const HASHES_AT_ONCE: usize = 2;

/// What a look at names and sizes may take: a store that is away is waited for elsewhere.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// What a run's facts say the store holds, each with the fact that says so first.
#[derive(Debug, Default)]
pub(super) struct Held {
    trees: BTreeMap<String, HeldTree>,
    blobs: BTreeMap<String, HeldBlob>,
    /// What each cycle trains on.
    datasets: BTreeMap<u32, String>,
    watched: bool,
}

#[derive(Debug, Clone)]
struct Origin {
    subject: String,
    sequence: u64,
}

/// What a manifest must say of its tree.
type About = Vec<(&'static str, Value)>;

impl Held {
    pub(super) fn take(&mut self, record: &Record) {
        match &record.fact.body {
            Body::Spec(spec) => self.spec(record, spec),
            Body::Selected(selected) => {
                if let Some(dataset) = &selected.dataset {
                    self.datasets.insert(selected.cycle, dataset.digest.clone());
                }
                // Nothing trains on an empty selection.
                self.blob(record, selected.dataset.as_ref().filter(|_| selected.kept > 0));
            }
            Body::Checkpoint(checkpoint) => {
                let about = self.about(checkpoint);
                self.tree(record, checkpoint.tree.as_ref(), about);
                self.tree(record, checkpoint.base.as_ref(), About::new());
                self.tree(record, checkpoint.parent.as_ref(), About::new());
            }
            Body::Archived(archived) => self.tree(record, archived.tree.as_ref(), About::new()),
            _ => {}
        }
    }

    fn spec(&mut self, record: &Record, spec: &v1::Spec) {
        let base = spec.base.as_ref().and_then(|base| base.tree.as_ref());
        self.tree(record, base, About::new());
        for suite in &spec.suites {
            self.blob(record, suite.text.as_ref());
        }
        match &spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => {
                raft.prompt_sets().for_each(|set| self.blob(record, set.file));
            }
            Some(v1::spec::Kind::Sft(sft)) => {
                self.datasets.extend(sft.dataset.as_ref().map(|blob| (0, blob.digest.clone())));
                self.blob(record, sft.dataset.as_ref());
            }
            Some(v1::spec::Kind::Watched(_)) => self.watched = true,
            None => {}
        }
    }

    /// What a trainer writes of a checkpoint; nothing for a base that was adopted.
    fn about(&self, checkpoint: &v1::Checkpoint) -> About {
        let v1::Checkpoint { cycle, step, steps, base, parent, .. } = checkpoint;
        let adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
        if self.watched {
            let content = if adapter { "adapter" } else { "model" };
            let base = parent.as_ref().map(|base| base.manifest.as_str());
            let entries = [("content", json!(content)), ("base", json!(base))];
            let numbers = [("cycle", json!(cycle)), ("step", json!(step)), ("steps", json!(steps))];
            return entries.into_iter().chain(numbers).collect();
        }
        let Some(parent) = parent else { return About::new() };
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

    fn tree(&mut self, record: &Record, tree: Option<&v1::Tree>, about: About) {
        let Some(tree) = tree else { return };
        // Two places may hold the same content; both must be whole.
        let key = format!("{} {}", tree.path, tree.manifest);
        let new = || (Origin::of(record), tree.clone(), About::new());
        let known = self.trees.entry(key).or_insert_with(new);
        if !about.is_empty() {
            known.2 = about;
        }
    }

    fn blob(&mut self, record: &Record, blob: Option<&v1::Blob>) {
        let Some(blob) = blob else { return };
        let new = || (Origin::of(record), blob.clone());
        self.blobs.entry(blob.digest.clone()).or_insert_with(new);
    }
}

impl Origin {
    fn of(record: &Record) -> Self {
        Self { subject: record.fact.subject.to_string(), sequence: record.sequence }
    }

    fn finding(&self, flaw: Flaw) -> Finding {
        let Flaw { url, what, expected, found } = flaw;
        Finding {
            place: Where::Store,
            what: what.to_owned(),
            subject: Some(self.subject.clone()),
            sequence: Some(self.sequence),
            url: Some(url),
            expected,
            found,
        }
    }
}

/// One object to hash.
enum Object<'a> {
    File(&'a Origin, &'a v1::Tree, TreeFile),
    Sums(&'a Origin, &'a v1::Tree, Manifest),
    Blob(&'a Origin, &'a v1::Blob),
}

/// Looks until all is seen, or the store cannot be asked.
pub(super) async fn check(
    store: &Store,
    held: &Held,
    depth: Depth,
    watch: Watch<'_>,
    report: &mut AuditReport,
) {
    let whole = match files(store, held, watch, report).await {
        Ok(whole) => whole,
        Err(error) => return report.not_checked.push(format!("files: {error}")),
    };
    report.checked.push("files");
    if depth < Depth::Bytes {
        return;
    }
    match bytes(store, whole, watch, report).await {
        Ok(()) => report.checked.push("bytes"),
        Err(error) => report.not_checked.push(format!("bytes: {}", explain(&error))),
    }
}

/// Names, sizes and manifests. The answer is what is there with the right size.
async fn files<'a>(
    store: &'a Store,
    held: &'a Held,
    watch: Watch<'_>,
    report: &mut AuditReport,
) -> Result<Vec<Object<'a>>, String> {
    let total = (held.trees.len() + held.blobs.len()) as u64;
    let mut done = 0;
    let mut whole = Vec::new();
    let trees: Vec<_> = held.trees.values().map(|tree| look_at_tree(store, tree)).collect();
    let mut trees = stream::iter(trees).buffered(LOOKS_AT_ONCE);
    while let Some(looked) = in_time(trees.next()).await? {
        let (origin, tree, about, examined) = looked.map_err(|error| explain(&error))?;
        if let Some(manifest) = examined.manifest.clone() {
            lineage(store, tree, &manifest, about)
                .into_iter()
                .for_each(|flaw| report.find(origin.finding(flaw)));
            report.notes.extend(note(store, tree, &manifest, &examined.elsewhere));
            whole.extend(unflawed(store, origin, tree, manifest, &examined));
        }
        examined.flaws.into_iter().for_each(|flaw| report.find(origin.finding(flaw)));
        done += 1;
        watch(Progress { unit: "files", done, total });
    }
    let blobs: Vec<_> = held.blobs.values().map(|blob| look_at_blob(store, blob)).collect();
    let mut blobs = stream::iter(blobs).buffered(LOOKS_AT_ONCE);
    while let Some(looked) = in_time(blobs.next()).await? {
        match looked.map_err(|error| explain(&error))? {
            (origin, _, Some(flaw)) => report.find(origin.finding(flaw)),
            (origin, blob, None) => whole.push(Object::Blob(origin, blob)),
        }
        done += 1;
        watch(Progress { unit: "files", done, total });
    }
    Ok(whole)
}

type HeldTree = (Origin, v1::Tree, About);
type HeldBlob = (Origin, v1::Blob);
type Look<'a, T> = BoxFuture<'a, Result<T, GetError>>;

fn look_at_tree<'a>(
    store: &'a Store,
    (origin, tree, about): &'a HeldTree,
) -> Look<'a, (&'a Origin, &'a v1::Tree, &'a About, Examined)> {
    async move { Ok((origin, tree, about, store.examine_tree(tree).await?)) }.boxed()
}

fn look_at_blob<'a>(
    store: &'a Store,
    (origin, blob): &'a HeldBlob,
) -> Look<'a, (&'a Origin, &'a v1::Blob, Option<Flaw>)> {
    async move { Ok((origin, blob, store.examine_blob(blob).await?)) }.boxed()
}

fn hash<'a>(
    store: &'a Store,
    object: &'a Object<'_>,
    seen: store::Seen<'a>,
) -> Look<'a, Option<Finding>> {
    let hashed = async move {
        let flaw = match object {
            Object::File(_, tree, file) => store.hash_tree_file(tree, file, seen).await?,
            Object::Sums(_, tree, manifest) => store.hash_sums(tree, manifest).await?,
            Object::Blob(_, blob) => store.hash_blob(blob, seen).await?,
        };
        Ok(flaw.map(|flaw| object.origin().finding(flaw)))
    };
    hashed.boxed()
}

async fn in_time<T>(look: impl Future<Output = T>) -> Result<T, String> {
    let silent = |_| format!("the store did not answer within {LOOK_LIMIT:?}");
    tokio::time::timeout(LOOK_LIMIT, look).await.map_err(silent)
}

/// Where a manifest tells another story than the facts.
fn lineage(store: &Store, tree: &v1::Tree, manifest: &Manifest, about: &About) -> Vec<Flaw> {
    let differs = |(key, expected): &(&'static str, Value)| {
        let found = manifest.about.get(*key);
        let told = |value: &Value| format!("{key} {value}");
        (found != Some(expected)).then(|| Flaw {
            url: format!("{}/{}/manifest.json", store.url(), tree.path),
            what: "tells another lineage than the log",
            expected: Some(told(expected)),
            found: Some(found.map_or_else(|| format!("no {key}"), told)),
        })
    };
    about.iter().filter_map(differs).collect()
}

/// Says of a base that its files are not in the store because its user wanted it so.
fn note(
    store: &Store,
    tree: &v1::Tree,
    manifest: &Manifest,
    elsewhere: &BTreeSet<String>,
) -> Option<String> {
    let place = format!("{}/{}", store.url(), tree.path);
    let origin = manifest.revision().map_or_else(String::new, |revision| {
        format!(" (the hub's {}@{})", revision.repo, revision.commit)
    });
    (!elsewhere.is_empty()).then(|| {
        format!(
            "{} files of the base {place} are not in the store, as it was submitted; agents have \
             them from elsewhere{origin}",
            elsewhere.len()
        )
    })
}

fn unflawed<'a>(
    store: &Store,
    origin: &'a Origin,
    tree: &'a v1::Tree,
    manifest: Manifest,
    Examined { flaws, elsewhere, .. }: &Examined,
) -> Vec<Object<'a>> {
    let flawed: BTreeSet<&str> = flaws.iter().map(|flaw| flaw.url.as_str()).collect();
    let is_whole = |name: &str| {
        let url = format!("{}/{}/{name}", store.url(), tree.path);
        !flawed.contains(url.as_str()) && !elsewhere.contains(name)
    };
    let files = manifest.files.iter().filter(|file| is_whole(file.path.as_str()));
    let mut objects: Vec<_> = files.map(|file| Object::File(origin, tree, file.clone())).collect();
    if is_whole("B3SUMS") {
        objects.push(Object::Sums(origin, tree, manifest));
    }
    objects
}

async fn bytes(
    store: &Store,
    objects: Vec<Object<'_>>,
    watch: Watch<'_>,
    report: &mut AuditReport,
) -> Result<(), GetError> {
    let total = objects.iter().map(Object::bytes).sum();
    let done = AtomicU64::new(0);
    let seen = |bytes: u64| {
        let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        watch(Progress { unit: "bytes", done, total });
    };
    let hashes: Vec<_> = objects.iter().map(|object| hash(store, object, &seen)).collect();
    let mut hashes = stream::iter(hashes).buffered(HASHES_AT_ONCE);
    while let Some(hashed) = hashes.next().await {
        if let Some(finding) = hashed? {
            report.find(finding);
        }
    }
    Ok(())
}

impl Object<'_> {
    fn origin(&self) -> &Origin {
        match self {
            Self::File(origin, ..) | Self::Sums(origin, ..) | Self::Blob(origin, _) => origin,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::File(_, _, file) => file.bytes,
            // A few lines; not worth counting.
            Self::Sums(..) => 0,
            Self::Blob(_, blob) => blob.bytes,
        }
    }
}
