//! Fetching one file from the store and from peers at once, as the plan says.

use std::{
    collections::BTreeMap, fs::File, io, os::unix::fs::FileExt, path::Path as FsPath, sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt;
use object_store::{GetOptions, ObjectStore};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, MissedTickBehavior},
};

use super::{
    Entry, Peer, Peers,
    link::{Link, Useless},
    plan::{Plan, Source, Take},
    shelf::Said,
};
use crate::{
    error::{CacheError, GetError},
    location::Location,
    parts::Parts,
    store::{Store, Wanted, blocking},
};

/// Told by tasks and not heard yet.
const EVENTS_MAX: usize = 256;
/// The plan is asked again though nothing happened: somebody may have become impatient.
const TICK: Duration = Duration::from_millis(100);
/// Parts that came wrong from the store; bits flip on the way too.
const WRONG_MAX: u32 = 16;
/// Without the store, and without a part from a peer.
const PEERS_ALONE: Duration = Duration::from_secs(3);
/// Before a peer that waited for the file in vain is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

enum Event {
    Joined(usize, Link),
    Said(usize, Said),
    /// It is of no use any more.
    Left(usize, Useless),
    /// Written down, and right.
    Came(Source, usize),
    /// What a source sent was not the part.
    Wrong(Source, usize),
    Ended(Take, Result<(), Failure>),
}

enum Failure {
    Store(GetError),
    Peer(Useless),
    Disk(io::Error),
}

/// What the transfers of one file share.
#[derive(Clone)]
struct Job {
    at: Arc<Location>,
    wanted: Wanted,
    parts: Arc<Parts>,
    file: Arc<File>,
    tell: mpsc::Sender<Event>,
}

/// Fills a file of the right size whose parts are known. While the entry is held, peers can have
/// what came.
pub(crate) async fn fetch(
    peers: &Peers,
    store: &Store,
    (wanted, parts): (&Wanted, Arc<Parts>),
    file: File,
    at: &FsPath,
) -> Result<(File, Entry), GetError> {
    let failed = |source| GetError::from(CacheError::io("write", at, source));
    let entry = peers.inner.shelf.put(wanted.digest, parts.clone(), &file).map_err(failed)?;
    let (around, place) = peers.around().await;
    let (tell, hear) = mpsc::channel(EVENTS_MAX);
    let file = Arc::new(file);
    let job =
        Job { at: store.at.clone(), wanted: wanted.clone(), parts: parts.clone(), file, tell };
    let range = parts.range(0);
    let plan = Plan::new(parts.count(), range.end - range.start, place);
    let mut swarm = Swarm {
        peers: peers.clone(),
        job,
        plan,
        links: BTreeMap::new(),
        tasks: JoinSet::new(),
        around,
        began: Instant::now(),
        wrong: 0,
        of_peers: 0,
        failed: None,
    };
    swarm.run(hear, &entry, at).await?;
    let Swarm { job, of_peers, began, .. } = swarm;
    let (url, bytes, seconds) = (&wanted.url, wanted.bytes, began.elapsed().as_secs_f64());
    tracing::info!(url, bytes, of_peers, seconds, "fetched with peers");
    // Another handle than those of tasks that are being ended.
    let file = job.file.try_clone().map_err(failed)?;
    Ok((file, entry))
}

struct Swarm {
    peers: Peers,
    job: Job,
    plan: Plan,
    links: BTreeMap<usize, Link>,
    /// Ended with this.
    tasks: JoinSet<()>,
    around: Vec<Peer>,
    began: Instant,
    wrong: u32,
    /// Bytes that came from them.
    of_peers: u64,
    /// Since when the store has not helped, or when a part last came without it; and why.
    failed: Option<(Instant, GetError)>,
}

