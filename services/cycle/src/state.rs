//! The state of one run, derived from its facts alone.

pub(crate) mod canary_votes;
pub(crate) mod job_index;
mod prompt_history;
mod queue_status;

use std::collections::{BTreeMap, BTreeSet};

use wire::{AgentId, JobId, RunId, SuiteName, v1};

use self::job_index::{JobIndex, JobStage};
use crate::{cost_probe::count_visit, fold::late_work::LateWork, split_training::SplitTraining};

pub(crate) use self::queue_status::queue_window;
pub use self::{
    canary_votes::CanaryVotes,
    prompt_history::PromptHistory,
    queue_status::{QueueStatus, clock_text, describe_queue_wait},
};

/// One run, folded from its facts.
///
/// A run is a sequence of cycles. Cycle 0 of a RAFT run evaluates the base model; SFT and watched
/// runs consist of cycle 0 only. `fold` is the only module that changes a run; `planner` reads it
/// and returns the facts to write next.
#[derive(Debug, Clone)]
pub struct Run {
    pub id: RunId,
    /// The spec without the cycles of a fork, which are in `cycles`.
    pub spec: v1::Spec,
    /// Author of the spec; `None` in an open fleet.
    pub author: Option<AgentId>,
    /// Time of the spec fact, in milliseconds since 1970.
    pub submitted_ms: u64,
    /// Time of the done fact, in milliseconds since 1970.
    pub ended_ms: Option<u64>,
    /// Sequence of the spec fact.
    pub spec_sequence: u64,
    /// Sequence of the last fact folded.
    pub sequence: u64,
    /// Number of the last control fact.
    pub last_control: u64,
    /// No work is ordered while set.
    pub paused: bool,
    /// The status in the queue of the run's pool.
    pub queue: QueueStatus,
    /// The milliseconds for which the run was paused or queued, up to the last control. A halt that
    /// has not ended is not included.
    pub halted_ms: u64,
    /// The time since which the run is paused or queued, in milliseconds since 1970; `None` while it
    /// works.
    pub halted_since_ms: Option<u64>,
    /// The user of the last pause, if known.
    pub paused_by: Option<AgentId>,
    /// The user's reason for the last pause; may be empty.
    pub pause_reason: String,
    /// A user has cancelled the run.
    pub cancelled: bool,
    /// The user who has cancelled the run, if known.
    pub cancelled_by: Option<AgentId>,
    /// The user's reason for the cancellation; may be empty.
    pub cancel_reason: String,
    /// 1 + the number of resumes. Agents drop orders of earlier rounds.
    pub round: u32,
    pub cycles: BTreeMap<u32, Cycle>,
    /// The first cycle of the run's own facts. Cycles before it are those of the run that the spec
    /// forks; 0 without a fork.
    pub first_cycle: u32,
    /// Failures that agents reported, in log order.
    pub failures: Vec<v1::Failure>,
    pub(crate) training_failure: Option<v1::Failure>,
    /// Judged and passed samples of each prompt, by line of the prompt file.
    pub prompt_histories: BTreeMap<u32, PromptHistory>,
    /// Canary log-probabilities that agents reported, and the quarantines that followed.
    pub canary_votes: CanaryVotes,
    pub quarantines: Vec<v1::Quarantine>,
    pub done: Option<v1::Done>,
    pub(crate) late_work: LateWork,
    /// Facts that contradict others. Empty unless a participant writes wrong facts or there is a
    /// bug.
    pub anomalies: Vec<FactAnomaly>,
}

/// A fact that does not follow from the ones before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FactAnomaly {
    pub sequence: u64,
    pub subject: String,
    pub description: String,
}

