//! A model of NATS JetStream: a log that accepts each subject once, and consumers that deliver each
//! fact to one agent at a time. The tests of `services/bus` check the real one.
//!
//! Acknowledged facts survive a crash. Acknowledgements of deliveries may be lost, because the real
//! server stores them later.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
};

use wire::{Fact, FactBody, Record, WorkKind};

use crate::faults::Bug;

pub(crate) const LEASE_MS: u64 = 6_000;

/// The age up to which a crash may lose an acknowledgement.
const ACK_LOSS_MS: u64 = 300;

/// The result of publishing a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) sequence: u64,
    /// False if another fact has this subject already.
    pub(crate) ours: bool,
}

/// A fact that is delivered to an agent.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) kind: WorkKind,
    pub(crate) record: Rc<Record>,
    pub(crate) delivered: u64,
}

/// How an agent settles a delivery or extends its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settle {
    Ack,
    Nak { delay_ms: u64 },
    Progress,
}

#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) log: Vec<Rc<Record>>,
    subjects: BTreeMap<String, u64>,
    consumers: BTreeMap<WorkKind, Consumer>,
    /// The offset of its clock in milliseconds.
    pub(crate) skew_ms: u64,
    bug: Option<Bug>,
}

#[derive(Debug, Default)]
struct Consumer {
    /// Waiting facts: earliest delivery time and sequence.
    ready: VecDeque<(u64, u64)>,
    /// The expiry time of each lease.
    leased: BTreeMap<u64, u64>,
    delivered: BTreeMap<u64, u64>,
    /// Agents with a pending pull.
    pulls: VecDeque<usize>,
    /// Recent acknowledgements: sequence and time.
    acked: VecDeque<(u64, u64)>,
}

