//! Looks at a directory again and again, takes hold of what is complete, and hands it out, in
//! the order of its steps, once nothing has changed for a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    files::{self, Content},
    readiness::{Checkpoint, Listing, Peeks, Verdict, has_ranks, judge, may_be_complete},
    scan,
    stage::{Held, Stage, stamp},
    trainer_state::TrainerState,
};

const MEMORY: &str = "watch.json";

/// Checkpoints in hand at once: while the store is away, what the trainer rotated away still
/// takes its room on the disk.
const HELD_MAX: usize = 32;

/// A directory that stays incomplete for so long is worth a word.
const ABANDONED: Duration = Duration::from_secs(120);

/// A look this close behind a change may have come before it, for all the clock's grain tells.
const GRAIN: Duration = Duration::from_secs(2);

/// How long nothing may have changed.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// After one process wrote here.
    pub quiet: Duration,
    /// After several did, or from elsewhere.
    pub quiet_apart: Duration,
    /// Whether the directory is on another machine.
    pub elsewhere: bool,
}

/// What must survive an agent: which run this is, and what of the directory is dealt with. What
/// the run holds, the log knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    pub run: Option<String>,
    /// What the user called it.
    pub name: String,
    /// When its first checkpoint was found, in nanoseconds since 1970.
    pub begun_ns: Option<u64>,
    /// What its first adapter called its base.
    pub base_name: Option<String>,
    /// Saves that need no second look.
    pub seen: BTreeMap<u32, String>,
}

/// One watched directory.
pub struct Lookout {
    directory: PathBuf,
    fallback: PathBuf,
    policy: Policy,
    stage: Option<Stage>,
    memory: Memory,
    sights: BTreeMap<u32, Sight>,
    /// Since when.
    held: BTreeMap<u32, (Held, Instant)>,
    /// Gone before they were complete or in hand.
    rotated: BTreeSet<u32>,
}

struct Sight {
    listing: Listing,
    since: Instant,
    /// The last verdict's reason, and whether it was told.
    why: Option<String>,
    told: bool,
    hopeless: bool,
}

