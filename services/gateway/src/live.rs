//! Pictures that are kept up to date once, for all who look at them: a page that is opened again
//! has its run at once, and ten pages cost the bus what one does. What is in a picture is `board`'s
//! business.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use board::{Board, Fleet};
use bus::Followed;
use control::Control;
use futures::{Stream, StreamExt, stream};
use prost::Message;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use wire::{RunId, chain, v1};

use crate::{call::CallError, status::Refusal};

/// Between two changes that somebody is told of: eyes see no more.
const PACE: Duration = Duration::from_millis(100);
/// What a large fleet's changes may fill of a line.
const BYTES_PER_S: f64 = 4e6;
/// How long a picture is kept up to date for nobody: pages are loaded again.
const LINGER: Duration = Duration::from_secs(60);
/// Runs that are looked at.
const BOARDS_MAX: usize = 64;

/// Something that changes, and can tell what of it has.
pub(crate) trait Picture: Send + 'static {
    type Change: Message;

    /// Counts up.
    fn revision(&self) -> u64;
    /// What has changed behind a revision, and which one that comes up to.
    fn since(&self, revision: u64) -> Option<(Self::Change, u64)>;
}

impl Picture for Fleet {
    type Change = v1::FleetChange;

    fn revision(&self) -> u64 {
        self.revision()
    }

    fn since(&self, revision: u64) -> Option<(v1::FleetChange, u64)> {
        self.since(revision)
    }
}

impl Picture for Board {
    type Change = v1::Board;

    fn revision(&self) -> u64 {
        self.revision()
    }

    fn since(&self, revision: u64) -> Option<(v1::Board, u64)> {
        self.since(revision)
    }
}

/// A picture, and who waits for its changes.
pub(crate) struct Live<P> {
    /// `None` until there is something to see.
    picture: Mutex<Option<P>>,
    news: watch::Sender<News>,
}

#[derive(Debug, Clone)]
enum News {
    /// What there was before is still being read.
    Behind,
    At(u64),
    /// Nothing will change any more.
    Over(u64),
    Lost(String),
}

impl<P: Picture> Live<P> {
    fn new() -> Arc<Self> {
        Arc::new(Self { picture: Mutex::default(), news: watch::Sender::new(News::Behind) })
    }

    fn picture(&self) -> MutexGuard<'_, Option<P>> {
        // What a panic left behind is still a picture.
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody how far the picture is.
    fn publish(&self) {
        self.news.send_replace(News::At(self.revision()));
    }

    fn revision(&self) -> u64 {
        self.picture().as_ref().map_or(0, Picture::revision)
    }

    fn is_lost(&self) -> bool {
        matches!(*self.news.borrow(), News::Lost(_))
    }

    /// Until nobody has looked for a while.
    async fn unwatched(&self) {
        loop {
            self.news.closed().await;
            sleep(LINGER).await;
            if self.news.receiver_count() == 0 {
                return;
            }
        }
    }

    /// The picture as it is, and then each change, until it is over or lost.
    pub(crate) fn changes(self: Arc<Self>) -> impl Stream<Item = Result<P::Change, CallError>> {
        let seen = self.news.subscribe();
        let look = Look { live: self, seen, revision: 0, not_before: Instant::now() };
        stream::unfold(Some(look), async |look| look?.next().await)
    }
}

/// Somebody who looks.
struct Look<P> {
    live: Arc<Live<P>>,
    seen: watch::Receiver<News>,
    revision: u64,
    not_before: Instant,
}

impl<P: Picture> Look<P> {
    async fn next(mut self) -> Option<(Result<P::Change, CallError>, Option<Self>)> {
        loop {
            let revision = self.revision;
            let is_news = |news: &News| match news {
                News::Behind => false,
                News::At(at) => *at > revision,
                News::Over(_) | News::Lost(_) => true,
            };
            // The sender is in `live`.
            let news = self.seen.wait_for(is_news).await.ok()?.clone();
            match news {
                News::Lost(why) => return Some((Err(CallError::Lost { why }), None)),
                News::Over(at) if at <= revision => return None,
                News::Over(_) | News::At(_) | News::Behind => {}
            }
            sleep_until(self.not_before).await;
            let (change, last) = {
                let picture = self.live.picture();
                let picture = picture.as_ref()?;
                (picture.since(revision), picture.revision())
            };
            let Some((change, reached)) = change else { continue };
            self.revision = reached;
            #[expect(clippy::cast_precision_loss, reason = "bytes of a message")]
            let transfer = Duration::from_secs_f64(change.encoded_len() as f64 / BYTES_PER_S);
            // The rest of what there is comes as fast as it is taken.
            let pace = if reached < last { Duration::ZERO } else { PACE };
            self.not_before = Instant::now() + pace + transfer;
            return Some((Ok(change), Some(self)));
        }
    }
}

/// The pictures that somebody looks at.
#[derive(Default)]
pub(crate) struct Gallery {
    fleet: Mutex<Weak<Live<Fleet>>>,
    boards: Mutex<BTreeMap<RunId, Weak<Live<Board>>>>,
}

