//! What is known of one run, derived from its facts alone.

use std::collections::{BTreeMap, BTreeSet};

use wire::{JobId, RunId, SuiteName, v1};

use crate::{
    curriculum::Seen,
    gates,
    ledger::{Ledger, Standing},
    proof::Proofs,
    visits::visit,
};

/// One run, folded from its facts.
#[derive(Debug, Clone)]
pub struct Run {
    pub id: RunId,
    pub spec: v1::Spec,
    pub submitted_ms: u64,
    pub ended_ms: Option<u64>,
    /// Sequence of the last fact folded.
    pub sequence: u64,
    /// The last control written, by number.
    pub controls: u64,
    pub paused: bool,
    pub cancelled: bool,
    /// 1 + the resumes so far: agents drop orders of earlier rounds.
    pub round: u32,
    pub cycles: BTreeMap<u32, Cycle>,
    pub failures: Vec<v1::Failure>,
    /// The one that ends the run: nobody will train.
    pub(crate) untrained: Option<v1::Failure>,
    /// What was seen of each prompt, by its line.
    pub prompts: BTreeMap<u32, Seen>,
    /// What agents showed of the policies they sampled with.
    pub proofs: Proofs,
    pub quarantines: Vec<v1::Quarantine>,
    pub done: Option<v1::Done>,
    /// Facts that contradict others. Empty unless somebody lied or there is a bug.
    pub anomalies: Vec<Anomaly>,
}

/// A fact that does not follow from the ones before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anomaly {
    pub sequence: u64,
    pub subject: String,
    pub what: String,
}

/// One turn of generate, verify, select, train, measure.
#[derive(Debug, Clone, Default)]
pub struct Cycle {
    pub plan: Option<v1::Plan>,
    pub jobs: BTreeMap<JobId, Job>,
    /// Jobs that others took the place of, as their samples were of something else.
    pub redrawn: BTreeSet<JobId>,
    pub selected: Option<v1::Selected>,
    pub train_ordered: Ordered,
    /// Whose tokens show what was trained; empty where nothing was.
    pub canary: String,
    pub checkpoints: BTreeMap<u32, v1::Checkpoint>,
    pub evals: BTreeMap<(u32, SuiteName), v1::Eval>,
    /// Evals nobody will try again.
    pub evals_failed: BTreeSet<(u32, SuiteName)>,
    pub done: Option<v1::CycleDone>,
    pub archived: Option<v1::Archived>,
    pub times: Times,
    pub(crate) ledger: Ledger,
}

/// When the log accepted the facts that separate the phases, in milliseconds since 1970.
#[derive(Debug, Clone, Default)]
pub struct Times {
    pub planned: Option<u64>,
    pub last_samples: Option<u64>,
    pub last_verdicts: Option<u64>,
    pub train_ordered: Option<u64>,
    pub trained: Option<u64>,
    pub last_measure: Option<u64>,
}

/// One job of a plan.
#[derive(Debug, Clone)]
pub struct Job {
    pub purpose: v1::Purpose,
    /// Of held-out samples: whose prompts they are of. Empty: the run's own.
    pub suite: String,
    /// What its samples must be: a prompt's line, first index, count.
    pub draws: Vec<v1::plan::Draw>,
    pub ordered: Ordered,
    /// The prompts as ordered. Dropped when the cycle has selected.
    pub requests: Vec<v1::generate_order::Request>,
    pub samples: Option<Samples>,
    pub verdicts: Option<v1::Verdicts>,
    /// Why nobody will try it again. What comes in afterwards is too late.
    pub set_aside: Option<String>,
    /// Where the ledger has it.
    pub(crate) booked: Option<Standing>,
}

/// How often something was ordered, and when last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ordered {
    /// Highest attempt; 0 when there is none yet.
    pub attempt: u32,
    /// The round of the last order, and how many orders that round has seen.
    pub round: u32,
    pub in_round: u32,
    pub at_ms: u64,
}

/// The samples accepted for a job. Texts are dropped when the cycle has selected.
#[derive(Debug, Clone)]
pub struct Samples {
    pub sequence: u64,
    pub agent: String,
    pub engine: String,
    pub count: u32,
    pub wall_s: f64,
    /// 0 where nobody measured.
    pub joules: f64,
    /// Why none of them may be used, if so.
    pub void: Option<String>,
    pub canary: Vec<f32>,
    pub samples: Vec<v1::samples::Sample>,
}

/// What generates in a cycle: a model, and the adapter on it if there is one.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    pub base: v1::Tree,
    pub adapter: Option<v1::Tree>,
}

/// What a run is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Plan,
    Generate,
    Verify,
    Select,
    Train,
    Evaluate,
    Done,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Generate => "generate",
            Self::Verify => "verify",
            Self::Select => "select",
            Self::Train => "train",
            Self::Evaluate => "evaluate",
            Self::Done => "done",
        }
    }
}

