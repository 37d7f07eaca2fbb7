//! A model of NATS JetStream: a log that accepts each subject once, and consumers that deliver each
//! fact to one agent at a time. The tests of `services/bus` check the real one.
//!
//! Acknowledged facts survive a crash, unless the server does not sync each write (the default of
//! `nats-server`, but not of a fleet's own server). Acknowledgements of deliveries may be lost,
//! because the real server stores them later.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
};

use wire::{AgentId, Fact, FactBody, FactKey, Record, RunId, Subject, WorkKind, v1};

use crate::{faults::Bug, task::OTHER_POOL};

pub(crate) const LEASE_MS: u64 = 6_000;

/// The most records of a reply.
pub(crate) const PAGE: usize = 64;

/// The age up to which a crash may lose an acknowledgement.
const ACK_LOSS_MS: u64 = 300;

/// More than the limit of open orders of all runs, including backup orders.
pub(crate) const QUEUED_MAX: usize = 160;

/// The result of publishing a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) sequence: u64,
    /// False if another fact has this subject already.
    pub(crate) ours: bool,
    /// True if this call wrote the fact.
    pub(crate) is_new: bool,
}

/// A work queue. All pools share one queue for verify, score and eval work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Queue {
    pub(crate) kind: WorkKind,
    is_other_pool: bool,
}

impl Queue {
    pub(crate) fn new(kind: WorkKind, pool: &str) -> Self {
        let is_divided = matches!(kind, WorkKind::Generate | WorkKind::Train);
        Self { kind, is_other_pool: is_divided && pool == OTHER_POOL }
    }

    /// Returns the queues that a fact is delivered from.
    fn triggered_by(fact: &Fact) -> Vec<Self> {
        let (kinds, pool): (&[WorkKind], &str) = match (&fact.subject.key, &fact.body) {
            (FactKey::GenerateOrder { pool, .. }, _) => (&[WorkKind::Generate], pool.as_str()),
            (FactKey::TrainOrder { pool, .. } | FactKey::TrainPartOrder { pool, .. }, _) => {
                (&[WorkKind::Train], pool.as_str())
            }
            (_, FactBody::Samples(_)) => (&[WorkKind::Verify, WorkKind::Score], ""),
            (_, FactBody::Checkpoint(_)) => (&[WorkKind::Eval], ""),
            _ => (&[], ""),
        };
        kinds.iter().map(|kind| Self::new(*kind, pool)).collect()
    }
}

