//! Publishes what a lookout has in hand: files first, then the fact, in the order of steps.
//!
//! Any moment may be the last: what is in hand stays there, what the log has is not written
//! again, and a run that was begun is found again.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use bus::{Bus, Followed};
use futures::{StreamExt, future::BoxFuture};
use runtime::Side;
use serde_json::json;
use store::{About, Cache, Store, TreePlace};
use wire::{AgentId, Body, Fact, Place, RunId, Subject, v1};

use crate::{
    base,
    files::Content,
    hints::Hints,
    lookout::{Lookout, Memory, Policy},
    scan,
    stage::{Held, TakenError},
};

/// Between two looks that nothing gave a hint for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A save is many events; one look does for those of a moment.
const GATHER: Duration = Duration::from_millis(100);

/// While something waits to be quiet for long enough.
const LOOK_SOON: Duration = Duration::from_millis(250);

/// Between two questions whether the run is over.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// After something went wrong that may pass.
const PAUSE: Duration = Duration::from_secs(5);

/// Nothing may have been written for so long, …
const QUIET: Duration = Duration::from_secs(2);

/// … or, where several processes write or the directory is on another machine, for so long.
const QUIET_APART: Duration = Duration::from_secs(10);

/// What a watcher must know.
#[derive(Debug, Clone)]
pub struct Config {
    pub directory: PathBuf,
    /// Where checkpoints are kept if the directory cannot be written.
    pub fallback: PathBuf,
    pub agent: AgentId,
    /// What its runs are called.
    pub name: String,
    /// Whether the user named the adapters' base.
    pub base_given: bool,
    /// The last step, where training may end before it planned to.
    pub until: Option<u32>,
}

/// What is known of a run that is to begin.
#[derive(Debug, Clone)]
pub struct Finding {
    /// Since 1970; the same for the same run.
    pub at: Duration,
    /// The model its adapters belong to, unless the user named it.
    pub base: Option<PathBuf>,
}

/// Writes a run's spec, or finds the run that it wrote before.
pub type Begin = Arc<dyn Fn(Finding) -> BoxFuture<'static, anyhow::Result<RunId>> + Send + Sync>;

/// The run as the log has it.
struct Run {
    id: RunId,
    base: Option<v1::Tree>,
    steps: BTreeSet<u32>,
    /// Where training said last that it ends; 0 before it did.
    planned: u32,
    over: Option<v1::Done>,
    asked: Option<Instant>,
}

struct Watcher {
    config: Config,
    bus: Bus,
    store: Store,
    cache: Cache,
    begin: Begin,
    lookout: Lookout,
    run: Option<Run>,
}

