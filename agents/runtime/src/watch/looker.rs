//! Looks on a thread of its own: the files of a GPU that hangs may not answer.

use std::{sync::mpsc as thread, time::Duration};

use hardware::{
    citizen::{self, Foreign},
    files::Live,
    telemetry::{Sampler, Telemetry},
};
use tokio::sync::mpsc;

/// A look takes well under a millisecond of work; a card in a reset keeps one waiting.
const LOOK_LIMIT: Duration = Duration::from_secs(3);

pub(super) struct Looked {
    pub(super) telemetry: Telemetry,
    pub(super) foreign: Vec<Foreign>,
}

struct Ask {
    at: Duration,
    sensors: bool,
}

/// The thread ends when this is gone, or when a stuck look is.
pub(super) struct Looker {
    asks: thread::SyncSender<Ask>,
    answers: mpsc::Receiver<Looked>,
    stuck: bool,
}

impl Looker {
    pub(super) fn start(files: Live) -> Self {
        // One ask and one answer at a time.
        let (asks, asked) = thread::sync_channel::<Ask>(1);
        let (answer, answers) = mpsc::channel(1);
        let work = move || {
            let own = citizen::own_name(&files);
            let mut sampler = Sampler::default();
            while let Ok(Ask { at, sensors }) = asked.recv() {
                let at_ms = super::millis(at);
                let telemetry = sampler.sample(&files, at_ms, sensors);
                let foreign = citizen::foreign(&files, &own);
                if answer.blocking_send(Looked { telemetry, foreign }).is_err() {
                    break;
                }
            }
        };
        let started = std::thread::Builder::new().name("watch".into()).spawn(work);
        if let Err(error) = started {
            tracing::warn!(%error, "the box is not watched");
        }
        Self { asks, answers, stuck: false }
    }

    /// `None` while a look is stuck.
    pub(super) async fn look(&mut self, at: Duration, sensors: bool) -> Option<Looked> {
        // The answer to a question long given up.
        let _ = self.answers.try_recv();
        // Full: it is still at the one before.
        let _ = self.asks.try_send(Ask { at, sensors });
        let looked = tokio::time::timeout(LOOK_LIMIT, self.answers.recv()).await.ok().flatten();
        let stuck = looked.is_none();
        if stuck && !self.stuck {
            tracing::warn!("this box's sensors do not answer");
        }
        self.stuck = stuck;
        looked
    }
}