/// A fact that is delivered to an agent.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) queue: Queue,
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
    log: BTreeMap<u64, Rc<Record>>,
    /// The last sequence, which never decreases when facts are purged.
    end: u64,
    subjects: BTreeMap<String, u64>,
    consumers: BTreeMap<Queue, Consumer>,
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

    pub(crate) fn publish(
        &mut self,
        now_ms: u64,
        author: Option<&AgentId>,
        fact: &Fact,
    ) -> Published {
        let subject = fact.subject.to_string();
        let taken = self.get(&subject);
        if let Some(taken) = taken.filter(|_| self.bug != Some(Bug::AcceptsDuplicates)) {
            let ours = taken.fact == *fact;
            return Published { sequence: taken.sequence, ours, is_new: false };
        }
        self.end += 1;
        let sequence = self.end;
        self.subjects.insert(subject, sequence);
        let (time_ms, author) = (now_ms + self.skew_ms, author.cloned());
        let record = Record { sequence, time_ms, author, fact: fact.clone() };
        for queue in Queue::triggered_by(fact) {
            // Agents acknowledge what they have nothing to do for at once.
            if !self.has_work(queue.kind, fact) {
                continue;
            }
            self.consumers.entry(queue).or_default().ready.push_back((now_ms, sequence));
        }
        self.log.insert(sequence, Rc::new(record));
        Published { sequence, ours: true, is_new: true }
    }

    /// False for samples that need no verdicts, or no scores.
    fn has_work(&self, kind: WorkKind, fact: &Fact) -> bool {
        let FactBody::Samples(samples) = &fact.body else { return true };
        let spec = self.get(&Subject::new(&fact.subject.run, FactKey::Spec).to_string());
        let Some(FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(raft)), .. })) =
            spec.map(|record| record.fact.body.clone())
        else {
            return true;
        };
        let set = raft.find_prompt_set(samples.purpose(), &samples.suite);
        match kind {
            WorkKind::Score => raft.teacher.is_some() && samples.purpose() == v1::Purpose::Train,
            _ => set.is_none_or(|set| set.verifier.is_some()),
        }
    }

    /// True if the server accepts the facts as one batch.
    pub(crate) fn accepts_batch(&self, facts: &[Fact]) -> bool {
        !facts.iter().any(|fact| self.subjects.contains_key(&fact.subject.to_string()))
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &Rc<Record>> {
        self.log.values()
    }

    pub(crate) fn get(&self, subject: &str) -> Option<Rc<Record>> {
        self.subjects.get(subject).and_then(|sequence| self.log.get(sequence)).cloned()
    }

    /// Returns the last record whose subject starts with the prefix.
    pub(crate) fn last_with_prefix(&self, prefix: &str) -> Option<Rc<Record>> {
        let below = self.subjects.range(prefix.to_owned()..);
        let below = below.take_while(|(subject, _)| subject.starts_with(prefix));
        let last = below.map(|(_, sequence)| *sequence).max()?;
        self.log.get(&last).cloned()
    }

    pub(crate) fn after(&self, sequence: u64, most: usize) -> Vec<Rc<Record>> {
        self.log.range(sequence + 1..).take(most).map(|(_, record)| record.clone()).collect()
    }

    /// Returns the facts that say which channels there are and which runs move them.
    pub(crate) fn read_channels(&self, after: u64) -> Vec<Rc<Record>> {
        let says_channel = |record: &&Rc<Record>| {
            let key = &record.fact.subject.key;
            matches!(key, FactKey::Spec | FactKey::Channel { .. } | FactKey::Done)
        };
        self.log
            .range(after + 1..)
            .map(|(_, record)| record)
            .filter(says_channel)
            .cloned()
            .collect()
    }

    /// Returns the facts of a run that are never purged.
    pub(crate) fn read_run(&self, run: &RunId) -> Vec<Rc<Record>> {
        let is_kept = |record: &&Rc<Record>| {
            record.fact.subject.run == *run && !record.fact.subject.key.is_bulky()
        };
        self.log.values().filter(is_kept).cloned().collect()
    }

    /// Returns the facts that belong into the archive of a cycle.
    pub(crate) fn read_cycle(
        &self,
        (run, cycle): (&RunId, u32),
        after: u64,
        up_to: u64,
        most: usize,
    ) -> Vec<Rc<Record>> {
        let within = self.log.range(after + 1..).map(|(_, record)| record);
        let within = within.take_while(|record| record.sequence <= up_to);
        let archived = within.filter(|record| is_archived_with(record, run, cycle));
        archived.take(most).cloned().collect()
    }

    pub(crate) fn has_bulky_facts(&self, run: &RunId, cycle: u32, up_to: u64) -> bool {
        let is_bulky = |record: &Record| {
            let key = &record.fact.subject.key;
            record.fact.subject.run == *run && key.is_bulky() && key.cycle_number() == Some(cycle)
        };
        self.log.range(..=up_to).any(|(_, record)| is_bulky(record))
    }

    /// Removes one kind of bulky facts of a cycle, and returns them.
    pub(crate) fn purge(
        &mut self,
        (run, cycle): (&RunId, u32),
        kind: usize,
        up_to: u64,
    ) -> Vec<Rc<Record>> {
        let is_due = |record: &Record| {
            let key = &record.fact.subject.key;
            let same = match kind {
                0 => matches!(key, FactKey::GenerateOrder { .. }),
                1 => matches!(key, FactKey::Samples { .. }),
                2 => matches!(key, FactKey::Scores { .. }),
                _ => matches!(key, FactKey::Verdicts { .. }),
            };
            same && record.sequence <= up_to
                && record.fact.subject.run == *run
                && key.cycle_number() == Some(cycle)
        };
        let purged = self.log.extract_if(.., |_, record| is_due(record));
        let purged: Vec<Rc<Record>> = purged.map(|(_, record)| record).collect();
        for record in &purged {
            self.subjects.remove(&record.fact.subject.to_string());
        }
        purged
    }

    /// Loses the facts after a sequence, as in a crash before they were synced.
    pub(crate) fn lose_tail(&mut self, end: u64) {
        for record in self.log.split_off(&(end + 1)).values() {
            self.subjects.remove(&record.fact.subject.to_string());
        }
        self.end = end;
        for consumer in self.consumers.values_mut() {
            consumer.ready.retain(|(_, sequence)| *sequence <= end);
            consumer.leased.split_off(&(end + 1));
            consumer.delivered.split_off(&(end + 1));
            consumer.acked.retain(|(sequence, _)| *sequence <= end);
        }
    }

    pub(crate) fn pull(&mut self, queue: Queue, agent: usize) {
        let pulls = &mut self.consumers.entry(queue).or_default().pulls;
        if !pulls.contains(&agent) {
            pulls.push_back(agent);
        }
    }

    /// Returns new deliveries. Must be called whenever a fact may have become ready.
    pub(crate) fn deliver_ready(&mut self, now_ms: u64) -> Vec<(usize, Delivery)> {
        let mut out = Vec::new();
        for (queue, consumer) in &mut self.consumers {
            while let Some((agent, sequence)) = consumer.next_delivery(now_ms) {
                let Some(record) = self.log.get(&sequence).cloned() else {
                    // Purged facts are not delivered.
                    consumer.leased.remove(&sequence);
                    consumer.pulls.push_front(agent);
                    continue;
                };
                let delivered = consumer.delivered.entry(sequence).or_insert(0);
                *delivered += 1;
                out.push((agent, Delivery { queue: *queue, record, delivered: *delivered }));
            }
        }
        out
    }

    /// Counts the facts of a queue that are leased to agents.
    pub(crate) fn count_leased(&self, queue: Queue) -> usize {
        self.consumers.get(&queue).map_or(0, |consumer| consumer.leased.len())
    }

    /// Settles a delivery for all holders, like the real server, which does not check who holds the
    /// lease.
    pub(crate) fn settle(&mut self, now_ms: u64, queue: Queue, sequence: u64, how: Settle) {
        let consumer = self.consumers.entry(queue).or_default();
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

    /// The largest number of facts that wait or are leased in a queue.
    pub(crate) fn longest_queue(&self) -> usize {
        let length = |c: &Consumer| {
            if c.ready.len() + c.leased.len() <= QUEUED_MAX {
                return c.ready.len() + c.leased.len();
            }
            let ready = c.ready.iter().map(|(_, sequence)| sequence);
            ready.chain(c.leased.keys()).collect::<BTreeSet<_>>().len()
        };
        self.consumers.values().map(length).max().unwrap_or(0)
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

/// True if the record belongs into the archive of a cycle.
pub(crate) fn is_archived_with(record: &Record, run: &RunId, cycle: u32) -> bool {
    let key = &record.fact.subject.key;
    record.fact.subject.run == *run
        && key.cycle_number() == Some(cycle)
        && !matches!(key, FactKey::Archived { .. } | FactKey::WatchedCheckpoint { .. })
}