impl Swarm {
    async fn run(
        &mut self,
        mut hear: mpsc::Receiver<Event>,
        entry: &Entry,
        at: &FsPath,
    ) -> Result<(), GetError> {
        for index in 0..self.around.len() {
            self.plan.joined(index, Duration::ZERO);
            let (peers, peer) = (self.peers.clone(), self.around[index].clone());
            self.tasks.spawn(self.job.clone().listen(peers, index, peer));
        }
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while let Some(take) = self.plan.next(self.began.elapsed()) {
                self.begin(take);
            }
            let said = self.plan.said();
            entry.under_way.said.send_if_modified(|now| {
                let changed = *now != said;
                *now = said;
                changed
            });
            if self.plan.is_done() {
                return Ok(());
            }
            let hopeless =
                |since: &Instant| !self.plan.has_peers() || since.elapsed() > PEERS_ALONE;
            if self.failed.as_ref().is_some_and(|(since, _)| hopeless(since))
                && let Some((_, error)) = self.failed.take()
            {
                return Err(error);
            }
            tokio::select! {
                Some(event) = hear.recv() => self.handle(event, at)?,
                _ = tick.tick() => {}
            }
            // What came meanwhile is told and planned for together.
            while let Ok(event) = hear.try_recv() {
                self.handle(event, at)?;
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }

    fn begin(&mut self, take: Take) {
        let job = self.job.clone();
        match take.from {
            Source::Store => drop(self.tasks.spawn(job.ask_store(take))),
            Source::Peer(index) => match self.links.get(&index) {
                Some(link) => drop(self.tasks.spawn(job.ask_peer(link.clone(), take))),
                // It left between two words.
                None => {
                    self.plan.left(index);
                    self.plan.ended(&take);
                }
            },
        }
    }

    fn handle(&mut self, event: Event, at: &FsPath) -> Result<(), GetError> {
        match event {
            Event::Joined(index, link) => drop(self.links.insert(index, link)),
            Event::Said(index, said) => self.plan.heard(index, said, self.began.elapsed()),
            Event::Left(index, why) => self.leave(index, &why),
            Event::Came(from, index) => {
                self.count(from, index);
                if self.plan.came(index)
                    && let Some((since, _)) = &mut self.failed
                {
                    *since = Instant::now();
                }
            }
            Event::Wrong(Source::Peer(index), part) => {
                let Peer { name, key, .. } = &self.around[index];
                let url = &self.job.wanted.url;
                tracing::warn!(%name, part, url, "a peer sent other bytes than the file's");
                self.peers.shun(*key);
                self.leave(index, &Useless::Odd);
            }
            Event::Wrong(Source::Store, part) => {
                self.wrong += 1;
                let url = &self.job.wanted.url;
                tracing::warn!(url, part, "a part was fetched damaged; fetching it again");
                if self.wrong >= WRONG_MAX {
                    return Err(self
                        .job
                        .wanted
                        .corrupt(format!("other bytes in part {part}"), true));
                }
            }
            Event::Ended(take, outcome) => {
                self.plan.ended(&take);
                match (take.from, outcome) {
                    (_, Ok(())) => {}
                    (Source::Peer(index), Err(Failure::Peer(why))) => self.leave(index, &why),
                    (_, Err(Failure::Disk(source))) => {
                        return Err(CacheError::io("write", at, source).into());
                    }
                    (_, Err(Failure::Store(error))) => {
                        self.plan.without_store();
                        self.failed.get_or_insert((Instant::now(), error));
                    }
                    (Source::Store, Err(Failure::Peer(_))) => {}
                }
            }
        }
        Ok(())
    }

    fn count(&mut self, from: Source, index: usize) {
        let range = self.job.parts.range(index);
        let (bytes, counts) = (range.end - range.start, &self.peers.inner.counts);
        match from {
            Source::Store => counts.came_from_store(bytes),
            Source::Peer(_) => {
                counts.came_from_peers(bytes);
                self.of_peers += bytes;
            }
        }
    }

    fn leave(&mut self, index: usize, why: &Useless) {
        let name = &self.around[index].name;
        tracing::debug!(%name, %why, url = self.job.wanted.url, "a peer is asked no more");
        self.links.remove(&index);
        self.plan.left(index);
    }
}

impl Job {
    /// Nobody listens when the fetch is over.
    async fn say(&self, event: Event) {
        let _ = self.tell.send(event).await;
    }

    /// Hears of what a peer has for as long as it says so.
    async fn listen(self, peers: Peers, index: usize, peer: Peer) {
        let inner = &peers.inner;
        let heard = async {
            let link = Link::open(&inner.name, &inner.identity, &peer).await?;
            let mut joined = false;
            loop {
                let mut words = link.parts(self.wanted.digest, self.parts.count()).await?;
                let mut all = false;
                while let Some(said) = words.next().await? {
                    if !std::mem::replace(&mut joined, true) {
                        self.say(Event::Joined(index, link.clone())).await;
                    }
                    all = said.0.iter().all(|has| *has);
                    self.say(Event::Said(index, said)).await;
                }
                if all {
                    return Ok(());
                }
                tokio::time::sleep(ASK_AGAIN).await;
            }
        };
        if let Err(why) = heard.await {
            self.say(Event::Left(index, why)).await;
        }
    }

    async fn ask_peer(self, link: Link, take: Take) {
        let index = take.parts.start;
        let outcome = match link.bytes(self.wanted.digest, self.parts.range(index)).await {
            Ok(bytes) => self.keep(take.from, index, bytes).await.map_err(Failure::Disk),
            Err(why) => Err(Failure::Peer(why)),
        };
        self.say(Event::Ended(take, outcome)).await;
    }

    async fn ask_store(self, take: Take) {
        let outcome = self.run_of_store(&take).await;
        self.say(Event::Ended(take, outcome)).await;
    }

    /// Parts in a row, each kept as soon as it is whole.
    async fn run_of_store(&self, take: &Take) -> Result<(), Failure> {
        let key = &self.wanted.key;
        let fault = |source| Failure::Store(self.at.fault(key, source).into());
        let start = self.parts.range(take.parts.start).start;
        let range = start..self.parts.range(take.parts.end - 1).end;
        let options = GetOptions::new().with_range(Some(range));
        let got = self.at.objects.get_opts(key, options).await.map_err(fault)?;
        self.wanted.check_size(got.meta.size).map_err(Failure::Store)?;
        let mut pieces = got.into_stream();
        let mut index = take.parts.start;
        let mut held = BytesMut::new();
        while let Some(piece) = pieces.try_next().await.map_err(fault)? {
            held.extend_from_slice(&piece);
            while index < take.parts.end {
                let range = self.parts.range(index);
                let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                if held.len() < bytes {
                    held.reserve(bytes - held.len());
                    break;
                }
                let part = held.split_to(bytes).freeze();
                self.keep(take.from, index, part).await.map_err(Failure::Disk)?;
                index += 1;
            }
        }
        Ok(())
    }

    /// Writes a part down if it is right.
    async fn keep(&self, from: Source, index: usize, bytes: Bytes) -> io::Result<()> {
        let (parts, file) = (self.parts.clone(), self.file.clone());
        let kept = blocking(move || {
            if !parts.is(index, &bytes) {
                return Ok(false);
            }
            file.write_all_at(&bytes, parts.range(index).start)?;
            Ok::<_, io::Error>(true)
        });
        let event = if kept.await? { Event::Came(from, index) } else { Event::Wrong(from, index) };
        self.say(event).await;
        Ok(())
    }
}