impl Gallery {
    pub(crate) fn fleet(&self, control: &Control, stop: &CancellationToken) -> Arc<Live<Fleet>> {
        let mut fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = fleet.upgrade().filter(|live| !live.is_lost()) {
            return live;
        }
        let live = Live::new();
        *fleet = Arc::downgrade(&live);
        keep(live.clone(), stop.clone(), follow_fleet(control.clone(), live.clone()));
        live
    }

    /// Of a run that there is.
    pub(crate) fn board(
        &self,
        control: &Control,
        run: &RunId,
        stop: &CancellationToken,
    ) -> Result<Arc<Live<Board>>, CallError> {
        let mut boards = self.boards.lock().unwrap_or_else(PoisonError::into_inner);
        boards.retain(|_, live| live.strong_count() > 0);
        if let Some(live) = boards.get(run).and_then(Weak::upgrade).filter(|it| !it.is_lost()) {
            return Ok(live);
        }
        if boards.len() >= BOARDS_MAX {
            return Err(CallError::TooManyBoards);
        }
        let live = Live::new();
        boards.insert(run.clone(), Arc::downgrade(&live));
        keep(live.clone(), stop.clone(), follow_run(control.clone(), run.clone(), live.clone()));
        Ok(live)
    }
}

/// Follows for as long as somebody looks, and says why it ended.
fn keep<P: Picture>(
    live: Arc<Live<P>>,
    stop: CancellationToken,
    follow: impl Future<Output = Result<(), Refusal>> + Send + 'static,
) {
    tokio::spawn(async move {
        let _ends = Ends(live.clone());
        let why = tokio::select! {
            () = stop.cancelled() => "the gateway is stopping".to_owned(),
            () = live.unwatched() => "nobody looked".to_owned(),
            followed = follow => match followed {
                Ok(()) => {
                    live.news.send_replace(News::Over(live.revision()));
                    // Whoever comes has all there is.
                    return live.unwatched().await;
                }
                Err(refusal) => tonic::Status::from(refusal).message().to_owned(),
            },
        };
        live.news.send_replace(News::Lost(why));
    });
}

/// Cycles that are drawn from their archives, the newest.
const RECALLED_MAX: usize = 50;

/// Draws what the log has let go of, as far as the store has it.
async fn recall(control: &Control, live: &Live<Board>) {
    let forgotten = live.picture().as_ref().map_or(vec![], Board::forgotten);
    for archived in forgotten.into_iter().take(RECALLED_MAX) {
        match control.recall(&archived).await {
            Ok(records) => {
                live.picture().iter_mut().for_each(|board| board.recall(archived.cycle, &records));
                live.publish();
            }
            Err(error) => {
                tracing::info!(cycle = archived.cycle, error = chain(&error), "not drawn");
            }
        }
    }
}

/// Whoever looks hears of it, should the picture not be kept up to date any more without a word.
struct Ends<P: Picture>(Arc<Live<P>>);

impl<P: Picture> Drop for Ends<P> {
    fn drop(&mut self) {
        self.0.news.send_if_modified(|news| {
            let silent = matches!(news, News::Behind | News::At(_));
            if silent {
                *news = News::Lost("it failed".to_owned());
            }
            silent
        });
    }
}

/// Until the run is over.
async fn follow_run(control: Control, run: RunId, live: Arc<Live<Board>>) -> Result<(), Refusal> {
    let mut facts = control.bus().follow(vec![format!("flotilla.{run}.>")], 0);
    let (mut caught_up, mut ended) = (false, false);
    // What an ended run has behind its end is read as well: archives of its last cycles.
    while !(caught_up && ended) {
        let Some(followed) = facts.next().await else { break };
        match followed? {
            Followed::Record(record) => {
                let mut picture = live.picture();
                match picture.as_mut() {
                    Some(board) => board.fold(record),
                    None => *picture = Board::start(&record),
                }
                ended = picture.as_ref().is_some_and(Board::has_ended);
            }
            Followed::CaughtUp => {
                caught_up = true;
                live.publish();
                recall(&control, &live).await;
            }
            Followed::Unreadable { .. } => {}
        }
        if caught_up {
            live.publish();
        }
    }
    Ok(())
}

/// For ever.
async fn follow_fleet(control: Control, live: Arc<Live<Fleet>>) -> Result<(), Refusal> {
    let mut statuses = control.bus().watch_statuses().await?.fuse();
    let kinds = Fleet::KINDS.map(|kind| format!("flotilla.*.{kind}"));
    let mut facts = control.bus().follow(kinds.to_vec(), 0);
    let known = control.agents().await?;
    let mut fleet = Fleet::default();
    known.into_iter().for_each(|status| fleet.hear(status));
    *live.picture() = Some(fleet);
    let mut caught_up = false;
    loop {
        tokio::select! {
            Some(status) = statuses.next() => live.picture().iter_mut().for_each(|fleet| fleet.hear(status.clone())),
            Some(followed) = facts.next() => match followed? {
                Followed::Record(record) => live.picture().iter_mut().for_each(|fleet| fleet.fold(&record)),
                Followed::CaughtUp => caught_up = true,
                Followed::Unreadable { .. } => {}
            },
            else => return Ok(()),
        }
        if caught_up {
            live.publish();
        }
    }
}
