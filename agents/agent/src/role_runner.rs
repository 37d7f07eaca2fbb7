//! The runner of one role: takes a job from its delivery to its acknowledgement, under a renewed
//! lease. Decisions are made in `agent-core`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use agent_core::{
    CircuitBreaker, DeliveryAction, InFlightState, JobFault, OrderDecline, RetryDecision,
    TrainingPlacement,
};
use bus::{AckError, Delivery, PublishOutcome, ReadError};
use doctor::DoctorFinding;
use futures::FutureExt;
use tokio::sync::watch;
use wire::{
    Fact, FactBody, FactKey, Record, SpecOrigin, Subject, WorkKind, check_checkpoint_author, v1,
};

use crate::{
    AgentRole, JobError, LeasedJob,
    agent_context::AgentContext,
    failure, lease,
    lease_journal::LeaseFile,
    live_status::StatusTrouble,
    memory_placement::{self, HAND_OVER_MARGIN},
    role_name::role_name,
};

/// After this time, the lease expires by itself.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);

/// A role takes no more jobs while it holds this many that wait for their run to resume or for
/// memory.
const WAITING_JOBS_MAX: u32 = 64;

/// A job that waits for a dependency fills the limit by itself.
const DEPENDENCY_WAIT_WEIGHT: u32 = WAITING_JOBS_MAX;

/// The runner of one role.
///
/// A delivery takes these steps (`handle_delivery`):
///
/// 1. Decline: a slow generator returns a job that a faster agent would finish sooner.
/// 2. Admit: `agent-core` decides from the run's state whether the job is run, waits,
///    is acknowledged, returned or given up.
/// 3. Run: `run_with_retries` runs the job with its lease renewed, and waits with backoff
///    while a dependency is down.
/// 4. Settle: acknowledge a success. After a failure, write failure facts, then return the
///    delivery for a retry or acknowledge it as given up.
///
/// The circuit breaker counts failures of the role. It returns the pause before the next job, and
/// decides about quarantine.
///
/// Example: a generate order arrives. The store is down, so the job waits here for 1 s, then 2 s.
/// Then its worker crashes: a failure fact is written, the delivery is returned for a retry after
/// 1 s, and the role takes no job for 1.5 s. Another agent receives the job.
pub(crate) struct RoleRunner {
    pub(crate) shared: AgentContext,
    pub(crate) role: Arc<dyn AgentRole>,
    circuit_breaker: Mutex<CircuitBreaker>,
    /// Each with the sequence of the fact that ordered it.
    jobs_in_flight: Mutex<BTreeMap<String, u64>>,
    held_deliveries: AtomicU64,
    waiting_weight: watch::Sender<u32>,
}

impl RoleRunner {
    pub(crate) fn new(shared: AgentContext, role: Arc<dyn AgentRole>) -> Self {
        Self {
            shared,
            role,
            circuit_breaker: Mutex::default(),
            jobs_in_flight: Mutex::default(),
            held_deliveries: AtomicU64::new(0),
            waiting_weight: watch::Sender::new(0),
        }
    }

    /// Waits until no host check fails for the role, then enables it. Until then the role is listed
    /// as withheld, with the failed check.
    pub(crate) async fn wait_until_fit(&self) {
        let role = role_name(self.role.work_kind());
        let AgentContext { config, live_status, .. } = &self.shared;
        let mut reported = None;
        while self.role.uses_gpu()
            && let Some(finding) = config.doctor.check_role(role).await
        {
            live_status.withhold_role(role, &finding);
            let DoctorFinding { id, seen, remedy, .. } = finding;
            if reported.replace(id) != Some(id) {
                tracing::error!(role, id, seen, remedy, "a role is withheld");
            }
            tokio::time::sleep(config.intervals.host_check).await;
        }
        live_status.enable_role(role);
        if reported.is_some() {
            tracing::info!(role, "the role can work again");
        }
    }

    /// Waits forever if the role is quarantined. Cancel-safe.
    pub(crate) async fn wait_for_room(&self) {
        let mut waiting = self.waiting_weight.subscribe();
        // The sender lives as long as the runner.
        let _ = waiting.wait_for(|jobs| *jobs < WAITING_JOBS_MAX).await;
        self.role.wait_for_room().await;
        if let Some(message) = self.quarantine_reason() {
            tracing::error!("{message}");
            self.set_trouble(Some(StatusTrouble { message, quarantine: true }));
            // The quarantine lasts until the agent is restarted.
            std::future::pending::<()>().await;
        }
    }

