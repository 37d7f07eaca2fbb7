//! The newest move of each channel, as far as requests to its model need it.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bus::{Bus, LogEvent};
use futures::StreamExt;
use wire::{FactBody, FactKey, Record, RunId};

/// The newest moves, by channel. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ChannelMoves(Arc<Mutex<BTreeMap<RunId, NewestMove>>>);

#[derive(Debug, Clone, Default)]
pub(super) struct NewestMove {
    number: u64,
    /// The days for which requests are kept; 0: they are not.
    pub(super) days: u32,
    /// The pool whose agents serve the channel; `None` if none do.
    pool: Option<String>,
}

impl NewestMove {
    /// Returns true if an agent of this pool may have the model of this move. Another one says what
    /// is not so, perhaps to get the requests of others.
    pub(super) fn allows(&self, number: u64, pool: &str) -> bool {
        (1..=self.number).contains(&number) && self.pool.as_deref() == Some(pool)
    }
}

impl ChannelMoves {
    /// Follows the log until dropped.
    pub(super) async fn follow_log(&self, bus: &Bus) -> Infallible {
        let filters = vec!["flotilla.*.channel.*".to_owned()];
        let mut facts = bus.follow_facts(filters, 0);
        loop {
            if let Some(Ok(LogEvent::Record(record))) = facts.next().await {
                self.apply_record(&record);
            }
        }
    }

    pub(super) fn apply_record(&self, record: &Record) {
        let (FactKey::Channel { number }, FactBody::Channel(found)) =
            (&record.fact.subject.key, &record.fact.body)
        else {
            return;
        };
        let mut known = self.lock_moves();
        let last = known.entry(record.fact.subject.run.clone()).or_default();
        if *number > last.number {
            let days = found.keeping.map_or(0, |keeping| keeping.days);
            let pool = found.serving.as_ref().map(|serving| serving.pool.clone());
            *last = NewestMove { number: *number, days, pool };
        }
    }

    pub(super) fn find_newest(&self, channel: &str) -> Option<NewestMove> {
        let channel = RunId::new(channel).ok()?;
        self.lock_moves().get(&channel).cloned()
    }

    fn lock_moves(&self) -> MutexGuard<'_, BTreeMap<RunId, NewestMove>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
