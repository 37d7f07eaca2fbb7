//! The inputs of the planner and the commands that it returns.

use std::collections::BTreeMap;

use wire::{Fact, FactBody, FactKey, PromptEntry, Subject, v1};

use crate::{FleetSnapshot, job_sizing::JobSizing, state::Run};

/// The inputs of the planner besides the run's own facts.
#[derive(Debug, Clone, Copy)]
pub struct PlannerInputs<'a> {
    pub prompts: &'a [PromptEntry],
    /// Held-out prompts of the run.
    pub heldout: &'a [PromptEntry],
    /// Prompts of the spec's prompt suites, by name.
    pub suites: &'a BTreeMap<String, Vec<PromptEntry>>,
    /// Current agents of the run's pool; a hint only.
    pub fleet: &'a FleetSnapshot,
    pub sizing: &'a JobSizing,
    pub timeouts: &'a ReissueTimeouts,
    /// Enables the check of all in-flight orders for lost, overdue and straggling jobs. Only the
    /// passing of time changes its result, so it need not run for each fact.
    pub check_stragglers: bool,
    /// Current time of the log's clock, in milliseconds since 1970.
    pub now_ms: u64,
}

impl<'a> PlannerInputs<'a> {
    pub(crate) fn prompts_for(&self, purpose: v1::Purpose, suite: &str) -> &'a [PromptEntry] {
        match purpose {
            v1::Purpose::Heldout if suite.is_empty() => self.heldout,
            v1::Purpose::Heldout => self.suites.get(suite).map_or(&[], Vec::as_slice),
            v1::Purpose::Train | v1::Purpose::Unspecified => self.prompts,
        }
    }
}

/// The timeouts after which an order is written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReissueTimeouts {
    /// An order is lost if no agent has held its job for this time while one is idle. Longer than a
    /// lease: jobs held by a dead agent are redelivered without a new order.
    pub unclaimed_ms: u64,
    /// Minimum age of an order before its job can be overdue.
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
    pub fact: Fact,
    /// Bytes that the fact refers to by digest.
    pub blob: Option<Vec<u8>>,
}

pub(crate) fn write_command(run: &Run, place: FactKey, body: FactBody) -> WriteCommand {
    WriteCommand { fact: Fact { subject: Subject::new(&run.id, place), body }, blob: None }
}

pub(crate) fn fail_command(run: &Run, message: String) -> WriteCommand {
    let done = v1::Done { status: v1::done::Status::Failed.into(), message };
    write_command(run, FactKey::Done, FactBody::Done(done))
}