/// One cycle of a run: generate, verify, select, train, evaluate.
#[derive(Debug, Clone, Default)]
pub struct Cycle {
    /// `None` before planning and after archiving.
    pub plan: Option<v1::Plan>,
    /// Includes replacements of quarantined jobs. Empty after archiving.
    pub jobs: BTreeMap<JobId, PlannedJob>,
    /// Jobs whose samples came from wrong weights and that other jobs have replaced.
    pub replaced_jobs: BTreeSet<JobId>,
    pub selected: Option<v1::Selected>,
    pub train_orders: OrderHistory,
    /// The training, if the spec asks for several boxes.
    pub split_training: SplitTraining,
    /// Text whose log-probabilities identify the trained weights; empty if the cycle has selected
    /// nothing or the spec has no canary.
    pub canary_text: String,
    /// Checkpoints by training step.
    pub checkpoints: BTreeMap<u32, v1::Checkpoint>,
    /// Evals by step and suite.
    pub evals: BTreeMap<(u32, SuiteName), v1::Eval>,
    /// Pass rates of the final checkpoint.
    pub pass_rates: Option<v1::PassRates>,
    /// Finally failed evals, by step and suite.
    pub failed_evals: BTreeSet<(u32, SuiteName)>,
    pub done: Option<v1::CycleDone>,
    /// Set once the cycle's bulky facts are in the store.
    pub archived: Option<v1::Archived>,
    pub times: PhaseTimes,
    pub(crate) job_index: JobIndex,
}

/// The log times of the facts that separate the phases, in milliseconds since 1970.
#[derive(Debug, Clone, Default)]
pub struct PhaseTimes {
    pub planned: Option<u64>,
    /// Latest training samples.
    pub last_samples: Option<u64>,
    /// Latest verdicts on training samples, or scores of them.
    pub last_verdicts: Option<u64>,
    pub train_ordered: Option<u64>,
    pub trained: Option<u64>,
    /// Latest eval, held-out samples or held-out verdicts.
    pub last_evaluation: Option<u64>,
}

/// One generate job of a plan, with its samples and verdicts.
#[derive(Debug, Clone)]
pub struct PlannedJob {
    /// Training or held-out.
    pub purpose: v1::Purpose,
    /// Prompt suite of held-out samples; empty for the run's own prompts.
    pub suite: String,
    /// Samples of the job: line of the prompt, first index, count.
    pub draws: Vec<v1::plan::Draw>,
    pub orders: OrderHistory,
    /// Prompts as ordered. Dropped when the cycle has selected.
    pub requests: Vec<v1::generate_order::Request>,
    pub samples: Option<AcceptedSamples>,
    pub verdicts: Option<v1::Verdicts>,
    /// Log-probabilities by the run's teacher. Dropped when the cycle has selected.
    pub scores: Option<v1::Scores>,
    /// The results that the samples need.
    pub needs: JobNeeds,
    /// Reason why the job was given up after a final failure. Later results are ignored.
    pub set_aside: Option<String>,
    /// `None` if the job is not indexed.
    pub(crate) indexed_stage: Option<JobStage>,
}

/// The results that a job's samples need before they can be selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobNeeds {
    pub verdicts: bool,
    /// The log-probabilities by the run's teacher.
    pub scores: bool,
}

/// The number of orders of a job or a training, and the time of the last one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OrderHistory {
    /// 0 without any order.
    pub last_attempt: u32,
    /// Round of the last order.
    pub round: u32,
    pub orders_in_round: u32,
    /// Milliseconds since 1970.
    pub last_ordered_ms: u64,
}

/// The accepted samples of a job.
#[derive(Debug, Clone)]
pub struct AcceptedSamples {
    /// Sequence of the samples fact.
    pub sequence: u64,
    pub agent: String,
    pub engine: String,
    pub count: u32,
    /// Wall time of the job in seconds.
    pub wall_s: f64,
    /// Energy of the job; 0 if not measured.
    pub joules: f64,
    /// Reason why none of the samples may be used, if any.
    pub void_reason: Option<String>,
    /// Log-probabilities of the canary text's last tokens under the weights that drew the samples,
    /// in nats; empty if not reported.
    pub canary: Vec<f32>,
    /// Empty if they are void, and once the cycle has selected.
    pub samples: Vec<v1::samples::Sample>,
}

