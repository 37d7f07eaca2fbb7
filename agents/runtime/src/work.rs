//! One job under its lease: from the delivery to its acknowledgement.
//!
//! What is to be done is decided in `conduct`; here it is done.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bus::{AckError, Bus, Delivery};
use conduct::{AtHand, Fault, Placing, Reception, Temper, Then};
use futures::FutureExt;
use hardware::doctor::Finding;
use store::{Cache, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use wire::{Body, Fact, Place, Record, Subject, WorkKind, v1};

use crate::{
    Job, JobError, Role,
    agent::Config,
    failure, keep,
    legacy::Note,
    placing::{self, PASS_ON_REST},
    presence::{Presence, Trouble},
    runs::Runs,
    watch::Watch,
};

/// What handing a job back may take when the agent leaves; after that its lease runs out.
const HAND_BACK_LIMIT: Duration = Duration::from_secs(2);

/// A role takes no more jobs while it keeps so many that wait: for their run to go on, …
const PARKED_MAX: u32 = 64;

/// … or, each counting for as many, for the store.
const HELD_UP: u32 = PARKED_MAX;

/// What the roles of an agent share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) bus: Bus,
    pub(crate) store: Store,
    pub(crate) cache: Cache,
    pub(crate) presence: Presence,
    pub(crate) runs: Runs,
    pub(crate) watch: Watch,
    /// Set when held jobs must end now.
    pub(crate) leave: CancellationToken,
    /// Set when nothing new is taken.
    pub(crate) drain: CancellationToken,
}

impl Shared {
    /// Says what a training may plan with, as often as that is looked at.
    pub(crate) fn measure(
        self,
        roles: &[Arc<dyn Role>],
        over: CancellationToken,
    ) -> impl Future<Output = ()> + use<> {
        let trainer = roles.iter().find(|role| role.kind() == WorkKind::Train);
        let on_gpu = trainer.map(|role| role.uses_gpu());
        async move {
            while let Some(on_gpu) = on_gpu {
                let bytes = self.config.doctor.training_bytes(on_gpu).await;
                self.presence.update(|status| status.training_bytes = bytes.unwrap_or(0));
                if over.run_until_cancelled(tokio::time::sleep(EXAMINE_EVERY)).await.is_none() {
                    break;
                }
            }
        }
    }
}

/// Between two looks at a box that was found wanting, or at its memory.
const EXAMINE_EVERY: Duration = Duration::from_secs(60);

/// One role at work.
pub(crate) struct Post {
    pub(crate) shared: Shared,
    pub(crate) role: Arc<dyn Role>,
    temper: Mutex<Temper>,
    /// Jobs worked on, each with the sequence of the fact that called for it.
    at_hand: Mutex<BTreeMap<String, u64>>,
    /// Weight of the jobs that wait.
    waiting: watch::Sender<u32>,
}

/// What users call the role that does a kind of work.
pub(crate) fn role_name(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Generate => "generator",
        WorkKind::Verify => "verifier",
        WorkKind::Train => "trainer",
        WorkKind::Eval => "evaluator",
    }
}

impl Post {
    pub(crate) fn new(shared: Shared, role: Arc<dyn Role>) -> Self {
        Self {
            shared,
            role,
            temper: Mutex::default(),
            at_hand: Mutex::default(),
            waiting: watch::Sender::new(0),
        }
    }

    /// Resolves when the doctor finds nothing against the role; until then says what.
    pub(crate) async fn take_up(&self) {
        let role = role_name(self.role.kind());
        let Shared { config, presence, .. } = &self.shared;
        let mut said = None;
        while self.role.uses_gpu()
            && let Some(finding) = config.doctor.against_role(role).await
        {
            presence.withhold(role, &finding);
            let Finding { id, seen, remedy, .. } = finding;
            if said.replace(id) != Some(id) {
                tracing::error!(role, id, seen, remedy, "a role is withheld");
            }
            tokio::time::sleep(EXAMINE_EVERY).await;
        }
        presence.take_up(role);
        if said.is_some() {
            tracing::info!(role, "what kept a role from work was put right");
        }
    }

    /// Resolves when there is room for one more job. Cancel-safe.
    pub(crate) async fn room(&self) {
        let mut waiting = self.waiting.subscribe();
        // The sender lives as long as the post.
        let _ = waiting.wait_for(|jobs| *jobs < PARKED_MAX).await;
        self.role.room().await;
        if let Some(message) = self.conviction() {
            tracing::error!("{message}");
            self.trouble(Some(Trouble { message, quarantine: true }));
            // Whoever puts it right starts the agent anew.
            std::future::pending::<()>().await;
        }
    }

