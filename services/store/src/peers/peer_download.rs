//! Download of one file from the store and from peers at the same time, as the [`DownloadPlan`]
//! decides.

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
    ActiveDownloadGuard, PeerAgent, PeerNode,
    active_downloads::Availability,
    peer_connection::{PeerConnection, PeerFailure},
    plan::{DownloadPlan, PartRequest, PartSource},
};
use crate::{
    backend::StoreBackend,
    blocking::run_blocking,
    error::{CacheError, GetError},
    parts::PartHashes,
    store::{Store, WantedObject},
};

const EVENTS_MAX: usize = 256;
/// The interval at which the plan is evaluated without an event, because one of its timeouts may
/// have passed.
const TICK: Duration = Duration::from_millis(100);
/// The number of damaged parts from the store after which a download fails; bits can also flip in
/// transit.
const DAMAGED_PARTS_MAX: u32 = 16;
/// The longest time without a part from a peer after the store has failed.
const PEERS_ONLY_TIMEOUT: Duration = Duration::from_secs(3);
const REPEAT_PAUSE: Duration = Duration::from_secs(1);

enum DownloadEvent {
    Joined(usize, PeerConnection),
    Announced(usize, Availability),
    Left(usize, PeerFailure),
    Received(PartSource, usize),
    /// A part did not match its hash.
    Damaged(PartSource, usize),
    Ended(PartRequest, Result<(), TransferFailure>),
}

enum TransferFailure {
    Store(GetError),
    Peer(PeerFailure),
    Disk(io::Error),
}

#[derive(Clone)]
struct TransferContext {
    backend: Arc<StoreBackend>,
    wanted: WantedObject,
    parts: Arc<PartHashes>,
    file: Arc<File>,
    event_tx: mpsc::Sender<DownloadEvent>,
}

/// Fills a file of the right size whose part hashes are known. While the returned guard exists,
/// peers can request the received parts.
pub(crate) async fn fetch_with_peers(
    peers: &PeerNode,
    store: &Store,
    (wanted, parts): (&WantedObject, Arc<PartHashes>),
    file: File,
    at: &FsPath,
) -> Result<(File, ActiveDownloadGuard), GetError> {
    let failed = |source| GetError::from(CacheError::from_io("write", at, source));
    let entry = peers.inner.active.add_file(wanted.digest, parts.clone(), &file).map_err(failed)?;
    let (around, place) = peers.select_peers().await;
    let (tell, hear) = mpsc::channel(EVENTS_MAX);
    let file = Arc::new(file);
    let job = TransferContext {
        backend: store.backend.clone(),
        wanted: wanted.clone(),
        parts: parts.clone(),
        file,
        event_tx: tell,
    };
    let range = parts.part_range(0);
    let plan = DownloadPlan::new(parts.part_count(), range.end - range.start, place);
    let mut swarm = PeerDownload {
        peers: peers.clone(),
        context: job,
        plan,
        connections: BTreeMap::new(),
        tasks: JoinSet::new(),
        candidates: around,
        started_at: Instant::now(),
        damaged_parts: 0,
        peer_bytes: 0,
        store_failure: None,
    };
    swarm.run(hear, &entry, at).await?;
    let PeerDownload { context: job, peer_bytes: of_peers, started_at: began, .. } = swarm;
    let (url, bytes, seconds) = (&wanted.url, wanted.bytes, began.elapsed().as_secs_f64());
    tracing::info!(url, bytes, of_peers, seconds, "fetched with peers");
    // A new handle, because tasks that are ending may still use the other one.
    let file = job.file.try_clone().map_err(failed)?;
    Ok((file, entry))
}

/// The download of one file. It starts the requests of its plan, handles their events and announces
/// the received parts to peers.
///
/// It ends when all parts are written. It fails on a disk error, after 16 damaged parts from the
/// store, or if the store has failed and no peer is left or none delivers for 3 s.
struct PeerDownload {
    peers: PeerNode,
    context: TransferContext,
    plan: DownloadPlan,
    connections: BTreeMap<usize, PeerConnection>,
    tasks: JoinSet<()>,
    candidates: Vec<PeerAgent>,
    started_at: Instant,
    damaged_parts: u32,
    peer_bytes: u64,
    /// The store's error, with the time of the failure or of the last part received after it.
    store_failure: Option<(Instant, GetError)>,
}

