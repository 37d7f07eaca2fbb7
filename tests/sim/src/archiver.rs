//! A simulated archiver, the task of a coordinator that moves finished cycles to the store. Like
//! `services/coordinator` it reads the facts of a cycle, stores them, writes the `archived` fact
//! and then purges the log. Several may work on the same cycle.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use wire::{Digest, Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use crate::{
    peer::{Command, Input, Peer, Reply, Request},
    server::PAGE,
    store::{StoreOutcome, archive_digest},
    task,
};

const REPLY_MS: u64 = 1_500;
const TRIES_MAX: u32 = 6;
const LOOK_MS: u64 = 2_000;
const BACKOFF_MAX_MS: u64 = 300_000;

/// Generate orders, samples, scores and verdicts, which are purged one after the other.
const BULKY_KINDS: usize = 4;

const TICK: u64 = 0;
const FIRST_ID: u64 = 1;

pub(crate) struct Archiver {
    keep: usize,
    runs: BTreeMap<RunId, RunProgress>,
    known_sequence: u64,
    caught_up: bool,
    leads: bool,
    task: Option<ArchiveTask>,
    /// The pending request, its id, and the number of times it was sent.
    request: Option<(u64, Request, u32)>,
    next_id: u64,
}

#[derive(Default)]
struct RunProgress {
    /// Finished cycles, each with the sequence of the fact that ended it.
    finished: BTreeMap<u32, u64>,
    archived: BTreeSet<u32>,
    purged: BTreeSet<u32>,
    /// The time of the next attempt, and the last pause.
    backoff: (u64, u64),
}

struct ArchiveTask {
    run: RunId,
    cycle: u32,
    done: u64,
    stage: Stage,
}

enum Stage {
    FindArchived,
    FindSelection,
    Read(Vec<Rc<Record>>),
    /// The digest of the archive, and the number of its records.
    Store(String, u64),
    Publish,
    Confirm,
    Purge(usize),
}

impl Archiver {
    pub(crate) fn new(keep: u32) -> Self {
        Self {
            keep: keep as usize,
            runs: BTreeMap::new(),
            known_sequence: 0,
            caught_up: false,
            leads: true,
            task: None,
            request: None,
            next_id: FIRST_ID,
        }
    }

    fn send(&mut self, request: Request) -> Vec<Command> {
        self.next_id += 1;
        self.request = Some((self.next_id, request.clone(), 1));
        vec![Command::Send(self.next_id, request), Command::SetTimer(REPLY_MS, self.next_id)]
    }