/// Watches until the run is over, which is the answer, or until stopped.
///
/// # Errors
/// When another agent watches the directory.
pub async fn watch(
    config: Config,
    bus: Bus,
    (store, cache): (Store, Cache),
    begin: Begin,
    side: Side,
) -> anyhow::Result<Option<v1::Done>> {
    let elsewhere = is_elsewhere(&config.directory);
    let policy = Policy { quiet: QUIET, quiet_apart: QUIET_APART, elsewhere };
    let lookout = Lookout::open(&config.directory, &config.fallback, policy)?;
    let mut hints = Hints::new(elsewhere);
    let directory = config.directory.display().to_string();
    tracing::info!(directory, elsewhere, "watching");
    let stop = side.stop.clone();
    let mut watcher = Watcher { config, bus, store, cache, begin, lookout, run: None };
    stop.run_until_cancelled(watcher.remember_run()).await;
    loop {
        let Some(outcome) = stop.run_until_cancelled(watcher.turn(&mut hints)).await else {
            return Ok(None);
        };
        let (trouble, pause) = match outcome {
            Ok(()) if watcher.lookout.holds_any() => (watcher.lookout.trouble(), LOOK_SOON),
            Ok(()) => (watcher.lookout.trouble(), LOOK_EVERY),
            Err(error) if error.is::<TakenError>() => return Err(error),
            Err(error) => (Some(format!("{error:#}")), PAUSE),
        };
        side.account.trouble(trouble);
        watcher.account(&side);
        if let Some(done) = watcher.run.as_mut().and_then(|run| run.over.take()) {
            return Ok(Some(done));
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = hints.heard() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Watcher {
    /// Finds the run that an earlier agent began, unless it is over, another fleet's, or called
    /// otherwise: then what comes next begins a new one.
    async fn remember_run(&mut self) {
        let Memory { run: Some(id), name, .. } = self.lookout.memory().clone() else { return };
        while let Err(error) = self.try_remember(&id, &name).await {
            tracing::warn!(error = format!("{error:#}"), "looking for the run of this directory");
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn try_remember(&mut self, id: &str, name: &str) -> anyhow::Result<()> {
        let known = match RunId::new(id) {
            Ok(id) if name == self.config.name => self.read_run(id).await?,
            _ => None,
        };
        match known {
            Some(run) if run.over.is_none() => {
                tracing::info!(run = %run.id, checkpoints = run.steps.len(), "going on");
                self.run = Some(run);
                Ok(())
            }
            // What its run has, or was not meant to have, is no reason for another.
            Some(over) => {
                tracing::info!(run = %over.id, "is over; the next new checkpoint begins another");
                self.lookout.remember(|memory| {
                    *memory =
                        Memory { seen: std::mem::take(&mut memory.seen), ..Memory::default() };
                })
            }
            None => self.lookout.remember(|memory| *memory = Memory::default()),
        }
    }

    /// A run as far as it matters here. `None` when the log has none of that name.
    async fn read_run(&self, id: RunId) -> anyhow::Result<Option<Run>> {
        let filters =
            ["spec", "checkpoint.0.*", "done"].map(|kind| format!("flotilla.{id}.{kind}"));
        let mut facts = self.bus.follow(filters.to_vec(), 0);
        let mut spec = None;
        let mut run =
            Run { id, base: None, steps: BTreeSet::new(), planned: 0, over: None, asked: None };
        while let Some(followed) = facts.next().await {
            match followed? {
                Followed::CaughtUp => break,
                Followed::Unreadable { .. } => {}
                Followed::Record(record) => match record.fact.body {
                    Body::Spec(found) => spec = Some(found),
                    Body::Checkpoint(checkpoint) => {
                        run.planned = checkpoint.steps;
                        run.steps.insert(checkpoint.step);
                    }
                    Body::Done(done) => run.over = Some(done),
                    _ => {}
                },
            }
        }
        let Some(spec) = spec else { return Ok(None) };
        run.base = spec.base.and_then(|base| base.tree);
        Ok(Some(run))
    }

    fn account(&self, side: &Side) {
        let Some(run) = &self.run else { return };
        let gone = match self.lookout.rotated() {
            0 => String::new(),
            count => format!(", {count} rotated before publish"),
        };
        let note = format!("{} published{gone}", run.steps.len());
        let last = run.steps.last().copied().unwrap_or(0);
        side.account.job(run.id.as_str(), last, run.planned, &note);
    }

    /// One look, and whatever is ready published.
    async fn turn(&mut self, hints: &mut Hints) -> anyhow::Result<()> {
        let directory = self.config.directory.clone();
        let lookout = &mut self.lookout;
        tokio::task::block_in_place(|| {
            hints.listen(&directory, &scan::checkpoints(&directory).unwrap_or_default());
            lookout.look(Instant::now())
        })?;
        while let Some(held) = self.lookout.next(Instant::now()) {
            let step = held.step;
            self.publish(held).await.with_context(|| format!("publish checkpoint-{step}"))?;
        }
        self.notice_end().await
    }

    async fn notice_end(&mut self) -> anyhow::Result<()> {
        let recent = |asked: Instant| asked.elapsed() < ASK_EVERY;
        let Some(run) = self.run.as_mut().filter(|run| !run.asked.is_some_and(recent)) else {
            return Ok(());
        };
        run.asked = Some(Instant::now());
        let done = self.bus.get(&Subject::new(&run.id, Place::Done).to_string()).await?;
        run.over = done.and_then(|record| match record.fact.body {
            Body::Done(done) => Some(done),
            _ => None,
        });
        Ok(())
    }

    async fn publish(&mut self, held: Held) -> anyhow::Result<()> {
        self.notice_end().await?;
        if self.run.as_ref().is_some_and(|run| run.over.is_some()) {
            // It stays in hand: the next agent's first.
            return Ok(());
        }
        if self.run.is_none() {
            self.begin(&held).await?;
        }
        let Some(run) = &self.run else { return Ok(()) };
        if let Some(why) = self.unfit(run, &held) {
            tracing::warn!(step = held.step, why, "a checkpoint is not published");
            return self.lookout.finish(&held);
        }
        let base = run.base.clone();
        let about = |tree: &v1::Tree| tree.manifest.clone();
        let files = self.lookout.files(&held, base.as_ref().map(about).as_deref())?;
        if run.steps.contains(&held.step) {
            self.compare(&run.id, &held, &files).await?;
            return self.lookout.finish(&held);
        }
        if !self.lookout.is_unchanged(&held) {
            return self.lookout.release(held.step);
        }
        let mut checkpoint = self.describe(run, &held);
        let place = TreePlace::checkpoint(&run.id, 0, held.step);
        let about = about_of(&checkpoint);
        let tree = self.cache.publish_tree(&self.store, &files, &place, about).await?;
        // Hashed meanwhile, and therefore now: what was written to is another checkpoint.
        if !self.lookout.is_unchanged(&held) {
            tracing::info!(step = held.step, "changed while it was published; looking again");
            return self.lookout.release(held.step);
        }
        checkpoint.tree = Some(tree);
        let subject = Subject::new(&run.id, Place::Checkpoint { cycle: 0, step: held.step });
        let fact = Fact { subject, body: Body::Checkpoint(checkpoint.clone()) };
        self.bus.publish(&fact).await?;
        let v1::Checkpoint { step, steps, loss, r#final, .. } = checkpoint;
        tracing::info!(run = %run.id, step, steps, loss, last = r#final, "published");
        if let Some(run) = &mut self.run {
            run.planned = steps;
            run.steps.insert(held.step);
        }
        self.lookout.finish(&held)
    }

    /// Begins the run, now that there is something of which it is known what it stands on.
    async fn begin(&mut self, held: &Held) -> anyhow::Result<()> {
        let needs_base = held.content == Content::Adapter && !self.config.base_given;
        let base = match (needs_base, &held.base_name) {
            (false, _) => None,
            (true, Some(name)) => Some(base::find(name, &self.config.directory)?),
            (true, None) => {
                anyhow::bail!(
                    "the adapter names no base; pass its directory by --watch-base (R116)"
                )
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = self.config.name.clone();
        self.lookout.remember(|memory| {
            memory.name = name;
            memory.begun_ns.get_or_insert(u64::try_from(now.as_nanos()).unwrap_or(0));
            memory.base_name.clone_from(&held.base_name);
        })?;
        let at = Duration::from_nanos(self.lookout.memory().begun_ns.unwrap_or_default());
        let id = (self.begin)(Finding { at, base }).await?;
        self.lookout.remember(|memory| memory.run = Some(id.to_string()))?;
        let run = self.read_run(id.clone()).await?;
        self.run = Some(run.with_context(|| format!("the log has lost the spec of {id}"))?);
        tracing::info!(run = %id, directory = %self.config.directory.display(), "began");
        Ok(())
    }

    /// Why a checkpoint does not belong to the run, if so.
    fn unfit(&self, run: &Run, held: &Held) -> Option<String> {
        if held.content == Content::Model {
            return None;
        }
        if run.base.is_none() {
            return Some(format!("it is an adapter, but {} began with whole models", run.id));
        }
        let first = &self.lookout.memory().base_name;
        let differs = !self.config.base_given && held.base_name != *first;
        differs.then(|| {
            let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "none".into());
            let (own, first) = (name(&held.base_name), name(first));
            format!("it names the base {own:?}, {} began with {first:?}", run.id)
        })
    }

    /// What a checkpoint's fact says, but for where it is.
    fn describe(&self, run: &Run, held: &Held) -> v1::Checkpoint {
        let state = self.lookout.trainer_state(held);
        let before = run.steps.range(..held.step).next_back().copied().unwrap_or(0);
        let figures = state.as_ref().map(|state| state.figures(before)).unwrap_or_default();
        let planned = state.as_ref().and_then(|state| state.max_steps());
        let (steps, last) = extent(held.step, planned, self.config.until);
        let content = match held.content {
            Content::Adapter => v1::checkpoint::Content::Adapter,
            Content::Model => v1::checkpoint::Content::Model,
        };
        v1::Checkpoint {
            run: run.id.to_string(),
            cycle: 0,
            step: held.step,
            steps,
            r#final: last,
            content: content.into(),
            base: run.base.clone().filter(|_| held.content == Content::Adapter),
            parent: run.base.clone(),
            loss: figures.loss.unwrap_or(f64::NAN),
            learning_rate: figures.learning_rate,
            tokens: figures.tokens,
            agent: self.config.agent.to_string(),
            ..Default::default()
        }
    }

    /// Says so when a step the run has was saved again with other bytes: the first counts.
    async fn compare(&self, run: &RunId, held: &Held, files: &Path) -> anyhow::Result<()> {
        let place = Place::Checkpoint { cycle: 0, step: held.step };
        let record = self.bus.get(&Subject::new(run, place).to_string()).await?;
        let Some(Body::Checkpoint(checkpoint)) = record.map(|record| record.fact.body) else {
            return Ok(());
        };
        let tree = checkpoint.tree.context("its fact names no tree")?;
        let manifest = self.store.manifest(&tree).await?;
        for file in &manifest.files {
            let path = files.join(file.path.as_str());
            let digest = tokio::task::spawn_blocking(move || digest(&path)).await?;
            if !digest.is_ok_and(|digest| digest == file.digest) {
                let file = file.path.as_str();
                tracing::warn!(
                    %run, step = held.step, file,
                    "was saved again, differently; the run keeps what it has. A training that \
                     starts over is another run: cancel this one and start the agent again"
                );
                break;
            }
        }
        Ok(())
    }
}

/// Where training ends as far as is known (0: it is not), and whether it has.
fn extent(step: u32, planned: Option<u32>, until: Option<u32>) -> (u32, bool) {
    let steps = match (planned, until) {
        (Some(planned), Some(until)) => planned.min(until),
        (known, None) | (None, known) => known.unwrap_or(0),
    };
    let last = steps > 0 && step >= steps;
    (if last { step } else { steps }, last)
}

fn digest(path: &Path) -> std::io::Result<wire::Digest> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(path)?)?;
    Ok(hasher.finalize().into())
}

/// What a checkpoint is, whoever found it and whatever the run is called.
fn about_of(checkpoint: &v1::Checkpoint) -> About {
    let v1::Checkpoint { cycle, step, steps, parent, .. } = checkpoint;
    let adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
    let entries = [
        ("content", json!(if adapter { "adapter" } else { "model" })),
        ("base", json!(parent.as_ref().map(|tree| tree.manifest.clone()))),
        ("cycle", json!(cycle)),
        ("step", json!(step)),
        ("steps", json!(steps)),
    ];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

/// File systems of other machines: their events do not come here and their times are coarse.
#[cfg(target_os = "linux")]
fn is_elsewhere(directory: &Path) -> bool {
    const NFS: i64 = 0x6969;
    const SMB: i64 = 0x517b;
    const CIFS: i64 = 0xff53_4d42;
    const SMB2: i64 = 0xfe53_4d42;
    const FUSE: i64 = 0x6573_5546;
    const CEPH: i64 = 0x00c3_6400;
    const NINE_P: i64 = 0x0102_1997;
    // A directory that is yet to be made will be where its parent is.
    let there = directory.ancestors().find(|place| place.exists());
    let kind = there.and_then(|place| rustix::fs::statfs(place).ok()).map(|found| found.f_type);
    // 32 bits that some systems extend by their sign.
    kind.is_some_and(|kind| {
        [NFS, SMB, CIFS, SMB2, FUSE, CEPH, NINE_P].contains(&(kind & 0xffff_ffff))
    })
}

#[cfg(not(target_os = "linux"))]
fn is_elsewhere(_directory: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_ends_where_it_planned_to_or_where_the_user_says() {
        assert_eq!(extent(10, Some(30), None), (30, false));
        assert_eq!(extent(30, Some(30), None), (30, true));
        assert_eq!(extent(10, None, None), (0, false), "nobody knows");
        assert_eq!(extent(20, Some(30), Some(20)), (20, true));
        assert_eq!(extent(25, Some(30), Some(20)), (25, true), "the first behind it is the last");
        assert_eq!(extent(20, None, Some(25)), (25, false));
    }
}
