//! The inputs of the planner and the commands that it returns.

use std::collections::BTreeMap;

use wire::{Fact, FactBody, FactKey, PromptEntry, Subject, v1};

use crate::{FleetSnapshot, job_sizing::JobSizing, state::Run};

/// The inputs of the planner besides the run's own facts.
#[derive(Debug, Clone, Copy)]
pub struct PlannerInputs<'a> {
    /// Training prompts of the run.
    pub prompts: &'a [PromptEntry],
    /// Held-out prompts of the run.
    pub heldout: &'a [PromptEntry],
    /// Prompts of the spec's prompt suites, by suite name.
    pub suites: &'a BTreeMap<String, Vec<PromptEntry>>,
    /// Current agents of the run's pool; a hint only.
    pub fleet: &'a FleetSnapshot,
    /// Bounds on the size of a job.
    pub sizing: &'a JobSizing,
    /// Timeouts after which orders are issued again.
    pub timeouts: &'a ReissueTimeouts,
    /// Enables the check of all in-flight orders for lost, overdue and straggling jobs. Only the
    /// passing of time changes its result, so it need not run for each fact.
    pub check_stragglers: bool,
    /// Current time of the log's clock, in milliseconds since 1970.
    pub now_ms: u64,
}

impl<'a> PlannerInputs<'a> {
    /// Returns the prompts that the jobs of a purpose and suite sample; empty for an unknown suite.
    pub(crate) fn prompts_for(&self, purpose: v1::Purpose, suite: &str) -> &'a [PromptEntry] {
        match purpose {
            v1::Purpose::Heldout if suite.is_empty() => self.heldout,
            v1::Purpose::Heldout => self.suites.get(suite).map_or(&[], Vec::as_slice),
            v1::Purpose::Train | v1::Purpose::Unspecified => self.prompts,
        }
    }
}

/// Timeouts after which an order is written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReissueTimeouts {
    /// Milliseconds without any agent holding the job, while an agent is idle, after which the
    /// order is lost. Longer than a lease: jobs held by a dead agent are redelivered without a new
    /// order.
    pub unclaimed_ms: u64,
    /// Minimum age of an order in milliseconds before its job can be overdue.
    pub overdue_ms: u64,
}

impl Default for ReissueTimeouts {
    fn default() -> Self {
        Self { unclaimed_ms: 90_000, overdue_ms: 60_000 }
    }
}

/// A fact to write. Its blob, if any, must be in the store first.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteCommand {
    /// The fact to publish.
    pub fact: Fact,
    /// Bytes that the fact refers to by digest.
    pub blob: Option<Vec<u8>>,
}

/// Creates a command without a blob.
pub(crate) fn write_command(run: &Run, place: FactKey, body: FactBody) -> WriteCommand {
    WriteCommand { fact: Fact { subject: Subject::new(&run.id, place), body }, blob: None }
}

/// Creates the command that ends the run as failed.
pub(crate) fn fail_command(run: &Run, message: String) -> WriteCommand {
    let done = v1::Done { status: v1::done::Status::Failed.into(), message };
    write_command(run, FactKey::Done, FactBody::Done(done))
}
