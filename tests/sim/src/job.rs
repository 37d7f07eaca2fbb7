//! One job of a simulated agent as a state machine. The agent may die between any two steps.

use std::collections::VecDeque;

use agent_core::{
    CircuitBreaker, DeliveryAction, FailedAttempt, InFlightState, JobFault, NACK_PAUSE_MS,
    RetryDecision, RunStatus,
};
use wire::{Fact, FactBody, FactKey, Subject, WorkKind, v1};

use crate::{
    agent::AgentTraits,
    faults::Bug,
    server::{Delivery, Settle},
    task,
    world::{Reply, Request},
};

pub(crate) struct Job {
    pub(crate) delivery: Delivery,
    stage: Stage,
    store_attempts: u32,
}

#[derive(Debug)]
enum Stage {
    Received,
    /// Waits until its run continues.
    Parked,
    /// Asks whether the result exists already.
    Checking,
    Fetching,
    /// The store is down.
    WaitingForStore,
    Working,
    /// Results to write. Each needs its files in the store first.
    Storing(VecDeque<Fact>),
    Writing(VecDeque<Fact>),
    /// Reads earlier failures, then writes the next one.
    ReadingFailures(JobFault),
    WritingFailure(JobFault, Box<v1::Failure>),
    /// Writes a result although the job was settled.
    WritingLate(VecDeque<Fact>),
    Settling {
        how: Settle,
        succeeded: bool,
    },
}

/// The next action of the agent for a job.
pub(crate) enum Step {
    Send(Request),
    /// Sends a request with which the work of the job begins.
    SendAndStart(Request),
    SetTimer(u64),
    Wait,
    Failed {
        fault: JobFault,
        delay_ms: u64,
    },
    Finished {
        succeeded: bool,
    },
    Die,
}

impl Job {
    pub(crate) fn new(delivery: Delivery) -> Self {
        Self { delivery, stage: Stage::Received, store_attempts: 0 }
    }

    pub(crate) fn is_parked(&self) -> bool {
        matches!(self.stage, Stage::Parked)
    }

    pub(crate) fn waits_for_store(&self) -> bool {
        matches!(self.stage, Stage::WaitingForStore)
    }

    /// Waits for nothing but a timer.
    pub(crate) fn is_working(&self) -> bool {
        matches!(self.stage, Stage::Working | Stage::WaitingForStore)
    }