    /// Why the role must do nothing more, if so.
    fn conviction(&self) -> Option<String> {
        match self.role.kind() {
            WorkKind::Generate => self.shared.runs.convicted(),
            WorkKind::Verify | WorkKind::Train | WorkKind::Eval => None,
        }
    }

    /// Resolves when the role must do nothing more. Cancel-safe.
    pub(crate) async fn convicted(&self) {
        match self.role.kind() {
            WorkKind::Generate => self.shared.runs.until_convicted().await,
            WorkKind::Verify | WorkKind::Train | WorkKind::Eval => std::future::pending().await,
        }
    }

    /// Sees a delivery through. The answer is how long the role should take nothing new.
    pub(crate) async fn handle(&self, delivery: Delivery) -> Duration {
        let settled = match &delivery.record {
            Ok(record) => self.work(record, &delivery).await,
            Err(error) => {
                // The coordinator reads it too, and ends the run.
                tracing::error!(%error, "an entry of the log that calls for work cannot be read");
                delivery.ack().await.map(|()| Duration::ZERO)
            }
        };
        settled.unwrap_or_else(|error| {
            // The lease runs out and somebody, perhaps we, finds the result written.
            tracing::warn!(%error, "settling a job");
            Duration::ZERO
        })
    }

    async fn work(&self, record: &Record, delivery: &Delivery) -> Result<Duration, AckError> {
        let run = &record.fact.subject.run;
        let receive = || {
            let course = self.shared.runs.course_of(&record.fact.subject);
            let at_hand = Held::look(&self.at_hand, record);
            conduct::receive(&record.fact.body, delivery.delivered, course, at_hand)
        };
        if receive() == Reception::Leave {
            return Ok(Duration::ZERO);
        }
        let note = Note::leave(&self.shared.config.directory, delivery);
        let hand = InHand { delivery, note };
        while receive() == Reception::Wait {
            let parked = Waiting::begin(&self.waiting, 1);
            let stopped = self.keeping(&hand, self.shared.runs.goes_on(run)).await.is_none();
            drop(parked);
            if stopped {
                return self.hand_back(delivery).await;
            }
        }
        let reception = receive();
        match reception {
            Reception::Drop => return delivery.ack().await.map(|()| Duration::ZERO),
            Reception::Leave => return Ok(Duration::ZERO),
            Reception::PassOn => {
                // Another gets it at once, if it is not we who ask.
                let rest = Duration::from_millis(conduct::PASS_ON_MS);
                return delivery.nak(Duration::ZERO).await.map(|()| rest);
            }
            Reception::Wait | Reception::Work | Reception::Poison => {}
        }
        if self.conviction().is_some() {
            return self.hand_back(delivery).await;
        }
        if reception == Reception::Work
            && let Some(rest) = self.leaves(record, delivery.delivered)
        {
            tracing::info!(subject = %record.fact.subject, ?rest, "left to faster boxes");
            return delivery.nak(Duration::ZERO).await.map(|()| rest);
        }
        let _held = Held::take(&self.at_hand, record);
        self.shared.runs.work_for(run);
        let job = self.job(record);
        tracing::info!(subject = %record.fact.subject, delivered = delivery.delivered, "job begins");
        let outcome = if reception == Reception::Poison {
            Err(self.poison(&job, delivery).await)
        } else {
            self.see_through(&job, &hand).await
        };
        match outcome {
            Ok(()) => {
                self.shared.presence.update(|status| status.jobs_done += 1);
                self.fares_well();
                delivery.ack().await.map(|()| Duration::ZERO)
            }
            Err(JobError::Stopped) if self.shared.runs.course(run).over => {
                delivery.ack().await.map(|()| Duration::ZERO)
            }
            Err(JobError::Stopped) => self.hand_back(delivery).await,
            Err(error @ JobError::PassedOn(_)) => {
                tracing::info!(subject = %record.fact.subject, %error, "no room here");
                delivery.nak(Duration::ZERO).await.map(|()| PASS_ON_REST)
            }
            Err(error) => self.fail(&job, delivery, &job.blame(error)).await,
        }
    }

    /// Whether this box would end an order when all others have ended theirs.
    fn leaves(&self, record: &Record, delivered: u64) -> Option<Duration> {
        let Body::GenerateOrder(order) = &record.fact.body else { return None };
        conduct::leaves(order, delivered, self.role.pace()?)
    }