impl Run {
    pub fn new(id: RunId, spec: v1::Spec, at_ms: u64) -> Self {
        Self {
            id,
            spec,
            submitted_ms: at_ms,
            ended_ms: None,
            sequence: 0,
            controls: 0,
            paused: false,
            cancelled: false,
            round: 1,
            cycles: BTreeMap::new(),
            failures: Vec::new(),
            untrained: None,
            prompts: BTreeMap::new(),
            proofs: Proofs::default(),
            quarantines: Vec::new(),
            done: None,
            anomalies: Vec::new(),
        }
    }

    pub fn raft(&self) -> Option<&v1::spec::Raft> {
        match &self.spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => Some(raft),
            Some(v1::spec::Kind::Sft(_) | v1::spec::Kind::Watched(_)) | None => None,
        }
    }

    /// The training is somebody else's: nothing is ordered, checkpoints come as they are found.
    pub fn is_watched(&self) -> bool {
        matches!(self.spec.kind, Some(v1::spec::Kind::Watched(_)))
    }

    /// The kind of run, as users write it.
    pub fn kind(&self) -> &'static str {
        self.spec.kind_name()
    }

    /// The last cycle's number: a RAFT run measures its base as cycle 0, then turns `cycles` times.
    pub fn last_cycle(&self) -> u32 {
        self.raft().map_or(0, |raft| raft.cycles)
    }

    /// The cycle at work: the first that is not done.
    pub fn current_cycle(&self) -> u32 {
        (0..=self.last_cycle())
            .find(|number| self.cycles.get(number).is_none_or(|cycle| cycle.done.is_none()))
            .unwrap_or(self.last_cycle())
    }

    /// The cycle that is worked on: the first that is not done, or the next where that one is only
    /// being measured.
    pub fn cycle_at_work(&self) -> u32 {
        let number = self.current_cycle();
        let passed_on = |raft| self.cycles.get(&number).is_some_and(|now| now.is_passed_on(raft));
        let begun = self.cycles.get(&(number + 1)).is_some_and(|next| next.plan.is_some());
        if begun && self.raft().is_some_and(passed_on) { number + 1 } else { number }
    }

    /// The checkpoint that the given cycle goes on from: the last final one of the cycles before
    /// it, or the best one that they were rolled back to. `None` for the first cycle.
    pub fn parent(&self, cycle: u32) -> Option<&v1::Checkpoint> {
        self.cycles.range(..cycle).rev().find_map(|(_, cycle)| {
            let done = cycle.done.as_ref();
            let back = done.filter(|done| done.then() == v1::gates::Then::RollBack);
            match back {
                Some(done) => self.cycles.get(&done.best)?.final_checkpoint(),
                None => cycle.final_checkpoint(),
            }
        })
    }

    /// The cycle after which the run's gates ended it, if they did.
    pub fn stopped_after(&self) -> Option<u32> {
        let stops = |cycle: &Cycle| {
            cycle.done.as_ref().is_some_and(|done| done.then() == v1::gates::Then::Stop)
        };
        self.cycles.iter().find(|(_, cycle)| stops(cycle)).map(|(number, _)| *number)
    }

    /// What was seen of the prompt in a line.
    pub fn seen(&self, line: u32) -> Seen {
        self.prompts.get(&line).copied().unwrap_or_default()
    }

    pub fn state(&self) -> v1::run::State {
        use v1::{done::Status, run::State};
        match self.done.as_ref().map(v1::Done::status) {
            Some(Status::Succeeded) => State::Succeeded,
            Some(Status::Failed | Status::Unspecified) => State::Failed,
            Some(Status::Cancelled) => State::Cancelled,
            None if self.paused => State::Paused,
            None => State::Running,
        }
    }

    pub fn phase(&self) -> Phase {
        if self.done.is_some() {
            return Phase::Done;
        }
        match self.cycles.get(&self.cycle_at_work()).map_or(Phase::Plan, Cycle::phase) {
            Phase::Plan if self.is_watched() => Phase::Train,
            phase => phase,
        }
    }
}

impl Policy {
    /// What a checkpoint is, as a policy. `None` when it lacks the trees it must name.
    pub fn of(checkpoint: &v1::Checkpoint) -> Option<Self> {
        let tree = checkpoint.tree.clone()?;
        match checkpoint.content() {
            v1::checkpoint::Content::Adapter => {
                Some(Self { base: checkpoint.base.clone()?, adapter: Some(tree) })
            }
            v1::checkpoint::Content::Model => Some(Self { base: tree, adapter: None }),
            v1::checkpoint::Content::Unspecified => None,
        }
    }

    /// What generates: the adapter, or the model alone.
    pub fn tree(&self) -> &v1::Tree {
        self.adapter.as_ref().unwrap_or(&self.base)
    }

