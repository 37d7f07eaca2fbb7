//! Views of the fleet and of runs that are updated once and shared by all watchers: a reopened page
//! has its run immediately, and ten pages cost the bus as much as one. The crate `run-view` defines
//! the content of a view.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use bus::LogEvent;
use control::FleetControl;
use futures::{Stream, StreamExt, stream};
use prost::Message;
use run_view::{FleetView, RunView};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use wire::{RunId, format_error_chain, v1};

use crate::error::{CallError, CallRefusal};

/// A person sees no faster changes.
const CHANGE_INTERVAL: Duration = Duration::from_millis(100);
/// The bandwidth limit of one watcher, for a large fleet's changes.
const WATCHER_BYTES_PER_S: f64 = 4e6;
/// The time for which a view is updated without watchers, as pages are often reloaded.
const UNWATCHED_LIMIT: Duration = Duration::from_secs(60);
const RUN_VIEWS_MAX: usize = 64;

/// A view with revisions that can report what changed since one of them.
pub(crate) trait LiveView: Send + 'static {
    type Change: Message;

    /// Increases with each change.
    fn latest_revision(&self) -> u64;
    /// Returns the change after a revision, and the revision that it reaches; `None` if nothing
    /// changed.
    fn changes_after(&self, revision: u64) -> Option<(Self::Change, u64)>;
}

impl LiveView for FleetView {
    type Change = v1::FleetChange;

    fn latest_revision(&self) -> u64 {
        self.current_revision()
    }

    fn changes_after(&self, revision: u64) -> Option<(v1::FleetChange, u64)> {
        self.changes_since(revision)
    }
}

impl LiveView for RunView {
    type Change = v1::Board;

    fn latest_revision(&self) -> u64 {
        self.current_revision()
    }

    fn changes_after(&self, revision: u64) -> Option<(v1::Board, u64)> {
        self.changes_since(revision)
    }
}

/// A view and the channel that informs its watchers.
///
/// A background task ([`spawn_follower`]) applies facts and publishes revisions; each watcher is a
/// stream from [`SharedView::watch_changes`]. The states are:
///
/// ```text
/// CatchingUp -> Current(revision) -> Finished(revision)   the run has ended
///                       \-> Lost(reason)                   error, gateway stop, or no watcher for 60 s
/// ```
pub(crate) struct SharedView<P> {
    /// `None` until the first fact or status.
    view: Mutex<Option<P>>,
    state: watch::Sender<ViewState>,
}

#[derive(Debug, Clone)]
enum ViewState {
    /// Earlier facts are still being read.
    CatchingUp,
    Current(u64),
    /// Complete at this revision.
    Finished(u64),
    /// No longer updated, for this reason.
    Lost(String),
}

impl<P: LiveView> SharedView<P> {
    fn new() -> Arc<Self> {
        Arc::new(Self { view: Mutex::default(), state: watch::Sender::new(ViewState::CatchingUp) })
    }

    fn lock_view(&self) -> MutexGuard<'_, Option<P>> {
        // The view remains usable after a panic of another thread.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish_revision(&self) {
        self.state.send_replace(ViewState::Current(self.view_revision()));
    }

    fn view_revision(&self) -> u64 {
        self.lock_view().as_ref().map_or(0, LiveView::latest_revision)
    }

    fn is_lost(&self) -> bool {
        matches!(*self.state.borrow(), ViewState::Lost(_))
    }

    /// Waits until the view has had no watcher for 60 s.
    async fn wait_unwatched(&self) {
        loop {
            self.state.closed().await;
            sleep(UNWATCHED_LIMIT).await;
            if self.state.receiver_count() == 0 {
                return;
            }
        }
    }

    /// Streams the view as it is and then each change, until the view is finished or lost.
    pub(crate) fn watch_changes(
        self: Arc<Self>,
    ) -> impl Stream<Item = Result<P::Change, CallError>> {
        let seen = self.state.subscribe();
        let look =
            ViewWatcher { shared: self, state: seen, revision: 0, not_before: Instant::now() };
        stream::unfold(Some(look), async |look| look?.next_change().await)
    }
}