    /// Tries until the job is done, fails, or what it needs has been away for long.
    async fn see_through(&self, job: &Job, hand: &InHand<'_>) -> Result<(), JobError> {
        let kind = self.role.kind();
        for look in 0.. {
            let error = match self.attempt(job, hand).await {
                Err(error @ JobError::Failed { fault: Fault::Away, .. }) => error,
                settled => return settled,
            };
            let message = error.to_string();
            tracing::warn!(subject = %job.record.fact.subject, message, "waiting for what is away");
            let Some(pause) = Temper::away(look) else {
                return Err(JobError::retry(anyhow::anyhow!("for too long: {message} (E113)")));
            };
            let _waiting = Waiting::begin(&self.waiting, HELD_UP);
            job.progress.note(&message);
            self.trouble(Some(Trouble { message, quarantine: false }));
            let told = async {
                // When the bus is away as well, there is nobody to tell.
                let _ = failure::record(kind, job, &error).await;
                tokio::time::sleep(pause).await;
            };
            if self.keeping(hand, told).await.is_none() {
                return Err(JobError::Stopped);
            }
        }
        unreachable!("the looks are counted")
    }

    /// Does the job for as long as the run goes on and the agent stays. A panic is a failure.
    async fn attempt(&self, job: &Job, hand: &InHand<'_>) -> Result<(), JobError> {
        let work = async {
            self.find_room(job).await?;
            self.role.run(job).await
        };
        let work = std::panic::AssertUnwindSafe(work).catch_unwind();
        let work = async {
            work.await.unwrap_or_else(|_| {
                Err(JobError::retry(anyhow::anyhow!(
                    "the agent panicked; its log says where (X101)"
                )))
            })
        };
        tokio::select! {
            biased;
            outcome = self.keeping(hand, work) => outcome.unwrap_or(Err(JobError::Stopped)),
            () = self.shared.runs.over(&job.run) => Err(JobError::Stopped),
            // What it would make counts for nothing: another makes it.
            () = self.convicted() => Err(JobError::Stopped),
        }
    }

    /// Returns when this box has the room that a job needs; until then keeps it, for a box that
    /// has.
    async fn find_room(&self, job: &Job) -> Result<(), JobError> {
        let mut told = false;
        let found = self.await_room(job, &mut told).await;
        if told {
            self.trouble(None);
        }
        job.progress.waits(false, "");
        found
    }

    async fn await_room(&self, job: &Job, told: &mut bool) -> Result<(), JobError> {
        let Shared { config, drain, bus, .. } = &self.shared;
        let role = role_name(self.role.kind());
        let mut waiting = None;
        while let Some(needs) = self.role.needs(job).await? {
            let placing = if needs.own.is_enough() {
                Placing::Take
            } else {
                let statuses = bus.statuses().await.map_err(JobError::away)?;
                let own = (config.id.as_str(), config.pool.as_str(), role);
                conduct::place(needs.own, &placing::peers(&needs, &statuses, own))
            };
            let message = placing::told(&needs, &placing);
            match placing {
                Placing::Take => break,
                Placing::PassOn(agent) => return Err(JobError::PassedOn(agent)),
                Placing::Await(_) => {}
                Placing::Nowhere(_) if *told => {}
                Placing::Nowhere(_) => {
                    tracing::warn!(subject = %job.record.fact.subject, message, "no room");
                    let error = JobError::no_room(message.clone());
                    failure::record(self.role.kind(), job, &error).await?;
                    let message = message.clone();
                    self.trouble(Some(Trouble { message, quarantine: false }));
                    *told = true;
                }
            }
            job.progress.waits(true, message);
            waiting.get_or_insert_with(|| Waiting::begin(&self.waiting, 1));
            let pause = tokio::time::sleep(placing::LOOK_EVERY);
            if drain.run_until_cancelled(pause).await.is_none() {
                return Err(JobError::Stopped);
            }
        }
        Ok(())
    }