/// The weights that samples are drawn from or that a training starts from: a base model, optionally
/// with an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyWeights {
    pub base: v1::Tree,
    /// `None` for the base alone.
    pub adapter: Option<v1::Tree>,
}

/// The phase that a run is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunPhase {
    Plan,
    Generate,
    Verify,
    Select,
    Train,
    Evaluate,
    Done,
}

impl RunPhase {
    /// Returns the lower-case name.
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
    /// Creates the state of a run without any fact after its spec; `at_ms` is the submission time
    /// in milliseconds since 1970.
    pub fn new(id: RunId, spec: v1::Spec, at_ms: u64) -> Self {
        let queue = QueueStatus::from_spec(&spec);
        Self {
            id,
            spec,
            author: None,
            submitted_ms: at_ms,
            ended_ms: None,
            spec_sequence: 0,
            sequence: 0,
            last_control: 0,
            paused: false,
            queue,
            halted_ms: 0,
            halted_since_ms: queue.is_waiting().then_some(at_ms),
            paused_by: None,
            pause_reason: String::new(),
            cancelled: false,
            cancelled_by: None,
            cancel_reason: String::new(),
            round: 1,
            cycles: BTreeMap::new(),
            first_cycle: 0,
            failures: Vec::new(),
            training_failure: None,
            prompt_histories: BTreeMap::new(),
            canary_votes: CanaryVotes::default(),
            late_work: LateWork::default(),
            quarantines: Vec::new(),
            done: None,
            anomalies: Vec::new(),
        }
    }