    fn quarantine_reason(&self) -> Option<String> {
        match self.role.work_kind() {
            WorkKind::Generate => self.shared.runs.quarantine_reason(),
            WorkKind::Verify | WorkKind::Score | WorkKind::Train | WorkKind::Eval => None,
        }
    }

    /// Waits forever for roles that generate no samples. Cancel-safe.
    pub(crate) async fn wait_for_quarantine(&self) {
        match self.role.work_kind() {
            WorkKind::Generate => self.shared.runs.wait_for_quarantine().await,
            WorkKind::Verify | WorkKind::Score | WorkKind::Train | WorkKind::Eval => {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Handles a delivery until it is settled. Returns the pause before the role's next job.
    pub(crate) async fn handle_delivery(&self, delivery: Delivery) -> Duration {
        self.held_deliveries.fetch_add(1, Ordering::Relaxed);
        let settled = match &delivery.record {
            Ok(record) => self.process_record(record, &delivery).await,
            Err(error) => {
                // The coordinator reads the entry too, and ends the run.
                tracing::error!(%error, "an entry of the log that calls for work cannot be read");
                delivery.ack().await.map(|()| Duration::ZERO)
            }
        };
        self.held_deliveries.fetch_sub(1, Ordering::Relaxed);
        settled.unwrap_or_else(|error| {
            // The lease expires, and the next agent (perhaps this one) finds the result in the log.
            tracing::warn!(%error, "settling a job");
            Duration::ZERO
        })
    }

    /// Returns the pause before the role's next job.
    async fn process_record(
        &self,
        record: &Record,
        delivery: &Delivery,
    ) -> Result<Duration, AckError> {
        let run = &record.fact.subject.run;
        let admit = || {
            let status = self.shared.runs.status_for_fact(&record.fact.subject);
            let in_flight = InFlightGuard::find_duplicate(&self.jobs_in_flight, record);
            let (agent, body) = (self.shared.config.id.as_str(), &record.fact.body);
            agent_core::admit_delivery(agent, body, delivery.delivered, status, in_flight)
        };
        if admit() == DeliveryAction::Ignore {
            return Ok(Duration::ZERO);
        }
        let lease_file =
            LeaseFile::create_for(&self.shared.config.directory, self.role.work_kind(), delivery);
        let leased = LeasedDelivery { delivery, lease_file };
        if admit() == DeliveryAction::Run && self.quarantine_reason().is_none() {
            let declining = self.decline_order(record, delivery);
            match self.while_renewing_lease(&leased, declining).await {
                Some(Some(pause)) => return delivery.nak(Duration::ZERO).await.map(|()| pause),
                Some(None) => {}
                None => return self.return_delivery(delivery).await,
            }
        }
        // The run may have paused or ended meanwhile.
        while admit() == DeliveryAction::Wait {
            let waiting = WaitingGuard::start_waiting(&self.waiting_weight, 1);
            let stopped = self
                .while_renewing_lease(&leased, self.shared.runs.wait_until_resumed(run))
                .await
                .is_none();
            drop(waiting);
            if stopped {
                return self.return_delivery(delivery).await;
            }
        }
        let action = admit();
        match action {
            DeliveryAction::Acknowledge => return delivery.ack().await.map(|()| Duration::ZERO),
            DeliveryAction::Ignore => return Ok(Duration::ZERO),
            DeliveryAction::Nack => {
                // The server redelivers it at once; the pause lets another agent take it.
                let rest = Duration::from_millis(agent_core::NACK_PAUSE_MS);
                return delivery.nak(Duration::ZERO).await.map(|()| rest);
            }
            DeliveryAction::DeferToAgent => {
                let delay =
                    agent_core::defer_delay_ms(self.shared.config.id.as_str(), delivery.delivered);
                let delay = Duration::from_millis(delay);
                return delivery.nak(delay).await.map(|()| Duration::ZERO);
            }
            DeliveryAction::Wait | DeliveryAction::Run | DeliveryAction::DeadLetter => {}
        }
        if self.quarantine_reason().is_some() {
            return self.return_delivery(delivery).await;
        }
        if let Some(settled) = self.refuse_author(record, delivery).await {
            return settled;
        }
        let _held = InFlightGuard::register_job(&self.jobs_in_flight, record);
        self.shared.runs.set_active_run(run);
        let job = self.build_job(record);
        tracing::info!(subject = %record.fact.subject, delivered = delivery.delivered, "job begins");
        let given_up = match action {
            DeliveryAction::DeadLetter => self.dead_letter_error(&job, delivery).await,
            _ => None,
        };
        let outcome = match given_up {
            Some(error) => Err(error),
            None => self.run_with_retries(&job, &leased).await,
        };
        self.settle_outcome(&job, delivery, outcome).await
    }

    async fn settle_outcome(
        &self,
        job: &LeasedJob,
        delivery: &Delivery,
        outcome: Result<(), JobError>,
    ) -> Result<Duration, AckError> {
        let subject = &job.record.fact.subject;
        match outcome {
            Ok(()) => {
                self.shared.live_status.update_status(|status| status.jobs_done += 1);
                self.record_success();
                delivery.ack().await.map(|()| Duration::ZERO)
            }
            Err(JobError::Stopped) if self.shared.runs.run_status(&subject.run).is_over => {
                delivery.ack().await.map(|()| Duration::ZERO)
            }
            Err(JobError::Stopped) => self.return_delivery(delivery).await,
            Err(error @ JobError::HandedOver(_)) => {
                tracing::info!(%subject, %error, "no room here");
                let pause = self.shared.config.intervals.status_record + HAND_OVER_MARGIN;
                delivery.nak(Duration::ZERO).await.map(|()| pause)
            }
            Err(error) => self.settle_failure(job, delivery, &job.explain_termination(error)).await,
        }
    }

    /// Settles a delivery whose author may not write it; `None` when the work may begin.
    async fn refuse_author(
        &self,
        record: &Record,
        delivery: &Delivery,
    ) -> Option<Result<Duration, AckError>> {
        match self.check_author(record).await {
            Ok(Ok(())) => None,
            Ok(Err(reason)) => {
                tracing::warn!(subject = %record.fact.subject, reason, "work refused");
                Some(delivery.ack().await.map(|()| Duration::ZERO))
            }
            Err(error) => {
                tracing::warn!(%error, "reading the spec of a checkpoint's run");
                Some(self.return_delivery(delivery).await)
            }
        }
    }

    /// Checks that the author of a watched checkpoint wrote the spec of its run. The inner error is
    /// the reason why no agent may work on it.
    async fn check_author(&self, record: &Record) -> Result<Result<(), &'static str>, ReadError> {
        let Subject { run, key: place } = &record.fact.subject;
        if place.checkpoint_position().is_none() {
            return Ok(Ok(()));
        }
        let spec = self.shared.bus.find_spec(run).await?;
        let Some(spec) = spec else { return Ok(Err("its run has no spec")) };
        let origin = SpecOrigin {
            is_watched: spec.fact.subject.key == FactKey::WatchedSpec,
            author: spec.author.as_ref(),
        };
        Ok(check_checkpoint_author(place, record.author.as_ref(), origin))
    }

    /// Declines an order that a faster agent would finish sooner, unless no other agent holds an
    /// order or this agent declined the order before. Returns the pause before the role's next job;
    /// `None` if the order is to be run here.
    async fn decline_order(&self, record: &Record, delivery: &Delivery) -> Option<Duration> {
        let FactBody::GenerateOrder(order) = &record.fact.body else { return None };
        let AgentContext { config, bus, .. } = &self.shared;
        let own = self.role.current_throughput()?;
        let OrderDecline { fact, pause } =
            agent_core::decide_decline(order, delivery.delivered, config.id.as_str(), own)?;
        let held = || self.held_deliveries.load(Ordering::Relaxed);
        let held_before = held();
        let leased = delivery.count_leased_facts().await.ok()?;
        if leased <= held_before.max(held()) {
            return None;
        }
        let faster = fact.faster.clone();
        let subject = record.fact.subject.declined_by(&config.id)?;
        let fact = Fact { subject, body: FactBody::Declined(fact) };
        // Written before the order is returned, so that it is declined once also after a crash.
        let Ok(PublishOutcome::New { .. }) = bus.publish_fact(&fact).await else { return None };
        tracing::info!(subject = %record.fact.subject, faster, ?pause, "declined");
        Some(pause)
    }

    /// Runs a job again, after a backoff, for as long as it fails because a dependency is down;
    /// gives up after about an hour.
    async fn run_with_retries(
        &self,
        job: &LeasedJob,
        leased: &LeasedDelivery<'_>,
    ) -> Result<(), JobError> {
        let kind = self.role.work_kind();
        for retry in 0.. {
            let error = match self.run_once(job, leased).await {
                Err(error @ JobError::Failed { fault: JobFault::DependencyDown, .. }) => error,
                settled => return settled,
            };
            let message = error.to_string();
            tracing::warn!(subject = %job.record.fact.subject, message, "waiting for a dependency that is down");
            let Some(pause) = CircuitBreaker::dependency_backoff(retry) else {
                return Err(JobError::retryable_failure(anyhow::anyhow!(
                    "for too long: {message} (E113)"
                )));
            };
            let _waiting =
                WaitingGuard::start_waiting(&self.waiting_weight, DEPENDENCY_WAIT_WEIGHT);
            job.progress.set_note(&message);
            self.set_trouble(Some(StatusTrouble { message, quarantine: false }));
            let report = async {
                // If the bus is down as well, the failure cannot be recorded.
                let _ = failure::record_failure(kind, job, &error).await;
                tokio::time::sleep(pause).await;
            };
            if self.while_renewing_lease(leased, report).await.is_none() {
                return Err(JobError::Stopped);
            }
        }
        unreachable!("the retries are counted")
    }

    /// Runs a job once, until it ends, the run is over, the agent stops or the role is quarantined.
    /// A panic is a failure.
    async fn run_once(&self, job: &LeasedJob, leased: &LeasedDelivery<'_>) -> Result<(), JobError> {
        let work = async {
            self.wait_for_memory(job).await?;
            self.role.run(job).await
        };
        let work = std::panic::AssertUnwindSafe(work).catch_unwind();
        let work = async {
            work.await.unwrap_or_else(|_| {
                Err(JobError::retryable_failure(anyhow::anyhow!(
                    "the agent panicked; its log says where (X101)"
                )))
            })
        };
        tokio::select! {
            biased;
            outcome = self.while_renewing_lease(leased, work) => outcome.unwrap_or(Err(JobError::Stopped)),
            () = self.shared.runs.wait_until_over(&job.run) => Err(JobError::Stopped),
            // Results of a quarantined agent do not count; another agent redoes the job.
            () = self.wait_for_quarantine() => Err(JobError::Stopped),
        }
    }

    /// The job stays here meanwhile, unless another host has the memory.
    async fn wait_for_memory(&self, job: &LeasedJob) -> Result<(), JobError> {
        let mut reported = false;
        let found = self.poll_for_memory(job, &mut reported).await;
        if reported {
            self.set_trouble(None);
        }
        job.progress.set_waiting(false, "");
        found
    }

    /// Decides about the job's placement at each interval, and records a failure once if no host
    /// has the memory. Sets `reported` when that failure has been shown to users.
    async fn poll_for_memory(&self, job: &LeasedJob, reported: &mut bool) -> Result<(), JobError> {
        let AgentContext { config, drain, bus, .. } = &self.shared;
        let role = role_name(self.role.work_kind());
        let mut waiting = None;
        while let Some(needs) = self.role.memory_needs(job).await? {
            let placing = if needs.own.has_room() {
                TrainingPlacement::RunHere
            } else {
                let statuses = bus.list_statuses().await.map_err(JobError::dependency_down)?;
                let own = (config.id.as_str(), config.pool.as_str(), role);
                agent_core::place_training(
                    needs.own,
                    &memory_placement::list_peers(&needs, &statuses, own),
                )
            };
            let message = memory_placement::describe_placement(&needs, &placing);
            match placing {
                TrainingPlacement::RunHere => break,
                TrainingPlacement::HandOver(agent) => return Err(JobError::HandedOver(agent)),
                TrainingPlacement::WaitFor(_) => {}
                TrainingPlacement::Unschedulable(_) if *reported => {}
                TrainingPlacement::Unschedulable(_) => {
                    tracing::warn!(subject = %job.record.fact.subject, message, "no room");
                    let error = JobError::no_room(message.clone());
                    failure::record_failure(self.role.work_kind(), job, &error).await?;
                    let message = message.clone();
                    self.set_trouble(Some(StatusTrouble { message, quarantine: false }));
                    *reported = true;
                }
            }
            job.progress.set_waiting(true, message);
            waiting.get_or_insert_with(|| WaitingGuard::start_waiting(&self.waiting_weight, 1));
            let pause = tokio::time::sleep(config.intervals.status_record);
            if drain.run_until_cancelled(pause).await.is_none() {
                return Err(JobError::Stopped);
            }
        }
        Ok(())
    }

    /// Returns `None` if the agent must stop first.
    async fn while_renewing_lease<T>(
        &self,
        leased: &LeasedDelivery<'_>,
        doing: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::select! {
            biased;
            done = doing => Some(done),
            () = self.shared.stop_jobs.cancelled() => None,
            never = lease::renew_until_done(leased.delivery, &leased.lease_file) => match never {},
        }
    }

    /// Returns the final error of a job that was delivered too often without a result; `None` if
    /// hosts may still try it, because those before lacked what it needs.
    async fn dead_letter_error(&self, job: &LeasedJob, delivery: &Delivery) -> Option<JobError> {
        let kind = self.role.work_kind();
        let last = failure::last_failure(kind, job).await.ok().flatten();
        agent_core::is_dead_letter(kind, delivery.delivered, last.as_ref()).then(|| {
            let message = agent_core::dead_letter_message(delivery.delivered, last.as_ref());
            JobError::fatal_failure(anyhow::anyhow!(message))
        })
    }

    /// Writes the failure, then returns the delivery for a retry or acknowledges it as given up.
    async fn settle_failure(
        &self,
        job: &LeasedJob,
        delivery: &Delivery,
        error: &JobError,
    ) -> Result<Duration, AckError> {
        let subject = job.record.fact.subject.to_string();
        tracing::warn!(subject, %error, "job failed");
        let decision = failure::record_failure(self.role.work_kind(), job, error).await;
        let unmet = matches!(
            error,
            JobError::Failed { fault: JobFault::NeedsUnmet | JobFault::ResultDiffers, .. }
        );
        let delay = match &decision {
            Ok(RetryDecision::RetryAfter { .. }) if unmet => {
                agent_core::hand_back_delay(delivery.delivered)
            }
            Ok(RetryDecision::RetryAfter { delay_ms }) => Duration::from_millis(*delay_ms),
            Ok(RetryDecision::GiveUp) | Err(_) => Duration::ZERO,
        };
        let pause = self.record_failure(&subject, error, delay);
        match decision {
            Ok(RetryDecision::RetryAfter { .. }) => delivery.nak(delay).await,
            Ok(RetryDecision::GiveUp) => delivery.ack().await,
            Err(error) => {
                // The failure was not recorded: the lease expires, and an agent tries again.
                tracing::warn!(%error, "writing a failure");
                Ok(())
            }
        }?;
        Ok(pause)
    }

    /// Counts a failure in the circuit breaker. Returns the pause before the role's next job.
    fn record_failure(&self, subject: &str, error: &JobError, delay: Duration) -> Duration {
        let JobError::Failed { fault, message, .. } = error else { return Duration::ZERO };
        let lease = self.shared.config.lease;
        let Ok(mut breaker) = self.circuit_breaker.lock() else { return delay };
        let backoff = breaker.record_failure(subject, *fault, message, delay, lease);
        if !backoff.message.is_empty() {
            tracing::warn!(pause = ?backoff.pause, quarantine = backoff.is_quarantine, "{}", backoff.message);
            let message = backoff.message;
            self.set_trouble(Some(StatusTrouble { message, quarantine: backoff.is_quarantine }));
        }
        backoff.pause
    }

    fn record_success(&self) {
        if let Ok(mut breaker) = self.circuit_breaker.lock() {
            breaker.record_success();
        }
        self.set_trouble(None);
    }

    /// Sets or clears the role's trouble in the agent's status. A quarantine takes precedence.
    fn set_trouble(&self, trouble: Option<StatusTrouble>) {
        let quarantined =
            self.quarantine_reason().map(|message| StatusTrouble { message, quarantine: true });
        let trouble = quarantined.or(trouble);
        self.shared.live_status.set_trouble(role_name(self.role.work_kind()), trouble);
    }

    /// Returns a delivery for immediate redelivery, within the time limit. Errors are ignored,
    /// because the lease then expires.
    async fn return_delivery(&self, delivery: &Delivery) -> Result<Duration, AckError> {
        let _ = tokio::time::timeout(RETURN_TIMEOUT, delivery.nak(Duration::ZERO)).await;
        Ok(Duration::ZERO)
    }

    fn build_job(&self, record: &Record) -> LeasedJob {
        let shared = &self.shared;
        let (cycle, name) = describe_fact(&record.fact);
        let active = v1::ActiveJob {
            role: role_name(self.role.work_kind()).into(),
            run: record.fact.subject.run.to_string(),
            cycle,
            job: name,
            ..Default::default()
        };
        LeasedJob {
            run: record.fact.subject.run.clone(),
            record: record.clone(),
            kind: self.role.work_kind(),
            agent: shared.config.id.to_string(),
            bus: shared.bus.clone(),
            store: shared.store.clone(),
            cache: shared.cache.clone(),
            directory: shared.config.directory.clone(),
            progress: shared.live_status.add_job((self.role.work_kind(), record.sequence), active),
            telemetry: shared.telemetry.clone(),
            energy_share: shared.telemetry.start_energy_share(),
        }
    }
}

/// A delivery whose lease is renewed, with its file in the lease journal.
struct LeasedDelivery<'a> {
    delivery: &'a Delivery,
    lease_file: LeaseFile,
}

/// Returns the cycle and name of a fact's job, for users.
fn describe_fact(fact: &Fact) -> (u32, String) {
    match &fact.subject.key {
        FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
            (*cycle, job.to_string())
        }
        FactKey::TrainOrder { cycle, .. } => (*cycle, "train".into()),
        FactKey::TrainPartOrder { cycle, outer, part, .. } => {
            (*cycle, wire::train_part_name(*outer, *part))
        }
        place => match place.checkpoint_position() {
            Some((cycle, step)) => (cycle, format!("step {step}")),
            None => (0, Subject::to_string(&fact.subject)),
        },
    }
}