    /// Keeps the lease while `doing`. `None` when the agent must leave.
    async fn keeping<T>(&self, hand: &InHand<'_>, doing: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = doing => Some(done),
            () = self.shared.leave.cancelled() => None,
            never = keep::lease(hand.delivery, &hand.note) => match never {},
        }
    }

    async fn poison(&self, job: &Job, delivery: &Delivery) -> JobError {
        let last = failure::last_of(self.role.kind(), job).await.ok().flatten();
        JobError::fatal(anyhow::anyhow!(conduct::poison(delivery.delivered, last.as_ref())))
    }

    /// Writes what went wrong, then hands the job back, or gives it up.
    async fn fail(
        &self,
        job: &Job,
        delivery: &Delivery,
        error: &JobError,
    ) -> Result<Duration, AckError> {
        let subject = job.record.fact.subject.to_string();
        tracing::warn!(subject, %error, "job failed");
        let then = failure::record(self.role.kind(), job, error).await;
        let delay = match &then {
            Ok(Then::HandBack { delay_ms }) => Duration::from_millis(*delay_ms),
            Ok(Then::GiveUp) | Err(_) => Duration::ZERO,
        };
        let pause = self.fares_badly(&subject, error, delay);
        match then {
            Ok(Then::HandBack { .. }) => delivery.nak(delay).await,
            Ok(Then::GiveUp) => delivery.ack().await,
            Err(error) => {
                // Nobody knows: the lease runs out, and somebody tries again.
                tracing::warn!(%error, "writing a failure");
                Ok(())
            }
        }?;
        Ok(pause)
    }

    fn fares_badly(&self, subject: &str, error: &JobError, delay: Duration) -> Duration {
        let JobError::Failed { fault, message, .. } = error else { return Duration::ZERO };
        let lease = self.shared.config.lease;
        let Ok(mut temper) = self.temper.lock() else { return delay };
        let rest = temper.failed(subject, *fault, message, delay, lease);
        if !rest.trouble.is_empty() {
            tracing::warn!(pause = ?rest.pause, quarantine = rest.quarantine, "{}", rest.trouble);
            let message = rest.trouble;
            self.trouble(Some(Trouble { message, quarantine: rest.quarantine }));
        }
        rest.pause
    }

    fn fares_well(&self) {
        if let Ok(mut temper) = self.temper.lock() {
            temper.done();
        }
        self.trouble(None);
    }

    fn trouble(&self, trouble: Option<Trouble>) {
        let convicted = self.conviction().map(|message| Trouble { message, quarantine: true });
        let trouble = convicted.or(trouble);
        self.shared.presence.trouble(role_name(self.role.kind()), trouble);
    }

    async fn hand_back(&self, delivery: &Delivery) -> Result<Duration, AckError> {
        let _ = tokio::time::timeout(HAND_BACK_LIMIT, delivery.nak(Duration::ZERO)).await;
        Ok(Duration::ZERO)
    }

    fn job(&self, record: &Record) -> Job {
        let shared = &self.shared;
        let (cycle, name) = describe(&record.fact);
        let active = v1::ActiveJob {
            role: role_name(self.role.kind()).into(),
            run: record.fact.subject.run.to_string(),
            cycle,
            job: name,
            ..Default::default()
        };
        Job {
            run: record.fact.subject.run.clone(),
            record: record.clone(),
            kind: self.role.kind(),
            agent: shared.config.id.to_string(),
            bus: shared.bus.clone(),
            store: shared.store.clone(),
            cache: shared.cache.clone(),
            directory: shared.config.directory.clone(),
            progress: shared.presence.begin(record.sequence, active),
            watch: shared.watch.clone(),
            share: shared.watch.share(),
        }
    }
}

/// A delivery whose lease is kept, and the note that says so.
struct InHand<'a> {
    delivery: &'a Delivery,
    note: Note,
}

/// A job's cycle and name, for people.
fn describe(fact: &Fact) -> (u32, String) {
    match &fact.subject.place {
        Place::GenerateOrder { cycle, job, .. } | Place::Samples { cycle, job } => {
            (*cycle, job.to_string())
        }
        Place::TrainOrder { cycle, .. } => (*cycle, "train".into()),
        Place::Checkpoint { cycle, step } => (*cycle, format!("step {step}")),
        _ => (0, Subject::to_string(&fact.subject)),
    }
}

/// A job that waits, for as long as this lives.
struct Waiting<'a>(&'a watch::Sender<u32>, u32);

impl<'a> Waiting<'a> {
    fn begin(jobs: &'a watch::Sender<u32>, weight: u32) -> Self {
        jobs.send_modify(|jobs| *jobs += weight);
        Self(jobs, weight)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|jobs| *jobs -= self.1);
    }
}

/// A job at hand, for as long as this lives.
struct Held<'a> {
    jobs: &'a Mutex<BTreeMap<String, u64>>,
    key: String,
}

impl<'a> Held<'a> {
    fn key(fact: &Fact) -> String {
        let (cycle, name) = describe(fact);
        format!("{} {cycle} {name}", fact.subject.run)
    }

    fn look(jobs: &Mutex<BTreeMap<String, u64>>, record: &Record) -> AtHand {
        let jobs = jobs.lock().map(|jobs| jobs.get(&Self::key(&record.fact)).copied());
        match jobs.ok().flatten() {
            None => AtHand::No,
            Some(sequence) if sequence == record.sequence => AtHand::Itself,
            Some(_) => AtHand::Twin,
        }
    }

    fn take(jobs: &'a Mutex<BTreeMap<String, u64>>, record: &Record) -> Self {
        let key = Self::key(&record.fact);
        if let Ok(mut jobs) = jobs.lock() {
            jobs.insert(key.clone(), record.sequence);
        }
        Self { jobs, key }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.remove(&self.key);
        }
    }
}