impl Server {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        Self { bug, ..Self::default() }
    }

    pub(crate) fn publish(&mut self, now_ms: u64, fact: &Fact) -> Published {
        let subject = fact.subject.to_string();
        let taken = self.subjects.get(&subject).copied();
        if let Some(sequence) = taken.filter(|_| self.bug != Some(Bug::AcceptsDuplicates)) {
            let ours = self.record_at(sequence).fact == *fact;
            return Published { sequence, ours };
        }
        let sequence = self.log.len() as u64 + 1;
        self.subjects.insert(subject, sequence);
        let record =
            Record { sequence, time_ms: now_ms + self.skew_ms, author: None, fact: fact.clone() };
        if let Some(kind) = triggered_kind(&fact.body) {
            self.consumers.entry(kind).or_default().ready.push_back((now_ms, sequence));
        }
        self.log.push(Rc::new(record));
        Published { sequence, ours: true }
    }

    fn record_at(&self, sequence: u64) -> &Rc<Record> {
        let index = usize::try_from(sequence - 1).expect("a log that fits into memory");
        &self.log[index]
    }

    pub(crate) fn get(&self, subject: &str) -> Option<Rc<Record>> {
        self.subjects.get(subject).map(|sequence| self.record_at(*sequence).clone())
    }

    /// Returns the last record whose subject starts with the prefix.
    pub(crate) fn last_with_prefix(&self, prefix: &str) -> Option<Rc<Record>> {
        let below = self.subjects.range(prefix.to_owned()..);
        let below = below.take_while(|(subject, _)| subject.starts_with(prefix));
        below.map(|(_, sequence)| *sequence).max().map(|sequence| self.record_at(sequence).clone())
    }

    pub(crate) fn after(&self, sequence: u64, most: usize) -> Vec<Rc<Record>> {
        let first = usize::try_from(sequence).unwrap_or(usize::MAX);
        self.log.iter().skip(first).take(most).cloned().collect()
    }

    pub(crate) fn pull(&mut self, kind: WorkKind, agent: usize) {
        let pulls = &mut self.consumers.entry(kind).or_default().pulls;
        if !pulls.contains(&agent) {
            pulls.push_back(agent);
        }
    }

    /// Returns new deliveries. Must be called whenever a fact may have become ready.
    pub(crate) fn deliver_ready(&mut self, now_ms: u64) -> Vec<(usize, Delivery)> {
        let mut out = Vec::new();
        for (kind, consumer) in &mut self.consumers {
            while let Some((agent, sequence)) = consumer.next_delivery(now_ms) {
                let delivered = consumer.delivered.entry(sequence).or_insert(0);
                *delivered += 1;
                let index = usize::try_from(sequence - 1).expect("as in `at`");
                let record = self.log[index].clone();
                out.push((agent, Delivery { kind: *kind, record, delivered: *delivered }));
            }
        }
        out
    }

    /// Settles a delivery for all holders, like the real server, which does not check who holds the
    /// lease.
    pub(crate) fn settle(&mut self, now_ms: u64, kind: WorkKind, sequence: u64, how: Settle) {
        let consumer = self.consumers.entry(kind).or_default();
        let leased = consumer.leased.contains_key(&sequence);
        match how {
            Settle::Progress if leased => {
                consumer.leased.insert(sequence, now_ms + LEASE_MS);
            }
            Settle::Ack => {
                consumer.leased.remove(&sequence);
                consumer.ready.retain(|(_, waiting)| *waiting != sequence);
                consumer.acked.retain(|(_, at)| at + ACK_LOSS_MS > now_ms);
                consumer.acked.push_back((sequence, now_ms));
            }
            Settle::Nak { delay_ms } if leased => {
                consumer.leased.remove(&sequence);
                consumer.ready.push_back((now_ms + delay_ms, sequence));
            }
            Settle::Progress | Settle::Nak { .. } => {}
        }
    }

    /// Makes the facts of expired leases ready again.
    pub(crate) fn expire(&mut self, now_ms: u64) {
        if self.bug == Some(Bug::NeverExpiresLeases) {
            return;
        }
        for consumer in self.consumers.values_mut() {
            let over = |(sequence, until): (&u64, &u64)| (*until <= now_ms).then_some(*sequence);
            let lost: Vec<u64> = consumer.leased.iter().filter_map(over).collect();
            for sequence in lost {
                consumer.leased.remove(&sequence);
                consumer.ready.push_back((now_ms, sequence));
            }
        }
    }

    /// Drops all pulls, and some recent acknowledgements.
    pub(crate) fn crash(&mut self, now_ms: u64, mut loses_acks: impl FnMut() -> bool) {
        for consumer in self.consumers.values_mut() {
            consumer.pulls.clear();
            for (sequence, at) in std::mem::take(&mut consumer.acked) {
                if at + ACK_LOSS_MS > now_ms && loses_acks() {
                    consumer.ready.push_back((now_ms, sequence));
                }
            }
        }
    }

    /// The number of facts that wait or are leased.
    pub(crate) fn queued(&self, kind: WorkKind) -> usize {
        self.consumers.get(&kind).map_or(0, |c| {
            let ready = c.ready.iter().map(|(_, sequence)| sequence);
            ready.chain(c.leased.keys()).collect::<BTreeSet<_>>().len()
        })
    }
}

impl Consumer {
    fn next_delivery(&mut self, now_ms: u64) -> Option<(usize, u64)> {
        let place = self.ready.iter().position(|(from, _)| *from <= now_ms)?;
        let agent = self.pulls.pop_front()?;
        let (_, sequence) = self.ready.remove(place)?;
        self.leased.insert(sequence, now_ms + LEASE_MS);
        Some((agent, sequence))
    }
}

/// The kind of work that a fact triggers.
fn triggered_kind(body: &FactBody) -> Option<WorkKind> {
    match body {
        FactBody::GenerateOrder(_) => Some(WorkKind::Generate),
        FactBody::Samples(_) => Some(WorkKind::Verify),
        FactBody::TrainOrder(_) => Some(WorkKind::Train),
        FactBody::Checkpoint(_) => Some(WorkKind::Eval),
        _ => None,
    }
}
