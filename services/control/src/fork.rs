//! Forks: runs that continue another one after a cycle, with other settings.

use bus::ReadError;
use cycle::fork_after;
use spec::{FieldError, ForkSettingError, apply_fork_settings, check_run_name};
use wire::{FactBody, Record, RunId, clock, v1};

use crate::{FleetControl, SubmitError, audit::AuditFinding};

/// The facts that a fork takes over, and those that they are derived from, as subject patterns.
const FORKED_FACTS: [&str; 6] =
    ["spec", "selection.*", "order.train.>", "checkpoint.>", "eval.>", "cycle.*.*"];

/// The runs that were forked from each other; more can only be a circle.
const FORKS_MAX: u32 = 10_000;

/// The reason why a run is not forked.
#[derive(Debug, thiserror::Error)]
pub enum ForkError {
    #[error("there is no run {0}; `flotilla run list` lists all (R101)")]
    Unknown(RunId),
    #[error(
        "run {0} is not a RAFT run: it trains once and has no cycles to continue after; submit its \
         spec again with other settings, or one with `base: {{ checkpoint: {0} }}` (R107)"
    )]
    NoCycles(RunId),
    #[error(
        "run {0} is a trial of an objective, which has one cycle; fork the run it tries (R107)"
    )]
    Trial(RunId),
    #[error(
        "cycle {cycle} of run {run} is not done; `flotilla run show {run}` lists those that are \
         (R107)"
    )]
    NotDone { run: RunId, cycle: u32 },
    #[error(transparent)]
    Setting(#[from] ForkSettingError),
    #[error(transparent)]
    Name(#[from] FieldError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error("read the log")]
    Read(#[from] ReadError),
}

impl FleetControl {
    /// Starts a run that takes over cycles 0 to `cycle` of another one, and continues with its spec
    /// and the changed settings, as [`apply_fork_settings`] reads them. `name` is that of the new
    /// run; `None` for that of the forked one. `user` is as in a submission. No file is copied.
    ///
    /// # Errors
    /// When the cycle is not done or a setting cannot be changed; then no run is started.
    pub async fn fork_run(
        &self,
        run: &RunId,
        cycle: u32,
        name: Option<&str>,
        settings: &[String],
        user: &str,
    ) -> Result<RunId, ForkError> {
        if let Some(name) = name {
            check_run_name(name)?;
        }
        let parent =
            self.find_run_spec(run).await?.ok_or_else(|| ForkError::Unknown(run.clone()))?;
        match &parent.kind {
            Some(v1::spec::Kind::Raft(raft)) if raft.dataset.is_some() => {
                return Err(ForkError::Trial(run.clone()));
            }
            Some(v1::spec::Kind::Raft(_)) => {}
            _ => return Err(ForkError::NoCycles(run.clone())),
        }
        let owner = self.cycle_owner(run, cycle).await?;
        let records = self.read_forked_records(&owner).await?;
        let not_done = || ForkError::NotDone { run: run.clone(), cycle };
        let fork = fork_after(&records, cycle).ok_or_else(not_done)?;
        let is_adapter =
            |it: &v1::Checkpoint| it.content() == v1::checkpoint::Content::Adapter && it.cycle > 0;
        let trains_on = fork.cycles.iter().flat_map(|it| &it.checkpoints).any(is_adapter);
        let mut spec = apply_fork_settings(&parent, cycle, trains_on, settings)?;
        spec.name = name.map_or(parent.name, str::to_owned);
        spec.submitted_at = Some(clock::now());
        user.clone_into(&mut spec.user);
        spec.sweep = None;
        spec.fork = Some(fork);
        let name = spec.name.clone();
        let forked = self.write_spec_fact(&name, spec.clone()).await?;
        // Of the cycles that are taken over, the next one needs only the last.
        let last = spec.take_forked_cycles().cycles.pop().unwrap_or_default();
        self.require_stored_trees(&forked, &(spec, last.checkpoints)).await?;
        Ok(forked)
    }

    async fn read_forked_records(&self, run: &RunId) -> Result<Vec<Record>, ReadError> {
        let filters = FORKED_FACTS.map(|kind| format!("flotilla.{run}.{kind}"));
        self.read_records(filters.to_vec()).await
    }

    async fn find_run_spec(&self, run: &RunId) -> Result<Option<v1::Spec>, ReadError> {
        Ok(match self.bus.find_spec(run).await?.map(|record| record.fact.body) {
            Some(FactBody::Spec(spec)) => Some(spec),
            _ => None,
        })
    }

    /// Returns the run that a cycle of a run is of: the run itself, or the one that it forks, whose
    /// log or archive has the cycle's facts.
    pub(crate) async fn cycle_owner(&self, run: &RunId, cycle: u32) -> Result<RunId, ReadError> {
        let mut owner = run.clone();
        for _ in 0..FORKS_MAX {
            let fork = self.find_run_spec(&owner).await?.and_then(|spec| spec.fork);
            let Some(fork) = fork.filter(|fork| cycle <= fork.cycle) else { break };
            let Ok(forked) = RunId::new(fork.run.as_str()) else { break };
            owner = forked;
        }
        Ok(owner)
    }

    /// Returns an audit finding if the cycles that a run takes over are not those of the run that it
    /// forks, and a note about the audit of that one.
    pub(crate) async fn check_fork_origin(
        &self,
        run: &RunId,
    ) -> Result<Option<(Option<AuditFinding>, String)>, ReadError> {
        let Some(fork) = self.find_run_spec(run).await?.and_then(|spec| spec.fork) else {
            return Ok(None);
        };
        let records = match RunId::new(fork.run.as_str()) {
            Ok(origin) => self.read_forked_records(&origin).await?,
            Err(_) => Vec::new(),
        };
        let found = cycle::check_fork(&fork, &records);
        let subject = wire::Subject::new(run, wire::FactKey::Spec).to_string();
        let finding = found.map(|what| AuditFinding::for_log(what, Some(subject), None));
        let (origin, cycle) = (&fork.run, fork.cycle);
        let note = format!(
            "cycles 0 to {cycle} are those of run {origin}, which `flotilla audit {origin}` checks"
        );
        Ok(Some((finding, note)))
    }
}