    /// Returns the RAFT part of the spec; `None` for an SFT or watched run.
    pub fn raft_spec(&self) -> Option<&v1::spec::Raft> {
        match &self.spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => Some(raft),
            Some(v1::spec::Kind::Sft(_) | v1::spec::Kind::Watched(_)) | None => None,
        }
    }

    /// Returns the training settings of the spec; `None` for a watched run.
    pub(crate) fn spec_training(&self) -> Option<&v1::Training> {
        match self.spec.kind.as_ref()? {
            v1::spec::Kind::Sft(sft) => sft.training.as_ref(),
            v1::spec::Kind::Raft(raft) => raft.training.as_ref(),
            v1::spec::Kind::Watched(_) => None,
        }
    }

    /// Returns true if the training is external: nothing is ordered, and checkpoints are recorded
    /// as they are found.
    pub fn is_watched(&self) -> bool {
        matches!(self.spec.kind, Some(v1::spec::Kind::Watched(_)))
    }

    /// Returns the kind of the run, as in spec files: `raft`, `sft` or `watched`.
    pub fn kind_name(&self) -> &'static str {
        self.spec.kind_name()
    }

    /// Returns the planned number of the last cycle. A RAFT run evaluates its base model as cycle 0
    /// and then runs `cycles` more; other runs have only cycle 0.
    pub fn last_cycle(&self) -> u32 {
        self.raft_spec().map_or(0, |raft| raft.cycles)
    }

    /// Returns the number of the first cycle that is not done, or of the last cycle if all are
    /// done.
    pub fn current_cycle(&self) -> u32 {
        (0..=self.last_cycle())
            .find(|number| self.cycles.get(number).is_none_or(|cycle| cycle.done.is_none()))
            .unwrap_or(self.last_cycle())
    }

    /// Returns the number of the cycle that is worked on: the first that is not done, or the last
    /// if all are done. In a RAFT run it is the one after that if it is planned already, which
    /// happens while its predecessor is evaluated and no gate can reject that one's checkpoint.
    pub fn active_cycle(&self) -> u32 {
        let number = self.current_cycle();
        let passed_on =
            |raft| self.cycles.get(&number).is_some_and(|now| now.allows_pipelining(raft));
        let begun = self.cycles.get(&(number + 1)).is_some_and(|next| next.plan.is_some());
        if begun && self.raft_spec().is_some_and(passed_on) { number + 1 } else { number }
    }

    /// Returns the checkpoint that a cycle continues from: the final one of the latest earlier
    /// cycle that has any, or the best one if that cycle was rolled back. `None` if no earlier
    /// cycle has one.
    pub(crate) fn parent_checkpoint(&self, cycle: u32) -> Option<&v1::Checkpoint> {
        self.cycles.range(..cycle).rev().find_map(|(_, cycle)| {
            let done = cycle.done.as_ref();
            let back = done.filter(|done| done.then() == v1::gates::Then::RollBack);
            match back {
                Some(done) => self.cycles.get(&done.best)?.final_checkpoint(),
                None => cycle.final_checkpoint(),
            }
        })
    }

    /// Returns the cycle after which a gate (a limit on metrics in the spec) stopped the run;
    /// `None` if no gate did. A gate that stopped a forked run does not stop the fork.
    pub(crate) fn stopped_after(&self) -> Option<u32> {
        let stops = |cycle: &Cycle| {
            cycle.done.as_ref().is_some_and(|done| done.then() == v1::gates::Then::Stop)
        };
        let mut own = self.cycles.range(self.first_cycle..);
        own.find(|(_, cycle)| stops(cycle)).map(|(number, _)| *number)
    }

    /// Returns how many samples of a prompt were judged and passed in earlier cycles; zeros if none
    /// were. `line` is its line in the prompts file, counted from 0.
    pub(crate) fn prompt_history(&self, line: u32) -> PromptHistory {
        self.prompt_histories.get(&line).copied().unwrap_or_default()
    }

    /// Returns true if no work may be ordered: the run is paused, or waits in the queue.
    pub fn is_halted(&self) -> bool {
        self.paused || self.queue.is_waiting()
    }

    /// Returns true if the run waits or works in the queue of its pool.
    pub fn is_queued(&self) -> bool {
        let takes_part = self.queue.is_waiting() || self.queue == QueueStatus::Active;
        takes_part && !self.cancelled && self.done.is_none()
    }

    /// Returns the time in milliseconds that the run worked until `now_ms` or its end: without
    /// pauses and queue.
    pub fn worked_ms(&self, now_ms: u64) -> u64 {
        let end = self.ended_ms.unwrap_or(now_ms);
        let halted = self.halted_since_ms.map_or(0, |since| end.saturating_sub(since));
        end.saturating_sub(self.submitted_ms).saturating_sub(self.halted_ms + halted)
    }

    /// Returns the state that users see: running, paused, queued, succeeded, failed or cancelled.
    pub fn current_state(&self) -> v1::run::State {
        use v1::{done::Status, run::State};
        match self.done.as_ref().map(v1::Done::status) {
            Some(Status::Succeeded) => State::Succeeded,
            Some(Status::Failed | Status::Unspecified) => State::Failed,
            Some(Status::Cancelled) => State::Cancelled,
            None if self.queue.is_waiting() => State::Queued,
            None if self.paused => State::Paused,
            None => State::Running,
        }
    }

    /// Returns why the run has ended or waits in the queue, or who paused it and why; empty if it
    /// runs or that is unknown.
    pub fn state_reason(&self) -> String {
        match &self.done {
            Some(done) => done.message.clone(),
            None if self.queue.is_waiting() => describe_queue_wait(&self.spec, &self.pause_reason),
            None if self.paused => describe_pause(self.paused_by.as_ref(), &self.pause_reason),
            None => String::new(),
        }
    }

    /// Returns the phase of the active cycle, or `Done` if the run has ended.
    pub fn current_phase(&self) -> RunPhase {
        if self.done.is_some() {
            return RunPhase::Done;
        }
        match self.cycles.get(&self.active_cycle()).map_or(RunPhase::Plan, Cycle::cycle_phase) {
            RunPhase::Plan if self.is_watched() => RunPhase::Train,
            phase => phase,
        }
    }
}

impl PolicyWeights {
    /// Returns the weights of a checkpoint; `None` if it lacks a tree that its content requires.
    pub(crate) fn from_checkpoint(checkpoint: &v1::Checkpoint) -> Option<Self> {
        let tree = checkpoint.tree.clone()?;
        match checkpoint.content() {
            v1::checkpoint::Content::Adapter => {
                Some(Self { base: checkpoint.base.clone()?, adapter: Some(tree) })
            }
            v1::checkpoint::Content::Model => Some(Self { base: tree, adapter: None }),
            v1::checkpoint::Content::Unspecified => None,
        }
    }