struct ViewWatcher<P> {
    shared: Arc<SharedView<P>>,
    state: watch::Receiver<ViewState>,
    revision: u64,
    not_before: Instant,
}

impl<P: LiveView> ViewWatcher<P> {
    /// Waits for the next change and returns it with the watcher, or an error without it. Returns
    /// `None` after the last change of a finished view.
    async fn next_change(mut self) -> Option<(Result<P::Change, CallError>, Option<Self>)> {
        loop {
            let revision = self.revision;
            let is_news = |news: &ViewState| match news {
                ViewState::CatchingUp => false,
                ViewState::Current(at) => *at > revision,
                ViewState::Finished(_) | ViewState::Lost(_) => true,
            };
            // `shared` owns the sender, so it cannot be closed.
            let news = self.state.wait_for(is_news).await.ok()?.clone();
            match news {
                ViewState::Lost(why) => return Some((Err(CallError::ViewLost { why }), None)),
                ViewState::Finished(at) if at <= revision => return None,
                ViewState::Finished(_) | ViewState::Current(_) | ViewState::CatchingUp => {}
            }
            sleep_until(self.not_before).await;
            let (change, last) = {
                let view = self.shared.lock_view();
                let view = view.as_ref()?;
                (view.changes_after(revision), view.latest_revision())
            };
            let Some((change, reached)) = change else { continue };
            self.revision = reached;
            #[expect(clippy::cast_precision_loss, reason = "bytes of a message")]
            let transfer =
                Duration::from_secs_f64(change.encoded_len() as f64 / WATCHER_BYTES_PER_S);
            // The rest of a large change follows as fast as the client takes it.
            let pause = if reached < last { Duration::ZERO } else { CHANGE_INTERVAL };
            self.not_before = Instant::now() + pause + transfer;
            return Some((Ok(change), Some(self)));
        }
    }
}

#[derive(Default)]
pub(crate) struct ViewCache {
    fleet: Mutex<Weak<SharedView<FleetView>>>,
    run_views: Mutex<BTreeMap<RunId, Weak<SharedView<RunView>>>>,
}

impl ViewCache {
    /// Returns the fleet's view, and starts it if necessary.
    pub(crate) fn fleet_view(
        &self,
        control: &FleetControl,
        stop: &CancellationToken,
    ) -> Arc<SharedView<FleetView>> {
        let mut fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = fleet.upgrade().filter(|live| !live.is_lost()) {
            return live;
        }
        let live = SharedView::new();
        *fleet = Arc::downgrade(&live);
        spawn_follower(live.clone(), stop.clone(), follow_fleet(control.clone(), live.clone()));
        live
    }

    /// Returns the view of a run, and starts it if necessary. The caller has checked that the run
    /// exists. `reads` are permits to read an archive. Fails if 64 other runs have views.
    pub(crate) fn run_view(
        &self,
        control: &FleetControl,
        run: &RunId,
        stop: &CancellationToken,
        reads: &Arc<Semaphore>,
    ) -> Result<Arc<SharedView<RunView>>, CallError> {
        let mut run_views = self.run_views.lock().unwrap_or_else(PoisonError::into_inner);
        run_views.retain(|_, live| live.strong_count() > 0);
        if let Some(live) = run_views.get(run).and_then(Weak::upgrade).filter(|it| !it.is_lost()) {
            return Ok(live);
        }
        if run_views.len() >= RUN_VIEWS_MAX {
            return Err(CallError::TooManyViews);
        }
        let live = SharedView::new();
        run_views.insert(run.clone(), Arc::downgrade(&live));
        spawn_follower(
            live.clone(),
            stop.clone(),
            follow_run(control.clone(), run.clone(), live.clone(), reads.clone()),
        );
        Ok(live)
    }
}

/// Runs `follow` in a task while the view has watchers, and publishes why it ended.
fn spawn_follower<P: LiveView>(
    live: Arc<SharedView<P>>,
    stop: CancellationToken,
    follow: impl Future<Output = Result<(), CallRefusal>> + Send + 'static,
) {
    tokio::spawn(async move {
        let _ends = LostOnDrop(live.clone());
        let why = tokio::select! {
            () = stop.cancelled() => "the gateway is stopping".to_owned(),
            () = live.wait_unwatched() => "nobody looked".to_owned(),
            followed = follow => match followed {
                Ok(()) => {
                    live.state.send_replace(ViewState::Finished(live.view_revision()));
                    // The complete view remains available to new watchers.
                    return live.wait_unwatched().await;
                }
                Err(refusal) => tonic::Status::from(refusal).message().to_owned(),
            },
        };
        live.state.send_replace(ViewState::Lost(why));
    });
}