    fn apply_record(&mut self, record: &Record) {
        self.known_sequence = self.known_sequence.max(record.sequence);
        let run = &record.fact.subject.run;
        match (&record.fact.subject.key, &record.fact.body) {
            (_, FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(_)), .. })) => {
                self.runs.entry(run.clone()).or_default();
            }
            (FactKey::CycleDone { cycle }, _) => {
                if let Some(progress) = self.runs.get_mut(run) {
                    progress.finished.insert(*cycle, record.sequence);
                }
            }
            (FactKey::Archived { cycle }, _) => {
                if let Some(progress) = self.runs.get_mut(run) {
                    progress.archived.insert(*cycle);
                }
            }
            _ => {}
        }
    }

    fn next_task(&self, now_ms: u64) -> Option<ArchiveTask> {
        let due = self.runs.iter().filter(|(_, progress)| progress.backoff.0 <= now_ms);
        let mut tasks = due.filter_map(|(run, progress)| {
            let let_go = progress.finished.len().saturating_sub(self.keep);
            progress.finished.iter().enumerate().find_map(|(place, (cycle, done))| {
                let stage = if !progress.archived.contains(cycle) {
                    Stage::FindArchived
                } else if place < let_go && !progress.purged.contains(cycle) {
                    Stage::Purge(0)
                } else {
                    return None;
                };
                Some(ArchiveTask { run: run.clone(), cycle: *cycle, done: *done, stage })
            })
        });
        tasks.next()
    }

    /// Begins the next task, or reads the log.
    fn look_around(&mut self, now_ms: u64) -> Vec<Command> {
        if self.request.is_some() {
            return Vec::new();
        }
        let task = if self.caught_up && self.leads { self.next_task(now_ms) } else { None };
        match task {
            Some(task) => self.continue_task(task),
            None => self.send(Request::After(self.known_sequence)),
        }
    }

    /// Sends the request of the task's stage.
    fn continue_task(&mut self, task: ArchiveTask) -> Vec<Command> {
        let ArchiveTask { run, cycle, done, stage } = &task;
        let (run, cycle, up_to) = (run.clone(), *cycle, *done);
        let get = |key| Request::Get(Subject::new(&run, key).to_string());
        let request = match stage {
            Stage::FindArchived | Stage::Confirm => get(FactKey::Archived { cycle }),
            Stage::FindSelection => get(FactKey::Selection { cycle }),
            Stage::Read(records) => {
                let after = records.last().map_or(0, |record| record.sequence);
                Request::ReadCycle { run, cycle, after, up_to }
            }
            Stage::Purge(kind) => Request::Purge { run, cycle, kind: *kind, up_to },
            Stage::Store(..) | Stage::Publish => {
                unreachable!("sent with what the stage before has made")
            }
        };
        self.task = Some(task);
        self.send(request)
    }

    fn handle_reply(&mut self, now_ms: u64, request: &Request, reply: Reply) -> Vec<Command> {
        if let (Request::After(_), Reply::Records(records, end)) = (request, &reply) {
            if *end < self.known_sequence {
                return vec![Command::Die];
            }
            records.iter().for_each(|record| self.apply_record(record));
            if records.len() < PAGE {
                self.caught_up = true;
                // The next tick reads again.
                let task = if self.leads { self.next_task(now_ms) } else { None };
                return task.map_or_else(Vec::new, |task| self.continue_task(task));
            }
            return self.look_around(now_ms);
        }
        let Some(task) = self.task.take() else { return Vec::new() };
        let ArchiveTask { run, cycle, done, stage } = task;
        let at = |stage| ArchiveTask { run: run.clone(), cycle, done, stage };
        match (stage, request, reply) {
            (Stage::FindArchived | Stage::Confirm, _, Reply::Record(Some(record))) => {
                self.apply_record_of_task(&record);
                self.end_task(now_ms, &run, true)
            }
            (Stage::FindArchived, _, Reply::Record(None)) => {
                self.continue_task(at(Stage::FindSelection))
            }
            (Stage::FindSelection, Request::Get(_), Reply::Record(found)) => {
                match found.as_ref().map(|record| &record.fact.body) {
                    Some(FactBody::Selected(selected)) if selected.kept > 0 => {
                        self.task = Some(at(Stage::FindSelection));
                        let dataset = selected.dataset.iter().map(|blob| blob.digest.clone());
                        self.send(Request::Fetch(dataset.collect()))
                    }
                    _ => self.continue_task(at(Stage::Read(Vec::new()))),
                }
            }
            (Stage::FindSelection, _, Reply::Stored(StoreOutcome::Done)) => {
                self.continue_task(at(Stage::Read(Vec::new())))
            }
            (Stage::Read(mut records), _, Reply::Records(more, _)) => {
                let is_last = more.len() < PAGE;
                records.extend(more);
                if !is_last {
                    return self.continue_task(at(Stage::Read(records)));
                }
                let count = records.len() as u64;
                self.task = Some(at(Stage::Store(archive_digest(&records), count)));
                self.send(Request::StoreArchive(Rc::new(records)))
            }
            (Stage::Store(digest, records), _, Reply::Stored(StoreOutcome::Done)) => {
                let digest: Digest = digest.parse().expect("a digest that was just formatted");
                let tree = Some(task::tree(&digest));
                let body = FactBody::Archived(v1::Archived { cycle, tree, records });
                let subject = Subject::new(&run, FactKey::Archived { cycle });
                self.task = Some(at(Stage::Publish));
                self.send(Request::Publish(Rc::new(Fact { subject, body })))
            }
            (Stage::Publish, _, Reply::Published(_)) => self.continue_task(at(Stage::Confirm)),
            (Stage::Purge(kind), _, Reply::Purged) if kind + 1 < BULKY_KINDS => {
                self.continue_task(at(Stage::Purge(kind + 1)))
            }
            (Stage::Purge(_), _, Reply::Purged) => {
                if let Some(progress) = self.runs.get_mut(&run) {
                    progress.purged.insert(cycle);
                }
                self.end_task(now_ms, &run, true)
            }
            _ => self.end_task(now_ms, &run, false),
        }
    }

    /// Applies a record that the log has not delivered in order yet.
    fn apply_record_of_task(&mut self, record: &Record) {
        let known = self.known_sequence;
        self.apply_record(record);
        self.known_sequence = known;
    }

    fn end_task(&mut self, now_ms: u64, run: &RunId, succeeded: bool) -> Vec<Command> {
        self.task = None;
        if let Some(progress) = self.runs.get_mut(run) {
            let pause = (2 * progress.backoff.1).clamp(LOOK_MS, BACKOFF_MAX_MS);
            progress.backoff = if succeeded { (0, 0) } else { (now_ms + pause, pause) };
        }
        self.look_around(now_ms)
    }

    fn handle_timeout(&mut self, now_ms: u64, id: u64) -> Vec<Command> {
        let Some((_, request, tries)) = self.request.as_mut().filter(|pending| pending.0 == id)
        else {
            return Vec::new();
        };
        *tries += 1;
        if *tries <= TRIES_MAX {
            return vec![Command::Send(id, request.clone()), Command::SetTimer(REPLY_MS, id)];
        }
        self.request = None;
        match self.task.take() {
            Some(task) => self.end_task(now_ms, &task.run, false),
            None => self.look_around(now_ms),
        }
    }
}

impl Peer for Archiver {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = vec![Command::SetTimer(LOOK_MS, TICK)];
                commands.extend(self.look_around(now_ms));
                commands
            }
            Input::Reply(id, reply) => match self.request.take_if(|(pending, ..)| *pending == id) {
                Some((_, request, _)) => self.handle_reply(now_ms, &request, reply),
                None => Vec::new(),
            },
            Input::Timer(TICK) => {
                // Often both lead for a moment.
                self.leads = random.f64() < 0.7;
                let mut commands = vec![Command::SetTimer(LOOK_MS, TICK)];
                if self.request.is_none() {
                    commands.extend(self.send(Request::After(self.known_sequence)));
                }
                commands
            }
            Input::Timer(id) => self.handle_timeout(now_ms, id),
            Input::Notify | Input::Status(_) | Input::Deliver(_) | Input::Healed => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        let keep = u32::try_from(self.keep).unwrap_or(u32::MAX);
        *self = Self { next_id: FIRST_ID + (incarnation << 32), ..Self::new(keep) };
    }
}
