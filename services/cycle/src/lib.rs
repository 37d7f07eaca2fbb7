//! The coordinator's pure core: derives the state of each run from its facts and plans the next
//! facts.
//!
//! A *fact* is a write-once message of the log. A *run* is a training submitted by a user; its
//! *cycles* each draw samples of prompts, judge and select them, train on the selection and
//! evaluate the checkpoint. [`Run::fold_record`] applies the facts of one run in log order;
//! [`next_commands`] returns the facts to write now. Both are deterministic and facts are
//! write-once, so two coordinators that plan at the same time write the same facts and do no harm.
//!
//! The crate contains no NATS, tokio, clock, disk or model code.
//!
//! Where to start reading: `state` (the data of a run), `fold` (facts into state), `planner` (state
//! into commands), `run_set` (all open runs of a coordinator).

mod audit;
mod backlog;
mod best_checkpoint;
mod canary_vote;
mod channel_audit;
mod channels;
mod command;
mod cost_probe;
mod curriculum;
mod cycle_summary;
mod fleet;
mod fold;
mod fork;
mod gates;
mod job_sizing;
mod missing_roles;
mod outcome;
mod planner;
mod run_queue;
mod run_set;
mod sampling_plan;
mod schedule;
mod select;
mod selection_report;
mod speculation;
mod split_training;
mod state;
mod training_advice;
mod trial;

pub use audit::{AuditCounts, LogContradiction, RunAudit, RunAuditor, audit_records};
pub use best_checkpoint::{best_checkpoint, newest_checkpoint};
pub use canary_vote::{CanaryAgreement, CanaryValue, canary_agreement};
pub use channel_audit::{ChannelAuditor, audit_channel};
pub use channels::{
    ChannelSet, DuePromotion, LearnedFeedback, NEW_FEEDBACK_MIN, NumberedMove, OutdatedMove,
    compared_cycle, move_to_base, move_to_checkpoint, move_to_model, promotion_move, require_move,
    roll_back_target, unchanged_move,
};
pub use command::{PlannerInputs, ReissueTimeouts, WriteCommand};
pub use curriculum::BUDGET_SAMPLES_MAX;
pub use fleet::{FleetMember, FleetSnapshot, HeldJob};
pub use fork::{check_fork, fork_after};
pub use job_sizing::JobSizing;
pub use missing_roles::{
    awaited_verdicts, can_serve, describe_missing_roles, describe_unmet_needs, is_agent_gone,
    is_agent_running, missing_roles,
};
pub use planner::next_commands;
pub use run_queue::{QueuePlace, QueueTurns, queue_places, run_user};
pub use run_set::{RunSet, fail_run};
pub use schedule::{generate_seed, sampling_settings, scheduled_value};
pub use select::{
    KeptSample, PreferencePair, SelectionOutcome, jaccard_similarity, pair_samples,
    preview_selection, sample_outcomes,
};
pub use selection_report::{MessageGroup, SelectionReport, report_selection};
pub use split_training::{BoxShare, OuterStep, SliceState, SoupReport, SplitReport, SplitTraining};
pub use state::{
    CanaryVotes, Cycle, FactAnomaly, OrderHistory, PlannedJob, PolicyWeights, PromptHistory,
    QueueStatus, Run, RunPhase, can_reject_checkpoint, clock_text, describe_pause,
    describe_queue_wait,
};
pub use training_advice::advise_on_training;
pub use trial::{ObjectiveTrial, prepare_trial};

#[cfg(test)]
mod tests;