impl PeerDownload {
    async fn run(
        &mut self,
        mut hear: mpsc::Receiver<DownloadEvent>,
        entry: &ActiveDownloadGuard,
        at: &FsPath,
    ) -> Result<(), GetError> {
        for index in 0..self.candidates.len() {
            self.plan.add_peer(index, Duration::ZERO);
            let (peers, peer) = (self.peers.clone(), self.candidates[index].clone());
            self.tasks.spawn(self.context.clone().follow_peer(peers, index, peer));
        }
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while let Some(take) = self.plan.next(self.started_at.elapsed()) {
                self.start_request(take);
            }
            let availability = self.plan.own_availability();
            entry.partial_file.availability.send_if_modified(|now| {
                let changed = *now != availability;
                *now = availability;
                changed
            });
            if self.plan.is_done() {
                return Ok(());
            }
            let hopeless =
                |since: &Instant| !self.plan.has_peers() || since.elapsed() > PEERS_ONLY_TIMEOUT;
            if self.store_failure.as_ref().is_some_and(|(since, _)| hopeless(since))
                && let Some((_, error)) = self.store_failure.take()
            {
                return Err(error);
            }
            tokio::select! {
                Some(event) = hear.recv() => self.handle_event(event, at)?,
                _ = tick.tick() => {}
            }
            // Waiting events are handled together, before the next announcement and plan.
            while let Ok(event) = hear.try_recv() {
                self.handle_event(event, at)?;
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }

    fn start_request(&mut self, take: PartRequest) {
        let job = self.context.clone();
        match take.source {
            PartSource::Store => drop(self.tasks.spawn(job.request_from_store(take))),
            PartSource::Peer(index) => match self.connections.get(&index) {
                Some(link) => drop(self.tasks.spawn(job.request_from_peer(link.clone(), take))),
                // The peer left between planning and this request.
                None => {
                    self.plan.remove_peer(index);
                    self.plan.end_request(&take);
                }
            },
        }
    }

    /// Fails on disk errors and on too many damaged parts.
    fn handle_event(&mut self, event: DownloadEvent, at: &FsPath) -> Result<(), GetError> {
        match event {
            DownloadEvent::Joined(index, link) => drop(self.connections.insert(index, link)),
            DownloadEvent::Announced(index, availability) => {
                self.plan.update_peer(index, availability, self.started_at.elapsed());
            }
            DownloadEvent::Left(index, why) => self.drop_peer(index, &why),
            DownloadEvent::Received(from, index) => {
                self.count_part(from, index);
                if self.plan.mark_received(index)
                    && let Some((since, _)) = &mut self.store_failure
                {
                    *since = Instant::now();
                }
            }
            DownloadEvent::Damaged(PartSource::Peer(index), part) => {
                let PeerAgent { name, key, .. } = &self.candidates[index];
                let url = &self.context.wanted.url;
                tracing::warn!(%name, part, url, "a peer sent other bytes than the file's");
                self.peers.ban_peer(*key);
                self.drop_peer(index, &PeerFailure::Unexpected);
            }
            DownloadEvent::Damaged(PartSource::Store, part) => {
                self.damaged_parts += 1;
                let url = &self.context.wanted.url;
                tracing::warn!(url, part, "a part arrived damaged; fetching it again");
                if self.damaged_parts >= DAMAGED_PARTS_MAX {
                    return Err(self
                        .context
                        .wanted
                        .corrupt_error(format!("other bytes in part {part}"), true));
                }
            }
            DownloadEvent::Ended(take, outcome) => {
                self.plan.end_request(&take);
                match (take.source, outcome) {
                    (_, Ok(())) => {}
                    (PartSource::Peer(index), Err(TransferFailure::Peer(why))) => {
                        self.drop_peer(index, &why);
                    }
                    (_, Err(TransferFailure::Disk(source))) => {
                        return Err(CacheError::from_io("write", at, source).into());
                    }
                    (_, Err(TransferFailure::Store(error))) => {
                        self.plan.disable_store();
                        self.store_failure.get_or_insert((Instant::now(), error));
                    }
                    (PartSource::Store, Err(TransferFailure::Peer(_))) => {}
                }
            }
        }
        Ok(())
    }

    fn count_part(&mut self, from: PartSource, index: usize) {
        let range = self.context.parts.part_range(index);
        let (bytes, counts) = (range.end - range.start, &self.peers.inner.counts);
        match from {
            PartSource::Store => counts.add_from_store(bytes),
            PartSource::Peer(_) => {
                counts.add_from_peers(bytes);
                self.peer_bytes += bytes;
            }
        }
    }

    fn drop_peer(&mut self, index: usize, why: &PeerFailure) {
        let name = &self.candidates[index].name;
        tracing::debug!(%name, %why, url = self.context.wanted.url, "stopped asking a peer");
        self.connections.remove(&index);
        self.plan.remove_peer(index);
    }
}

impl TransferContext {
    /// Ignores the event if the download has ended.
    async fn send_event(&self, event: DownloadEvent) {
        let _ = self.event_tx.send(event).await;
    }

