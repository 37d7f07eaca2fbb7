//! One job of a simulated agent as a state machine. The agent may die between any two steps.

use std::{collections::VecDeque, rc::Rc};

use agent_core::{
    CircuitBreaker, DeliveryAction, FailedAttempt, InFlightState, JobFault, OrderDecline,
    RetryDecision, RunStatus,
};
use cycle::HeldJob;
use wire::{AgentId, Fact, FactBody, FactKey, Subject, TrainPart, WorkKind, v1};

use crate::{
    agent::{AgentTraits, HeldWork},
    faults::Bug,
    peer::{Reply, Request},
    server::{Delivery, Settle},
    specs,
    store::{self, StoreOutcome},
    task,
};

/// The pause before a result is written again to a log that was full.
const WRITE_RETRY_MS: u64 = 1_000;

/// What an agent knows about a job besides its delivery.
#[derive(Clone, Copy)]
pub(crate) struct JobContext {
    pub(crate) run_status: RunStatus,
    pub(crate) status_for_fact: RunStatus,
    pub(crate) in_flight: InFlightState,
    /// The agent may not generate.
    pub(crate) is_quarantined: bool,
    /// Deliveries of the queue that the agent holds, this one included.
    pub(crate) held: usize,
}

pub(crate) struct Job {
    pub(crate) delivery: Delivery,
    stage: Stage,
    store_attempts: u32,
    /// The agent has decided not to decline the order.
    is_taken: bool,
}

#[derive(Debug)]
enum Stage {
    Received,
    /// Waits until its run continues.
    Parked,
    /// Reads the last failure of a job that was delivered too often.
    ReadingDeadLetter,
    /// Asks whether other agents work, before it declines the order.
    CountingLeased {
        declinable: OrderDecline,
        held_before: usize,
    },
    Declining(OrderDecline),
    /// Asks whether the result exists already.
    Checking,
    Fetching,
    /// The store is down.
    WaitingForStore,
    Working,
    /// Results to write. Each needs its files in the store first.
    Storing(VecDeque<Fact>),
    Writing(VecDeque<Fact>),
    /// The log is full.
    WaitingForLog(VecDeque<Fact>),
    /// Reads earlier failures, then writes the next one.
    ReadingFailures(JobFault),
    WritingFailure(JobFault, Box<v1::Failure>),
    /// Waits to write its results although the job was settled.
    WaitingToBeLate(VecDeque<Fact>),
    Settling {
        how: Settle,
        succeeded: bool,
        /// No attempt was made, so no result may follow.
        untried: bool,
    },
}

/// The next action of the agent for a job.
pub(crate) enum Step {
    Send(Request),
    /// Sends a request with which the work of the job begins.
    SendAndStart(Request),
    /// Returns a job, so that another agent gets it, and takes none for this time.
    PauseAndSend(u64, Request),
    SetTimer(u64),
    Wait,
    Failed {
        fault: JobFault,
        delay_ms: u64,
    },
    /// The failure could not be written, so the delivery is not settled.
    Abandoned(JobFault),
    Finished {
        succeeded: bool,
    },
    Die,
}

impl Job {
    pub(crate) fn new(delivery: Delivery) -> Self {
        Self { delivery, stage: Stage::Received, store_attempts: 0, is_taken: false }
    }

    pub(crate) fn is_parked(&self) -> bool {
        matches!(self.stage, Stage::Parked)
    }

    pub(crate) fn waits_for_store(&self) -> bool {
        matches!(self.stage, Stage::WaitingForStore)
    }

    /// Waits for nothing but a timer.
    pub(crate) fn is_working(&self) -> bool {
        matches!(self.stage, Stage::Working | Stage::WaitingForStore | Stage::WaitingForLog(_))
    }