/// The weight of one waiting job, subtracted when this is dropped.
struct WaitingGuard<'a>(&'a watch::Sender<u32>, u32);

impl<'a> WaitingGuard<'a> {
    fn start_waiting(jobs: &'a watch::Sender<u32>, weight: u32) -> Self {
        jobs.send_modify(|jobs| *jobs += weight);
        Self(jobs, weight)
    }
}

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|jobs| *jobs -= self.1);
    }
}

/// The registration of one job in progress, removed when this is dropped.
struct InFlightGuard<'a> {
    jobs: &'a Mutex<BTreeMap<String, u64>>,
    key: String,
}

impl<'a> InFlightGuard<'a> {
    /// Returns the key of a fact's job: the same for all attempts.
    fn job_key(fact: &Fact) -> String {
        let (cycle, name) = describe_fact(fact);
        format!("{} {cycle} {name}", fact.subject.run)
    }

    fn find_duplicate(jobs: &Mutex<BTreeMap<String, u64>>, record: &Record) -> InFlightState {
        let jobs = jobs.lock().map(|jobs| jobs.get(&Self::job_key(&record.fact)).copied());
        match jobs.ok().flatten() {
            None => InFlightState::NotRunning,
            Some(sequence) if sequence == record.sequence => InFlightState::SameDelivery,
            Some(_) => InFlightState::OtherOrder,
        }
    }

    fn register_job(jobs: &'a Mutex<BTreeMap<String, u64>>, record: &Record) -> Self {
        let key = Self::job_key(&record.fact);
        if let Ok(mut jobs) = jobs.lock() {
            jobs.insert(key.clone(), record.sequence);
        }
        Self { jobs, key }
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.remove(&self.key);
        }
    }
}