    /// Returns the adapter's files, or the base model's without one.
    pub fn adapter_or_base(&self) -> &v1::Tree {
        self.adapter.as_ref().unwrap_or(&self.base)
    }

    /// Returns the manifest digest of the adapter; empty for the base alone.
    pub fn adapter_manifest(&self) -> &str {
        self.adapter.as_ref().map_or("", |tree| &tree.manifest)
    }
}

impl OrderHistory {
    pub(crate) fn record_order(&mut self, attempt: u32, round: u32, at_ms: u64) {
        self.last_attempt = self.last_attempt.max(attempt);
        if round > self.round {
            (self.round, self.orders_in_round) = (round, 0);
        }
        self.orders_in_round = self.orders_in_round.saturating_add(1);
        self.last_ordered_ms = at_ms;
    }
}

impl PlannedJob {
    pub(crate) fn new(
        purpose: v1::Purpose,
        suite: String,
        draws: Vec<v1::plan::Draw>,
        needs: JobNeeds,
    ) -> Self {
        Self {
            purpose,
            suite,
            draws,
            orders: OrderHistory::default(),
            requests: Vec::new(),
            samples: None,
            verdicts: None,
            scores: None,
            needs,
            set_aside: None,
            indexed_stage: None,
        }
    }

    /// Returns true if the job has neither samples nor been set aside.
    pub(crate) fn needs_samples(&self) -> bool {
        self.samples.is_none() && self.set_aside.is_none()
    }

    /// Returns true if the job has all results that it needs, or was set aside.
    pub fn is_settled(&self) -> bool {
        self.has_results() || self.set_aside.is_some()
    }

    pub(crate) fn has_results(&self) -> bool {
        self.samples.is_some() && !self.awaits_verdicts() && !self.awaits_scores()
    }

    /// Returns true if none of the samples may be used.
    pub fn is_void(&self) -> bool {
        self.samples.as_ref().is_some_and(|samples| samples.void_reason.is_some())
    }

    /// Returns true if the samples need verdicts and have none.
    pub(crate) fn awaits_verdicts(&self) -> bool {
        self.needs.verdicts && self.samples.is_some() && self.verdicts.is_none()
    }

    /// Returns true if the samples need scores and have none. Void ones need none, because a scorer
    /// may have taken them for those of another purpose.
    pub(crate) fn awaits_scores(&self) -> bool {
        let to_score = self.samples.is_some() && !self.is_void();
        self.needs.scores && to_score && self.scores.is_none()
    }

    /// Indexes by prompt id and sample index.
    pub(crate) fn verdicts_by_sample(&self) -> BTreeMap<(&str, u32), &v1::verdicts::Verdict> {
        let verdicts = self.verdicts.iter().flat_map(|verdicts| &verdicts.verdicts);
        verdicts.map(|verdict| ((verdict.prompt_id.as_str(), verdict.index), verdict)).collect()
    }

    /// Returns the number of samples planned: the sum over the job's prompts.
    pub fn planned_samples(&self) -> u32 {
        self.draws.iter().fold(0, |sum, draw| sum.saturating_add(draw.count))
    }
}

/// Returns true if a gate can end the run or roll back a checkpoint, so that the next cycle has to
/// wait for the evaluation.
pub fn can_reject_checkpoint(raft: &v1::spec::Raft) -> bool {
    let Some(gates) = &raft.gates else { return false };
    let rates = gates.pass_rate.iter().chain(&gates.pass_rates);
    let of_samples = gates.diversity.iter().chain(&gates.entropy);
    let of_training = gates.dropped_tokens.iter().chain(&gates.divergence);
    let mut all = gates.perplexity.iter().chain(rates).chain(of_samples).chain(of_training);
    gates.patience > 0 || all.any(|gate| gate.then() >= v1::gates::Then::RollBack)
}