/// Only the newest cycles are restored from their archives.
const RESTORED_CYCLES_MAX: usize = 50;

/// Restores cycles that the log no longer contains.
async fn restore_archived_cycles(
    control: &FleetControl,
    live: &SharedView<RunView>,
    reads: &Semaphore,
) {
    let forgotten = live.lock_view().as_ref().map_or(vec![], RunView::missing_archives);
    for archived in forgotten.into_iter().take(RESTORED_CYCLES_MAX) {
        // The semaphore is never closed.
        let _reading = reads.acquire().await.ok();
        match control.read_archive(&archived).await {
            Ok(records) => {
                live.lock_view()
                    .iter_mut()
                    .for_each(|view| view.restore_cycle(archived.cycle, &records));
                live.publish_revision();
            }
            Err(error) => {
                tracing::info!(
                    cycle = archived.cycle,
                    error = format_error_chain(&error),
                    "not drawn"
                );
            }
        }
    }
}

/// Marks the view as lost if its task ends without a final state, for example by a panic.
struct LostOnDrop<P: LiveView>(Arc<SharedView<P>>);

impl<P: LiveView> Drop for LostOnDrop<P> {
    fn drop(&mut self) {
        self.0.state.send_if_modified(|news| {
            let silent = matches!(news, ViewState::CatchingUp | ViewState::Current(_));
            if silent {
                *news = ViewState::Lost("it failed".to_owned());
            }
            silent
        });
    }
}

/// Applies the facts of a run to its view until the run has ended.
async fn follow_run(
    control: FleetControl,
    run: RunId,
    live: Arc<SharedView<RunView>>,
    reads: Arc<Semaphore>,
) -> Result<(), CallRefusal> {
    let mut facts = control.bus().follow_facts(vec![format!("flotilla.{run}.>")], 0);
    let (mut caught_up, mut ended) = (false, false);
    // Read an ended run to the end of the log: archives of its last cycles follow its end.
    while !(caught_up && ended) {
        let Some(followed) = facts.next().await else { break };
        match followed? {
            LogEvent::Record(record) => {
                let mut view = live.lock_view();
                match view.as_mut() {
                    Some(view) => view.apply_fact(record),
                    None => *view = RunView::start(&record),
                }
                ended = view.as_ref().is_some_and(RunView::has_ended);
            }
            LogEvent::CaughtUp => {
                caught_up = true;
                live.publish_revision();
                restore_archived_cycles(&control, &live, &reads).await;
            }
            LogEvent::Unreadable { .. } => {}
        }
        if caught_up {
            live.publish_revision();
        }
    }
    Ok(())
}

async fn follow_fleet(
    control: FleetControl,
    live: Arc<SharedView<FleetView>>,
) -> Result<(), CallRefusal> {
    let mut statuses = control.bus().watch_statuses().await?.fuse();
    let kinds = FleetView::FACT_KINDS.map(|kind| format!("flotilla.*.{kind}"));
    let mut facts = control.bus().follow_facts(kinds.to_vec(), 0);
    let known = control.list_agents().await?;
    let mut fleet = FleetView::default();
    known.into_iter().for_each(|status| fleet.update_agent(status));
    *live.lock_view() = Some(fleet);
    let mut caught_up = false;
    loop {
        tokio::select! {
            Some(status) = statuses.next() => live.lock_view().iter_mut().for_each(|fleet| fleet.update_agent(status.clone())),
            Some(followed) = facts.next() => match followed? {
                LogEvent::Record(record) => live.lock_view().iter_mut().for_each(|fleet| fleet.apply_fact(&record)),
                LogEvent::CaughtUp => caught_up = true,
                LogEvent::Unreadable { .. } => {}
            },
            else => return Ok(()),
        }
        if caught_up {
            live.publish_revision();
        }
    }
}