    /// Forwards the announcements of a peer until it has all parts or fails.
    async fn follow_peer(self, peers: PeerNode, index: usize, peer: PeerAgent) {
        let inner = &peers.inner;
        let followed = async {
            let link = PeerConnection::open(&inner.name, &inner.identity, &peer).await?;
            let mut joined = false;
            loop {
                let mut announcements =
                    link.follow_availability(self.wanted.digest, self.parts.part_count()).await?;
                let mut all = false;
                while let Some(availability) = announcements.next().await? {
                    if !std::mem::replace(&mut joined, true) {
                        self.send_event(DownloadEvent::Joined(index, link.clone())).await;
                    }
                    all = availability.0.iter().all(|has| *has);
                    self.send_event(DownloadEvent::Announced(index, availability)).await;
                }
                if all {
                    return Ok(());
                }
                tokio::time::sleep(REPEAT_PAUSE).await;
            }
        };
        if let Err(why) = followed.await {
            self.send_event(DownloadEvent::Left(index, why)).await;
        }
    }

    async fn request_from_peer(self, link: PeerConnection, take: PartRequest) {
        let index = take.parts.start;
        let outcome = match link.fetch_range(self.wanted.digest, self.parts.part_range(index)).await
        {
            Ok(bytes) => {
                self.write_part(take.source, index, bytes).await.map_err(TransferFailure::Disk)
            }
            Err(why) => Err(TransferFailure::Peer(why)),
        };
        self.send_event(DownloadEvent::Ended(take, outcome)).await;
    }

    async fn request_from_store(self, take: PartRequest) {
        let outcome = self.read_from_store(&take).await;
        self.send_event(DownloadEvent::Ended(take, outcome)).await;
    }

    /// Writes each part as soon as it is complete.
    async fn read_from_store(&self, take: &PartRequest) -> Result<(), TransferFailure> {
        let key = &self.wanted.key;
        let fault = |source| TransferFailure::Store(self.backend.storage_error(key, source).into());
        let start = self.parts.part_range(take.parts.start).start;
        let range = start..self.parts.part_range(take.parts.end - 1).end;
        let options = GetOptions::new().with_range(Some(range));
        let got = self.backend.objects.get_opts(key, options).await.map_err(fault)?;
        self.wanted.check_size(got.meta.size).map_err(TransferFailure::Store)?;
        let mut pieces = got.into_stream();
        let mut index = take.parts.start;
        let mut held = BytesMut::new();
        while let Some(piece) = pieces.try_next().await.map_err(fault)? {
            held.extend_from_slice(&piece);
            while index < take.parts.end {
                let range = self.parts.part_range(index);
                let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                if held.len() < bytes {
                    held.reserve(bytes - held.len());
                    break;
                }
                let part = held.split_to(bytes).freeze();
                self.write_part(take.source, index, part).await.map_err(TransferFailure::Disk)?;
                index += 1;
            }
        }
        Ok(())
    }

    async fn write_part(&self, from: PartSource, index: usize, bytes: Bytes) -> io::Result<()> {
        let (parts, file) = (self.parts.clone(), self.file.clone());
        let kept = run_blocking(move || {
            if !parts.matches_part(index, &bytes) {
                return Ok(false);
            }
            file.write_all_at(&bytes, parts.part_range(index).start)?;
            Ok::<_, io::Error>(true)
        });
        let event = if kept.await? {
            DownloadEvent::Received(from, index)
        } else {
            DownloadEvent::Damaged(from, index)
        };
        self.send_event(event).await;
        Ok(())
    }
}