impl Lookout {
    /// Goes on where an earlier one ended. `fallback` is where checkpoints are kept if the
    /// directory cannot be written.
    ///
    /// # Errors
    /// When another agent watches the directory, or what was left here cannot be used.
    pub fn open(directory: &Path, fallback: &Path, policy: Policy) -> anyhow::Result<Self> {
        let mut lookout = Self {
            directory: directory.to_owned(),
            fallback: fallback.to_owned(),
            policy,
            stage: Stage::find(directory, fallback)?,
            memory: Memory::default(),
            sights: BTreeMap::new(),
            held: BTreeMap::new(),
            rotated: BTreeSet::new(),
        };
        if let Some(stage) = &lookout.stage {
            lookout.memory = stage.read(MEMORY).unwrap_or_default();
            let now = Instant::now();
            lookout.held = stage.held()?.into_iter().map(|held| (held.step, (held, now))).collect();
        }
        Ok(lookout)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// # Errors
    /// When it cannot be written.
    pub fn remember(&mut self, change: impl FnOnce(&mut Memory)) -> anyhow::Result<()> {
        change(&mut self.memory);
        let memory = self.memory.clone();
        Ok(self.stage()?.write(MEMORY, &memory)?)
    }

    /// Only now is anything written below the directory: some training scripts insist on an
    /// empty one.
    fn stage(&mut self) -> anyhow::Result<&Stage> {
        if self.stage.is_none() {
            self.stage = Some(Stage::create(&self.directory, &self.fallback)?);
        }
        self.stage.as_ref().ok_or_else(|| anyhow::anyhow!("created above (X101)"))
    }

    /// One look at everything.
    ///
    /// # Errors
    /// When another agent watches the directory.
    pub fn look(&mut self, now: Instant) -> anyhow::Result<()> {
        let found = match scan::checkpoints(&self.directory) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, directory = %self.directory.display(), "looking");
                return Ok(());
            }
        };
        self.note_rotated(&found.iter().map(|(step, _)| *step).collect());
        for (step, path) in found {
            match self.look_at(step, &path, now) {
                Ok(()) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn note_rotated(&mut self, there: &BTreeSet<u32>) {
        let gone: Vec<u32> =
            self.sights.keys().filter(|step| !there.contains(step)).copied().collect();
        for step in gone {
            self.sights.remove(&step);
            if !self.held.contains_key(&step) && !self.memory.seen.contains_key(&step) {
                self.rotated.insert(step);
                tracing::warn!(step, count = self.rotated.len(), "rotated before publish");
            }
        }
    }

    fn look_at(&mut self, step: u32, path: &Path, now: Instant) -> anyhow::Result<()> {
        let listing = scan::list(path)?;
        if self.memory.seen.get(&step).is_some_and(|seen| *seen == stamp(&listing)) {
            self.sights.remove(&step);
            return Ok(());
        }
        if let Some((held, _)) = self.held.get(&step) {
            if self.stage.as_ref().is_some_and(|stage| stage.is_unchanged(held, path)) {
                return Ok(());
            }
            tracing::info!(step, "changed after it was complete; looking again");
            self.release(step)?;
        }
        let sight = self.sights.entry(step).or_insert_with(|| Sight::new(now));
        if sight.listing != listing {
            *sight = Sight { listing: listing.clone(), ..Sight::new(now) };
        } else if now.duration_since(sight.since) > GRAIN && sight.why.is_some() {
            sight.tell(step, now);
            return Ok(());
        }
        let worth = may_be_complete(&listing);
        let peeks = if worth { scan::peeks(path, &listing) } else { Peeks::new() };
        match judge(step, &listing, &peeks) {
            Verdict::Ready(checkpoint) => self.take(step, path, &listing, &checkpoint, now)?,
            Verdict::NotYet(why) => self.note(step, why, false, now),
            Verdict::Broken(why) => self.note(step, why, true, now),
        }
        Ok(())
    }

    fn note(&mut self, step: u32, why: String, hopeless: bool, now: Instant) {
        if let Some(sight) = self.sights.get_mut(&step) {
            (sight.why, sight.hopeless) = (Some(why), hopeless);
            sight.tell(step, now);
        }
    }

    fn take(
        &mut self,
        step: u32,
        path: &Path,
        listing: &Listing,
        checkpoint: &Checkpoint,
        now: Instant,
    ) -> anyhow::Result<()> {
        if self.held.len() >= HELD_MAX {
            let why = format!("{HELD_MAX} others wait to be published");
            self.note(step, why, false, now);
            return Ok(());
        }
        match self.stage()?.take(step, path, listing, checkpoint) {
            Ok(Some(held)) => {
                tracing::debug!(step, "in hand");
                self.held.insert(step, (held, now));
            }
            // It is looked at again.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.note(step, format!("cannot be taken: {error}"), true, now),
        }
        Ok(())
    }

    /// The next checkpoint to publish, in the order of steps.
    pub fn next(&self, now: Instant) -> Option<Held> {
        let (held, since) = self.held.values().next()?;
        let apart = self.policy.elsewhere || held.ranks || has_ranks(&held.source);
        let quiet = if apart { self.policy.quiet_apart } else { self.policy.quiet };
        (now.duration_since(*since) >= quiet).then(|| held.clone())
    }

    /// Whether anything waits to be quiet for long enough.
    pub fn holds_any(&self) -> bool {
        !self.held.is_empty()
    }

    /// Checkpoints that were gone before they were in hand.
    pub fn rotated(&self) -> usize {
        self.rotated.len()
    }

    /// Why the newest checkpoint that cannot be published cannot.
    pub fn trouble(&self) -> Option<String> {
        let hopeless = |(step, sight): (&u32, &Sight)| {
            let why = sight.why.as_ref().filter(|_| sight.hopeless)?;
            Some(format!("checkpoint-{step}: {why}"))
        };
        self.sights.iter().rev().find_map(hopeless)
    }

    /// Whether what is in hand is still what was taken.
    pub fn is_unchanged(&self, held: &Held) -> bool {
        let source = self.directory.join(format!("checkpoint-{}", held.step));
        self.stage.as_ref().is_some_and(|stage| stage.is_unchanged(held, &source))
    }

    /// The files of a checkpoint in hand, with nothing in them that only this box knows.
    ///
    /// # Errors
    /// When its settings cannot be written.
    pub fn files(&self, held: &Held, base: Option<&str>) -> anyhow::Result<PathBuf> {
        let stage =
            self.stage.as_ref().ok_or_else(|| anyhow::anyhow!("nothing is in hand (X101)"))?;
        let directory = stage.files(held.step);
        let name = match held.content {
            Content::Adapter => files::ADAPTER_CONFIG,
            Content::Model => files::CONFIG,
        };
        let written: Map<String, Value> =
            serde_json::from_slice(&std::fs::read(directory.join(name))?)?;
        let mut settings = written.clone();
        forget_paths(&mut settings, base);
        if settings != written {
            stage.write_settings(held.step, name, &serde_json::to_vec_pretty(&settings)?)?;
        }
        Ok(directory)
    }

    pub fn trainer_state(&self, held: &Held) -> Option<TrainerState> {
        self.stage.as_ref()?.trainer_state(held.step)
    }

    /// Lets go of a checkpoint that is dealt with.
    ///
    /// # Errors
    /// When that cannot be remembered.
    pub fn finish(&mut self, held: &Held) -> anyhow::Result<()> {
        self.remember(|memory| drop(memory.seen.insert(held.step, held.stamp())))?;
        self.release(held.step)
    }

    /// Lets go of a checkpoint; if it is still there, it is looked at again.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn release(&mut self, step: u32) -> anyhow::Result<()> {
        self.held.remove(&step);
        self.sights.remove(&step);
        Ok(self.stage()?.drop(step)?)
    }
}

impl Sight {
    fn new(since: Instant) -> Self {
        Self { listing: Listing::new(), since, why: None, told: false, hopeless: false }
    }

    /// Once: at once what will not mend itself, and after a while what has not.
    fn tell(&mut self, step: u32, now: Instant) {
        let due = self.hopeless || now.duration_since(self.since) > ABANDONED;
        if let Some(why) = self.why.as_ref().filter(|_| due && !self.told) {
            tracing::warn!(step, why, "a checkpoint is not published");
            self.told = true;
        }
    }
}

/// Paths of this box mean nothing elsewhere, and are nobody's business there.
fn forget_paths(settings: &mut Map<String, Value>, base: Option<&str>) {
    if let (Some(base), Some(name)) = (base, settings.get_mut("base_model_name_or_path")) {
        *name = base.into();
    }
    let is_path =
        |value: &Value| value.as_str().is_some_and(|name| name.starts_with(['/', '.', '~']));
    if settings.get("_name_or_path").is_some_and(is_path) {
        settings.remove("_name_or_path");
    }
}

/// A directory may be removed at any moment of a look at it.
fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
    })
}