    pub fn adapter_manifest(&self) -> &str {
        self.adapter.as_ref().map_or("", |tree| &tree.manifest)
    }
}

impl Ordered {
    /// Notes an order.
    pub(crate) fn note(&mut self, attempt: u32, round: u32, at_ms: u64) {
        self.attempt = self.attempt.max(attempt);
        if round > self.round {
            (self.round, self.in_round) = (round, 0);
        }
        self.in_round = self.in_round.saturating_add(1);
        self.at_ms = at_ms;
    }
}

impl Job {
    pub(crate) fn new(purpose: v1::Purpose, suite: String, draws: Vec<v1::plan::Draw>) -> Self {
        Self {
            purpose,
            suite,
            draws,
            ordered: Ordered::default(),
            requests: Vec::new(),
            samples: None,
            verdicts: None,
            set_aside: None,
            booked: None,
        }
    }

    /// Neither made nor set aside.
    pub fn needs_samples(&self) -> bool {
        self.samples.is_none() && self.set_aside.is_none()
    }

    /// Judged, or set aside.
    pub fn is_settled(&self) -> bool {
        self.verdicts.is_some() || self.set_aside.is_some()
    }

    /// What was thought of each sample, by its prompt and index.
    pub(crate) fn verdicts_by_sample(&self) -> BTreeMap<(&str, u32), &v1::verdicts::Verdict> {
        let verdicts = self.verdicts.iter().flat_map(|verdicts| &verdicts.verdicts);
        verdicts.map(|verdict| ((verdict.prompt_id.as_str(), verdict.index), verdict)).collect()
    }

    pub fn planned(&self) -> u32 {
        self.draws.iter().fold(0, |sum, draw| sum.saturating_add(draw.count))
    }
}

impl Cycle {
    pub fn final_checkpoint(&self) -> Option<&v1::Checkpoint> {
        self.checkpoints.values().rev().find(|checkpoint| checkpoint.r#final)
    }

    /// Whether the next cycle goes on from what this one trained, whatever it is found to be: it
    /// begins while this one is measured.
    pub(crate) fn is_passed_on(&self, raft: &v1::spec::Raft) -> bool {
        self.final_checkpoint().is_some() && !gates::may_turn(raft)
    }

    /// Jobs of one purpose, in plan order.
    pub fn jobs_for(&self, purpose: v1::Purpose) -> impl Iterator<Item = (&JobId, &Job)> {
        self.jobs.iter().inspect(|_| visit()).filter(move |(_, job)| job.purpose == purpose)
    }

    /// Jobs of one set of prompts, in plan order.
    pub(crate) fn jobs_of(
        &self,
        purpose: v1::Purpose,
        suite: &str,
    ) -> impl Iterator<Item = (&JobId, &Job)> {
        self.jobs_for(purpose).filter(move |(_, job)| job.suite == suite)
    }

    pub fn has_all_samples(&self, purpose: v1::Purpose) -> bool {
        self.jobs_for(purpose).all(|(_, job)| job.samples.is_some())
    }

    /// Whether every job of this purpose is judged or set aside.
    pub fn is_settled(&self, purpose: v1::Purpose) -> bool {
        self.account(purpose).unsettled() == 0
    }

    /// Samples of this purpose that nobody will make or judge.
    pub(crate) fn set_aside(&self, purpose: v1::Purpose) -> u32 {
        let jobs = self.jobs_for(purpose).filter(|(_, job)| job.set_aside.is_some());
        jobs.fold(0, |sum, (_, job)| sum.saturating_add(job.planned()))
    }

    /// Whether every checkpoint has every suite's figures, or will never have them.
    pub fn has_all_evals(&self, suites: &[v1::Suite]) -> bool {
        self.checkpoints.keys().all(|step| {
            suites.iter().all(|suite| {
                SuiteName::new(suite.name.as_str()).is_ok_and(|name| {
                    let key = (*step, name);
                    self.evals.contains_key(&key) || self.evals_failed.contains(&key)
                })
            })
        })
    }

    /// Evals that will never be there.
    pub(crate) fn evals_missing(&self) -> usize {
        self.evals_failed.iter().filter(|key| !self.evals.contains_key(*key)).count()
    }

    fn phase(&self) -> Phase {
        use v1::Purpose::Train;
        let train = self.account(Train);
        if self.done.is_some() {
            Phase::Done
        } else if self.final_checkpoint().is_some() {
            Phase::Evaluate
        } else if self.train_ordered.attempt > 0 {
            Phase::Train
        } else if train.jobs() == 0 {
            Phase::Plan
        } else if train.missing() > 0 {
            Phase::Generate
        } else if train.unsettled() > 0 {
            Phase::Verify
        } else {
            Phase::Select
        }
    }
}