impl Cycle {
    /// Returns the final checkpoint of the cycle's training; `None` while the training is not
    /// complete.
    pub fn final_checkpoint(&self) -> Option<&v1::Checkpoint> {
        self.checkpoints.values().rev().find(|checkpoint| checkpoint.r#final)
    }

    /// Returns true if the next cycle may start while this one is evaluated: its final checkpoint
    /// exists, and no gate can reject it.
    pub(crate) fn allows_pipelining(&self, raft: &v1::spec::Raft) -> bool {
        self.final_checkpoint().is_some() && !can_reject_checkpoint(raft)
    }

    /// Iterates over the jobs of one purpose (training or held-out), in plan order.
    pub fn jobs_for(&self, purpose: v1::Purpose) -> impl Iterator<Item = (&JobId, &PlannedJob)> {
        self.jobs.iter().inspect(|_| count_visit()).filter(move |(_, job)| job.purpose == purpose)
    }

    pub(crate) fn jobs_for_suite(
        &self,
        purpose: v1::Purpose,
        suite: &str,
    ) -> impl Iterator<Item = (&JobId, &PlannedJob)> {
        self.jobs_for(purpose).filter(move |(_, job)| job.suite == suite)
    }

    /// Returns true if every job of the purpose has samples; a job that was set aside without any
    /// counts as missing.
    pub fn has_all_samples(&self, purpose: v1::Purpose) -> bool {
        self.jobs_for(purpose).all(|(_, job)| job.samples.is_some())
    }

    /// Returns true if every job of the purpose is settled, or if there are none.
    pub fn is_settled(&self, purpose: v1::Purpose) -> bool {
        self.purpose_index(purpose).unsettled_count() == 0
    }

    /// Counts the planned samples of the purpose whose jobs were set aside.
    pub(crate) fn set_aside_samples(&self, purpose: v1::Purpose) -> u32 {
        let jobs = self.jobs_for(purpose).filter(|(_, job)| job.set_aside.is_some());
        jobs.fold(0, |sum, (_, job)| sum.saturating_add(job.planned_samples()))
    }

    /// Returns true if, for each checkpoint of the cycle and each suite, the eval exists or has
    /// finally failed; also true without checkpoints.
    pub(crate) fn has_all_evals(&self, suites: &[v1::Suite]) -> bool {
        self.checkpoints.keys().all(|step| {
            suites.iter().all(|suite| {
                SuiteName::new(suite.name.as_str()).is_ok_and(|name| {
                    let key = (*step, name);
                    self.evals.contains_key(&key) || self.failed_evals.contains(&key)
                })
            })
        })
    }

    /// Returns true if the cycle's training, or a part of it, has been ordered.
    pub(crate) fn is_training_ordered(&self) -> bool {
        self.train_orders.last_attempt > 0 || !self.split_training.outer_steps.is_empty()
    }

    /// Counts the evals that have failed finally and have no result.
    pub(crate) fn missing_eval_count(&self) -> usize {
        self.failed_evals.iter().filter(|key| !self.evals.contains_key(*key)).count()
    }

    fn cycle_phase(&self) -> RunPhase {
        use v1::Purpose::Train;
        let train = self.purpose_index(Train);
        if self.done.is_some() {
            RunPhase::Done
        } else if self.final_checkpoint().is_some() {
            RunPhase::Evaluate
        } else if self.is_training_ordered() {
            RunPhase::Train
        } else if train.job_count() == 0 {
            RunPhase::Plan
        } else if train.missing_count() > 0 {
            RunPhase::Generate
        } else if train.unsettled_count() > 0 {
            RunPhase::Verify
        } else {
            RunPhase::Select
        }
    }
}

/// Returns words such as `by ann: the fan is loud`; empty if both are unknown.
pub fn describe_pause(user: Option<&AgentId>, reason: &str) -> String {
    match user {
        None => reason.to_owned(),
        Some(user) if reason.is_empty() => format!("by {user}"),
        Some(user) => format!("by {user}: {reason}"),
    }
}