    /// Occupies no slot.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Received | Stage::Parked)
    }

    /// Identifies the work. Another order for the same work has the same value.
    pub(crate) fn work_id(&self) -> (WorkKind, u32, String) {
        let (cycle, name) = match &self.delivery.record.fact.subject.key {
            FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
                (*cycle, job.to_string())
            }
            FactKey::TrainOrder { cycle, .. } => (*cycle, "train".into()),
            FactKey::Checkpoint { cycle, step } => (*cycle, format!("step {step}")),
            key => (0, format!("{key:?}")),
        };
        (self.delivery.kind, cycle, name)
    }

    /// The request that settles the delivery.
    pub(crate) fn settle_request(&mut self) -> Request {
        let how = match self.stage {
            Stage::Settling { how, .. } => how,
            _ => Settle::Ack,
        };
        Request::Settle(self.delivery.kind, self.delivery.record.sequence, how)
    }

    /// Returns the job to the queue for another agent.
    pub(crate) fn nack(&mut self) -> Request {
        self.stage = Stage::Settling { how: Settle::Nak { delay_ms: 0 }, succeeded: false };
        self.settle_request()
    }

    fn settle(&mut self, how: Settle, succeeded: bool) -> Step {
        self.stage = Stage::Settling { how, succeeded };
        Step::Send(self.settle_request())
    }

    /// Continues after a reply, a timer, or news about its run.
    pub(crate) fn step(
        &mut self,
        traits: &AgentTraits,
        random: &mut fastrand::Rng,
        run_status: RunStatus,
        in_flight: InFlightState,
        reply: Option<Reply>,
    ) -> Step {
        if run_status.is_over && self.is_working() {
            return self.settle(Settle::Ack, false);
        }
        match (std::mem::replace(&mut self.stage, Stage::Received), reply) {
            (Stage::Received | Stage::Parked, _) => {
                let run_status = match traits.bug {
                    Some(Bug::WorksOnStaleOrders) => RunStatus::default(),
                    _ => run_status,
                };
                self.admit(run_status, in_flight)
            }
            (Stage::Checking, Some(Reply::Record(found))) => {
                self.handle_existing(traits, found.as_deref())
            }
            (Stage::WaitingForStore, _) => self.fetch(),
            (Stage::Fetching, Some(Reply::Stored(true))) => {
                self.stage = Stage::Working;
                Step::SetTimer(self.work_ms(traits, random))
            }
            (Stage::Fetching, Some(Reply::Stored(false))) => self.back_off(),
            (Stage::Working, _) => self.finish_work(traits, random),
            (Stage::Storing(results), Some(Reply::Stored(true))) => {
                let next = results.front().cloned();
                self.stage = Stage::Writing(results);
                next.map_or(Step::Wait, |fact| Step::Send(Request::Publish(Box::new(fact))))
            }
            // The training is done and its files wait for the store.
            (Stage::Storing(results), _) => self.write_next(results),
            (Stage::Writing(mut results), Some(Reply::Published(_))) => {
                // If another agent was first, its result is just as good.
                results.pop_front();
                self.write_next(results)
            }
            (Stage::ReadingFailures(fault), Some(Reply::Record(last))) => {
                let last = last.and_then(|record| match &record.fact.body {
                    FactBody::Failure(failure) => Some(failure.clone()),
                    _ => None,
                });
                self.write_failure(traits, fault, last)
            }
            (Stage::WritingFailure(fault, failure), Some(Reply::Published(published))) => {
                match published.ours {
                    true => self.finish_failed(fault, &[*failure]),
                    false => self.read_failures(fault),
                }
            }
            (Stage::Settling { succeeded: false, how }, Some(Reply::Settled))
                if traits.writes_late && how != (Settle::Nak { delay_ms: NACK_PAUSE_MS }) =>
            {
                // The result comes too late, or just in time.
                self.stage = Stage::WritingLate(self.make_results(traits, random));
                Step::SetTimer(random.u64(1..5_000))
            }
            (Stage::WritingLate(mut results), _) => match results.pop_front() {
                Some(fact) => {
                    self.stage = Stage::WritingLate(results);
                    Step::Send(Request::Publish(Box::new(fact)))
                }
                None => Step::Finished { succeeded: false },
            },
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
            let (kind, sequence) = (self.delivery.kind, self.delivery.record.sequence);
            return Step::Send(Request::Settle(kind, sequence, Settle::Ack));
        }
        self.write_next(results)
    }

    fn admit(&mut self, run_status: RunStatus, in_flight: InFlightState) -> Step {
        let body = &self.delivery.record.fact.body;
        match agent_core::admit_delivery(body, self.delivery.delivered, run_status, in_flight) {
            DeliveryAction::Ignore => Step::Finished { succeeded: false },
            DeliveryAction::Acknowledge => self.settle(Settle::Ack, false),
            DeliveryAction::Nack => self.settle(Settle::Nak { delay_ms: NACK_PAUSE_MS }, false),
            DeliveryAction::DeadLetter => self.read_failures(JobFault::InvalidInput),
            DeliveryAction::Wait => {
                self.stage = Stage::Parked;
                Step::Wait
            }
            DeliveryAction::Run => {
                self.stage = Stage::Checking;
                Step::SendAndStart(self.find_result())
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
            FactKey::Samples { cycle, job } => {
                at(FactKey::Verdicts { cycle: *cycle, job: job.clone() })
            }
            FactKey::TrainOrder { cycle, .. } => {
                Request::LastWithPrefix(format!("flotilla.{}.checkpoint.{cycle}.", subject.run))
            }
            FactKey::Checkpoint { cycle, step } => {
                let suite = task::SUITE.parse().expect("a legal name");
                at(FactKey::Eval { cycle: *cycle, step: *step, suite })
            }
            key => Request::Get(format!("{key:?}")),
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
        let (kind, cycle, name) = self.work_id();
        if traits.poison && (kind, cycle, &*name) == (WorkKind::Generate, 1, "t00001") {
            return Step::Die;
        }
        self.fetch()
    }

    fn fetch(&mut self) -> Step {
        self.stage = Stage::Fetching;
        Step::Send(Request::Store)
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
                let wall_s = 0.25 * f64::from(task::PROMPTS);
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
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let key = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
                [fact(key, task::make_verdicts(samples, record.sequence, agent))].into()
            }
            (FactKey::TrainOrder { cycle, .. }, FactBody::TrainOrder(order)) => (1..=task::STEPS)
                .filter(|step| step % task::SAVE_EVERY == 0)
                .map(|step| {
                    let key = FactKey::Checkpoint { cycle: *cycle, step };
                    fact(key, task::make_checkpoint(order, step, agent))
                })
                .collect(),
            (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => {
                let suite = task::SUITE.parse().expect("a legal name");
                let key = FactKey::Eval { cycle: *cycle, step: *step, suite };
                [fact(key, task::make_eval(checkpoint, agent))].into()
            }
            _ => VecDeque::new(),
        }
    }

    /// Writes the files first, then the fact that names them.
    fn write_next(&mut self, results: VecDeque<Fact>) -> Step {
        if results.is_empty() {
            return self.settle(Settle::Ack, true);
        }
        self.stage = Stage::Storing(results);
        Step::Send(Request::Store)
    }

    fn read_failures(&mut self, fault: JobFault) -> Step {
        let subject = &self.delivery.record.fact.subject;
        let kind = self.delivery.kind;
        let suites = [v1::Suite { name: task::SUITE.into(), ..Default::default() }];
        let expected = agent_core::expected_results(&subject.key, &suites);
        let Some((id, _)) = expected.first() else { return self.settle(Settle::Ack, false) };
        self.stage = Stage::ReadingFailures(fault);
        Step::Send(Request::LastWithPrefix(format!(
            "flotilla.{}.failure.{kind}.{id}.",
            subject.run
        )))
    }

    fn write_failure(
        &mut self,
        traits: &AgentTraits,
        fault: JobFault,
        last: Option<v1::Failure>,
    ) -> Step {
        let subject = &self.delivery.record.fact.subject;
        let kind = self.delivery.kind;
        let suites = [v1::Suite { name: task::SUITE.into(), ..Default::default() }];
        let expected = agent_core::expected_results(&subject.key, &suites);
        let (run, agent) = (&subject.run, traits.name.as_str());
        let attempt = FailedAttempt { run, kind, agent, fault, message: "failed", log_tail: "" };
        let given_up = last.as_ref().is_some_and(|last| last.r#final);
        let next = expected.first().filter(|_| !given_up);
        let next = next.and_then(|(id, _)| agent_core::build_failure(&attempt, id, last.as_ref()));
        let Some(failure) = next else { return self.finish_failed(fault, last.as_slice()) };
        let key = FactKey::Failure { kind, id: failure.id.clone(), attempt: failure.attempt };
        let fact = task::new_fact(subject, key, FactBody::Failure(failure.clone()));
        self.stage = Stage::WritingFailure(fault, Box::new(failure));
        Step::Send(Request::Publish(Box::new(fact)))
    }

    fn finish_failed(&mut self, fault: JobFault, failures: &[v1::Failure]) -> Step {
        let (how, delay_ms) = match agent_core::decide_retry(failures) {
            RetryDecision::GiveUp => (Settle::Ack, 0),
            RetryDecision::RetryAfter { delay_ms } => (Settle::Nak { delay_ms }, delay_ms),
        };
        self.stage = Stage::Settling { how, succeeded: false };
        Step::Failed { fault, delay_ms }
    }
}