    /// Occupies no slot.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Received | Stage::Parked)
    }

    /// Identifies the work. Another order for the same work has the same value.
    pub(crate) fn work_id(&self) -> HeldWork {
        let subject = &self.delivery.record.fact.subject;
        let (cycle, job) = match &subject.key {
            FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
                (*cycle, job.to_string())
            }
            FactKey::TrainOrder { cycle, .. } => (*cycle, "train".into()),
            FactKey::TrainPartOrder { cycle, outer, part, .. } => {
                (*cycle, wire::train_part_name(*outer, *part))
            }
            key => match key.checkpoint_position() {
                Some((cycle, step)) => (cycle, format!("step {step}")),
                None => (0, format!("{key:?}")),
            },
        };
        (self.delivery.queue.kind, HeldJob { run: subject.run.clone(), cycle, job })
    }

    /// The request that settles the delivery.
    pub(crate) fn settle_request(&mut self) -> Request {
        let how = match self.stage {
            Stage::Settling { how, .. } => how,
            _ => Settle::Ack,
        };
        Request::Settle(self.delivery.queue, self.delivery.record.sequence, how)
    }

    /// Returns the job to the queue for another agent.
    pub(crate) fn nack(&mut self) -> Request {
        let how = Settle::Nak { delay_ms: 0 };
        self.stage = Stage::Settling { how, succeeded: false, untried: false };
        self.settle_request()
    }

    fn settle(&mut self, how: Settle, succeeded: bool) -> Step {
        self.stage = Stage::Settling { how, succeeded, untried: false };
        Step::Send(self.settle_request())
    }

    fn return_untried(&mut self) -> Request {
        let how = Settle::Nak { delay_ms: 0 };
        self.stage = Stage::Settling { how, succeeded: false, untried: true };
        self.settle_request()
    }

    /// Continues after a reply, a timer, or news about its run.
    pub(crate) fn step(
        &mut self,
        traits: &AgentTraits,
        random: &mut fastrand::Rng,
        context: JobContext,
        reply: Option<Reply>,
    ) -> Step {
        if context.run_status.is_over && self.is_working() {
            return self.settle(Settle::Ack, false);
        }
        match (std::mem::replace(&mut self.stage, Stage::Received), reply) {
            (Stage::Received | Stage::Parked, _) => self.admit(traits, context),
            (Stage::ReadingDeadLetter, Some(Reply::Record(last))) => {
                self.decide_dead_letter(read_failure(last.as_deref()).as_ref())
            }
            (Stage::Checking, Some(Reply::Record(found))) => {
                self.handle_existing(traits, found.as_deref())
            }
            (stage @ (Stage::CountingLeased { .. } | Stage::Declining(_)), Some(reply)) => {
                self.continue_declining(traits, context, stage, reply)
            }
            (Stage::WaitingForStore, _) => self.fetch(),
            (Stage::Fetching, Some(Reply::Stored(outcome))) => match outcome {
                StoreOutcome::Done => {
                    self.stage = Stage::Working;
                    Step::SetTimer(self.work_ms(traits, random))
                }
                StoreOutcome::Away => self.back_off(),
                // Another agent may have the file.
                StoreOutcome::Damaged => self.read_failures(JobFault::WorkFailed),
                StoreOutcome::DiskFull => self.read_failures(JobFault::DiskFull),
            },
            (Stage::Working, _) => self.finish_work(traits, random),
            (Stage::Storing(results), Some(Reply::Stored(StoreOutcome::Done))) => {
                self.write_stored(results)
            }
            // The job is done again, because its files could not be stored.
            (Stage::Storing(_), Some(Reply::Stored(_))) => self.back_off(),
            // An acknowledgement that was sent too early.
            (Stage::Storing(results), _) => self.write_next(results),
            (Stage::Writing(results), Some(Reply::LogFull)) => {
                self.stage = Stage::WaitingForLog(results);
                Step::SetTimer(WRITE_RETRY_MS)
            }
            (Stage::WaitingForLog(results), _) => self.write_stored(results),
            (Stage::Writing(mut results), Some(Reply::Published(_))) => {
                // If another agent was first, its result is just as good.
                results.pop_front();
                self.write_next(results)
            }
            (Stage::ReadingFailures(fault), Some(Reply::Record(last))) => {
                self.write_failure(traits, fault, read_failure(last.as_deref()))
            }
            (Stage::WritingFailure(fault, failure), Some(Reply::Published(published))) => {
                match published.ours {
                    true => self.finish_failed(fault, &[*failure]),
                    false => self.read_failures(fault),
                }
            }
            (Stage::WritingFailure(fault, _), Some(Reply::LogFull)) => Step::Abandoned(fault),
            (Stage::Settling { succeeded: false, untried: false, .. }, Some(Reply::Settled))
                if traits.writes_late =>
            {
                // The result comes too late, or just in time.
                self.stage = Stage::WaitingToBeLate(self.make_results(traits, random));
                Step::SetTimer(random.u64(1..5_000))
            }
            (Stage::WaitingToBeLate(results), _) => self.write_next(results),
            (Stage::Settling { succeeded, .. }, _) => Step::Finished { succeeded },
            (stage, _) => {
                // A reply to an earlier request.
                self.stage = stage;
                Step::Wait
            }
        }
    }

    fn finish_work(&mut self, traits: &AgentTraits, random: &mut fastrand::Rng) -> Step {
        if random.u32(0..1000) < traits.failure_permille {
            // Known causes and unknown ones.
            let fault =
                if random.bool() { JobFault::Transient("gpu_hang") } else { JobFault::WorkFailed };
            return self.read_failures(fault);
        }
        if traits.broken {
            return self.read_failures(JobFault::HostBroken);
        }
        let results = self.make_results(traits, random);
        if traits.bug == Some(Bug::AcksFirst) {
            self.stage = Stage::Storing(results);
            let (queue, sequence) = (self.delivery.queue, self.delivery.record.sequence);
            return Step::Send(Request::Settle(queue, sequence, Settle::Ack));
        }
        self.write_next(results)
    }

    fn admit(&mut self, traits: &AgentTraits, context: JobContext) -> Step {
        let status = match traits.bug {
            Some(Bug::WorksOnStaleOrders) => RunStatus::default(),
            _ => context.status_for_fact,
        };
        let Delivery { queue, record, delivered } = &self.delivery;
        let (agent, body) = (traits.name.as_str(), &record.fact.body);
        let action = agent_core::admit_delivery(agent, body, *delivered, status, context.in_flight);
        let may_run = !(context.is_quarantined && queue.kind == WorkKind::Generate);
        match action {
            DeliveryAction::Ignore => Step::Finished { succeeded: false },
            DeliveryAction::Acknowledge => self.settle(Settle::Ack, false),
            DeliveryAction::Nack => {
                Step::PauseAndSend(agent_core::NACK_PAUSE_MS, self.return_untried())
            }
            DeliveryAction::DeferToAgent => {
                let how = Settle::Nak { delay_ms: agent_core::defer_delay_ms(agent, *delivered) };
                self.stage = Stage::Settling { how, succeeded: false, untried: true };
                Step::Send(self.settle_request())
            }
            DeliveryAction::Wait => {
                self.stage = Stage::Parked;
                Step::Wait
            }
            DeliveryAction::DeadLetter | DeliveryAction::Run if !may_run => {
                Step::Send(self.return_untried())
            }
            DeliveryAction::DeadLetter => {
                self.stage = Stage::ReadingDeadLetter;
                self.find_last_failure().map_or_else(|| self.settle(Settle::Ack, false), Step::Send)
            }
            DeliveryAction::Run => match self.decide_decline(traits) {
                Some(declinable) if !self.is_taken => self.count_leased(declinable, context.held),
                _ => {
                    self.stage = Stage::Checking;
                    Step::SendAndStart(self.find_result())
                }
            },
        }
    }

    /// Decides again, because the run may have paused or ended meanwhile.
    fn take(&mut self, traits: &AgentTraits, context: JobContext) -> Step {
        self.is_taken = true;
        self.admit(traits, context)
    }

    fn continue_declining(
        &mut self,
        traits: &AgentTraits,
        context: JobContext,
        stage: Stage,
        reply: Reply,
    ) -> Step {
        match (stage, reply) {
            (Stage::CountingLeased { declinable, held_before }, Reply::Leased(leased))
                if leased > held_before.max(context.held)
                    || traits.bug == Some(Bug::DeclinesAlone) =>
            {
                self.decline(traits, declinable)
            }
            (Stage::Declining(declinable), Reply::Published(published)) if published.is_new => {
                self.return_declined(&declinable)
            }
            // Nobody else works, the order was declined before, or the log is full.
            (Stage::CountingLeased { .. }, Reply::Leased(_))
            | (Stage::Declining(_), Reply::Published(_) | Reply::LogFull) => {
                self.take(traits, context)
            }
            (stage, _) => {
                self.stage = stage;
                Step::Wait
            }
        }
    }

    fn decide_decline(&self, traits: &AgentTraits) -> Option<OrderDecline> {
        let Delivery { record, delivered, .. } = &self.delivery;
        let FactBody::GenerateOrder(order) = &record.fact.body else { return None };
        agent_core::decide_decline(order, *delivered, &traits.name, traits.throughput())
    }

    fn count_leased(&mut self, declinable: OrderDecline, own: usize) -> Step {
        let v1::Declined { run, cycle, job, attempt, .. } = &declinable.fact;
        let order = format!("{run} {cycle} {job} {attempt}");
        self.stage = Stage::CountingLeased { declinable, held_before: own };
        Step::Send(Request::CountLeased { queue: self.delivery.queue, order, own })
    }

    fn decline(&mut self, traits: &AgentTraits, declinable: OrderDecline) -> Step {
        let agent = AgentId::new(traits.name.as_str()).expect("a legal name");
        let order = &self.delivery.record.fact.subject;
        let subject = order.declined_by(&agent).expect("a generate order");
        let fact = Fact { subject, body: FactBody::Declined(declinable.fact.clone()) };
        self.stage = Stage::Declining(declinable);
        Step::Send(Request::Publish(Rc::new(fact)))
    }

    fn return_declined(&mut self, declinable: &OrderDecline) -> Step {
        let pause = u64::try_from(declinable.pause.as_millis()).unwrap_or(u64::MAX);
        Step::PauseAndSend(pause, self.return_untried())
    }

    /// Gives up the job, unless the agents before lacked what it needs.
    fn decide_dead_letter(&mut self, last: Option<&v1::Failure>) -> Step {
        match agent_core::is_dead_letter(self.delivery.queue.kind, self.delivery.delivered, last) {
            true => self.read_failures(JobFault::InvalidInput),
            false => {
                self.stage = Stage::Checking;
                Step::Send(self.find_result())
            }
        }
    }

    fn find_result(&self) -> Request {
        let subject = &self.delivery.record.fact.subject;
        let at = |key| Request::Get(Subject::new(&subject.run, key).to_string());
        match &subject.key {
            FactKey::GenerateOrder { cycle, job, .. } => {
                at(FactKey::Samples { cycle: *cycle, job: job.clone() })
            }
            FactKey::Samples { cycle, job } if self.delivery.queue.kind == WorkKind::Score => {
                at(FactKey::Scores { cycle: *cycle, job: job.clone() })
            }
            FactKey::Samples { cycle, job } => {
                at(FactKey::Verdicts { cycle: *cycle, job: job.clone() })
            }
            FactKey::TrainOrder { cycle, .. } => {
                Request::LastWithPrefix(format!("flotilla.{}.checkpoint.{cycle}.", subject.run))
            }
            FactKey::TrainPartOrder { cycle, outer, part: TrainPart::Slice(slice), .. } => {
                at(FactKey::Delta { cycle: *cycle, outer: *outer, slice: *slice })
            }
            FactKey::TrainPartOrder { cycle, outer, part: TrainPart::Merge, .. } => {
                at(FactKey::Merge { cycle: *cycle, outer: *outer })
            }
            key => match key.checkpoint_position() {
                Some((cycle, step)) => at(eval_key(cycle, step)),
                None => Request::Get(format!("{key:?}")),
            },
        }
    }

    fn handle_existing(&mut self, traits: &AgentTraits, found: Option<&wire::Record>) -> Step {
        let done = found.is_some_and(|record| match &record.fact.body {
            FactBody::Checkpoint(checkpoint) => checkpoint.r#final,
            _ => true,
        });
        if done {
            return self.settle(Settle::Ack, true);
        }
        let (kind, HeldJob { run, cycle, job }) = self.work_id();
        let named = (run.as_str(), kind, cycle, &*job);
        if traits.poison && named == (specs::FIRST_RUN, WorkKind::Generate, 1, "t00001") {
            return Step::Die;
        }
        self.fetch()
    }

    fn fetch(&mut self) -> Step {
        self.stage = Stage::Fetching;
        let fact = &self.delivery.record.fact;
        Step::Send(Request::Fetch(match &fact.body {
            FactBody::Samples(_) => {
                task::blob(b"prompts").map(|blob| blob.digest).into_iter().collect()
            }
            _ => store::named_files(fact),
        }))
    }

    fn back_off(&mut self) -> Step {
        let pause = CircuitBreaker::dependency_backoff(self.store_attempts);
        self.store_attempts += 1;
        let Some(pause) = pause else { return self.read_failures(JobFault::WorkFailed) };
        self.stage = Stage::WaitingForStore;
        Step::SetTimer(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX))
    }

    /// The number of samples to draw.
    pub(crate) fn sample_count(&self) -> u32 {
        match &self.delivery.record.fact.body {
            FactBody::GenerateOrder(order) => order.requests.iter().map(|r| r.count).sum(),
            _ => 0,
        }
    }

    fn work_ms(&self, traits: &AgentTraits, random: &mut fastrand::Rng) -> u64 {
        let samples = match &self.delivery.record.fact.body {
            FactBody::GenerateOrder(_) => f64::from(self.sample_count()),
            _ => 4.0,
        };
        let seconds = samples / traits.samples_per_s * (0.5 + random.f64());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "minutes")]
        let work_ms = (1000.0 * seconds) as u64;
        50 + work_ms
    }

    fn make_results(&self, traits: &AgentTraits, random: &mut fastrand::Rng) -> VecDeque<Fact> {
        let record = &self.delivery.record;
        let subject = &record.fact.subject;
        let agent = traits.name.as_str();
        let fact = |key, body| task::new_fact(subject, key, body);
        match (&subject.key, &record.fact.body) {
            (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) => {
                let reports_other_adapter = traits.reports_other_adapter && random.bool();
                let wall_s = 0.25 * f64::from(specs::PROMPTS);
                let key = FactKey::Samples { cycle: *cycle, job: job.clone() };
                let stale = traits.stale && random.u32(0..4) > 0;
                let samples =
                    task::make_samples(order, agent, wall_s, reports_other_adapter, stale);
                let samples = match traits.bug {
                    Some(Bug::WrongPolicy) if random.bool() => task::change_texts(samples),
                    _ => samples,
                };
                [fact(key, samples)].into()
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples))
                if self.delivery.queue.kind == WorkKind::Score =>
            {
                let key = FactKey::Scores { cycle: *cycle, job: job.clone() };
                [fact(key, task::make_scores(samples, record.sequence, agent))].into()
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let key = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
                [fact(key, task::make_verdicts(samples, record.sequence, agent))].into()
            }
            (FactKey::TrainOrder { cycle, .. }, FactBody::TrainOrder(order)) => task::saved_steps()
                .map(|step| {
                    let key = FactKey::Checkpoint { cycle: *cycle, step };
                    fact(key, task::make_checkpoint(order, step, agent))
                })
                .collect(),
            (FactKey::TrainPartOrder { .. }, FactBody::TrainOrder(order)) => {
                let results = task::make_part_results(order, agent);
                results.into_iter().map(|(key, body)| fact(key, body)).collect()
            }
            (key, FactBody::Checkpoint(checkpoint)) => {
                let eval =
                    |(cycle, step)| fact(eval_key(cycle, step), task::make_eval(checkpoint, agent));
                key.checkpoint_position().map(eval).into_iter().collect()
            }
            _ => VecDeque::new(),
        }
    }

    /// Writes the files of a checkpoint first, then the fact that names them.
    fn write_next(&mut self, results: VecDeque<Fact>) -> Step {
        let Some(next) = results.front() else { return self.settle(Settle::Ack, true) };
        let tree = match &next.body {
            FactBody::Checkpoint(checkpoint) => &checkpoint.tree,
            FactBody::Delta(delta) => &delta.tree,
            FactBody::Merge(merge) => &merge.tree,
            _ => &None,
        };
        let Some(tree) = tree else { return self.write_stored(results) };
        let request = Request::Store(tree.manifest.clone());
        self.stage = Stage::Storing(results);
        Step::Send(request)
    }

    fn write_stored(&mut self, results: VecDeque<Fact>) -> Step {
        let next = results.front().cloned();
        self.stage = Stage::Writing(results);
        next.map_or(Step::Wait, |fact| Step::Send(Request::Publish(Rc::new(fact))))
    }

    /// Returns the id of the failures of the job.
    fn failure_id(&self) -> Option<String> {
        let suites = [v1::Suite { name: task::SUITE.into(), ..Default::default() }];
        let subject = &self.delivery.record.fact.subject;
        let expected = agent_core::expected_results(&subject.key, &suites);
        expected.into_iter().next().map(|(id, _)| id)
    }

    fn find_last_failure(&self) -> Option<Request> {
        let (run, kind) = (&self.delivery.record.fact.subject.run, self.delivery.queue.kind);
        let id = self.failure_id()?;
        Some(Request::LastWithPrefix(format!("flotilla.{run}.failure.{kind}.{id}.")))
    }

    fn read_failures(&mut self, fault: JobFault) -> Step {
        let Some(request) = self.find_last_failure() else {
            return self.settle(Settle::Ack, false);
        };
        self.stage = Stage::ReadingFailures(fault);
        Step::Send(request)
    }

    fn write_failure(
        &mut self,
        traits: &AgentTraits,
        fault: JobFault,
        last: Option<v1::Failure>,
    ) -> Step {
        let subject = &self.delivery.record.fact.subject;
        let kind = self.delivery.queue.kind;
        let (run, agent) = (&subject.run, traits.name.as_str());
        let attempt = FailedAttempt { run, kind, agent, fault, message: "failed", log_tail: "" };
        let given_up = last.as_ref().is_some_and(|last| last.r#final);
        let next = self.failure_id().filter(|_| !given_up);
        let next = next.and_then(|id| agent_core::build_failure(&attempt, &id, last.as_ref()));
        let Some(failure) = next else { return self.finish_failed(fault, last.as_slice()) };
        let key = FactKey::Failure { kind, id: failure.id.clone(), attempt: failure.attempt };
        let fact = task::new_fact(subject, key, FactBody::Failure(failure.clone()));
        self.stage = Stage::WritingFailure(fault, Box::new(failure));
        Step::Send(Request::Publish(Rc::new(fact)))
    }

    fn finish_failed(&mut self, fault: JobFault, failures: &[v1::Failure]) -> Step {
        let (how, delay_ms) = match agent_core::decide_retry(failures) {
            RetryDecision::GiveUp => (Settle::Ack, 0),
            RetryDecision::RetryAfter { delay_ms } => (Settle::Nak { delay_ms }, delay_ms),
        };
        self.stage = Stage::Settling { how, succeeded: false, untried: false };
        Step::Failed { fault, delay_ms }
    }
}

fn eval_key(cycle: u32, step: u32) -> FactKey {
    FactKey::Eval { cycle, step, suite: task::SUITE.parse().expect("a legal name") }
}

fn read_failure(record: Option<&wire::Record>) -> Option<v1::Failure> {
    match record.map(|record| &record.fact.body) {
        Some(FactBody::Failure(failure)) => Some(failure.clone()),
        _ => None,
    }
}
