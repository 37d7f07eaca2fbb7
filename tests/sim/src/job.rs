//! One job in an agent's hands, step by step; between any two the agent may die.

use std::collections::VecDeque;

use agent_core::{
    CircuitBreaker, DeliveryAction, FailedAttempt, InFlightState, JobFault, NACK_PAUSE_MS,
    RetryDecision, RunStatus,
};
use wire::{Fact, FactBody, FactKey, Subject, WorkKind, v1};

use crate::{
    agent::Nature,
    faults::Bug,
    server::{Delivery, Settle},
    task,
    world::{Reply, Request},
};

pub(crate) struct Job {
    pub(crate) delivery: Delivery,
    stage: Stage,
    look: u32,
}

#[derive(Debug)]
enum Stage {
    Received,
    /// Waits for its run to go on.
    Parked,
    /// Looks whether the result is there already.
    Checking,
    Fetching,
    /// The store is away.
    HeldUp,
    Working,
    /// Results to write, files of each first.
    Storing(VecDeque<Fact>),
    Writing(VecDeque<Fact>),
    /// Looks for earlier failures, then writes the next.
    Looking(JobFault),
    Failing(JobFault, Box<v1::Failure>),
    /// Writes results nobody waits for any more.
    Undead(VecDeque<Fact>),
    Settling {
        how: Settle,
        well: bool,
    },
}

/// What the agent does for the job.
pub(crate) enum Step {
    Ask(Request),
    /// The same, and the job's work begins with it.
    Begin(Request),
    Work(u64),
    Wait,
    Failed {
        fault: JobFault,
        delay_ms: u64,
    },
    Over {
        well: bool,
    },
    Die,
}

impl Job {
    pub(crate) fn new(delivery: Delivery) -> Self {
        Self { delivery, stage: Stage::Received, look: 0 }
    }

    pub(crate) fn is_parked(&self) -> bool {
        matches!(self.stage, Stage::Parked)
    }

    pub(crate) fn is_held_up(&self) -> bool {
        matches!(self.stage, Stage::HeldUp)
    }

    /// Waits for a timer and nothing else.
    pub(crate) fn is_working(&self) -> bool {
        matches!(self.stage, Stage::Working | Stage::HeldUp)
    }

    /// Takes no room.
    pub(crate) fn waits(&self) -> bool {
        matches!(self.stage, Stage::Received | Stage::Parked)
    }

    /// What it is, as the agent says and as another order of the same would be.
    pub(crate) fn name(&self) -> (WorkKind, u32, String) {
        let (cycle, name) = match &self.delivery.record.fact.subject.key {
            FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
                (*cycle, job.to_string())
            }
            FactKey::TrainOrder { cycle, .. } => (*cycle, "train".into()),
            FactKey::Checkpoint { cycle, step } => (*cycle, format!("step {step}")),
            place => (0, format!("{place:?}")),
        };
        (self.delivery.kind, cycle, name)
    }

    /// The request that settles the delivery as was decided.
    pub(crate) fn settle(&mut self) -> Request {
        let how = match self.stage {
            Stage::Settling { how, .. } => how,
            _ => Settle::Ack,
        };
        Request::Settle(self.delivery.kind, self.delivery.record.sequence, how)
    }

    /// Another is to do it.
    pub(crate) fn hand_back(&mut self) -> Request {
        self.stage = Stage::Settling { how: Settle::Nak { delay_ms: 0 }, well: false };
        self.settle()
    }

    fn settling(&mut self, how: Settle, well: bool) -> Step {
        self.stage = Stage::Settling { how, well };
        Step::Ask(self.settle())
    }

    /// Goes on after an answer, a timer, or news of its run.
    pub(crate) fn step(
        &mut self,
        nature: &Nature,
        random: &mut fastrand::Rng,
        course: RunStatus,
        at_hand: InFlightState,
        reply: Option<Reply>,
    ) -> Step {
        if course.is_over && self.is_working() {
            return self.settling(Settle::Ack, false);
        }
        match (std::mem::replace(&mut self.stage, Stage::Received), reply) {
            (Stage::Received | Stage::Parked, _) => {
                let course = match nature.bug {
                    Some(Bug::WorksOnStaleOrders) => RunStatus::default(),
                    _ => course,
                };
                self.receive(course, at_hand)
            }
            (Stage::Checking, Some(Reply::Record(found))) => self.checked(nature, found.as_deref()),
            (Stage::HeldUp, _) => self.fetch(),
            (Stage::Fetching, Some(Reply::Stored(true))) => {
                self.stage = Stage::Working;
                Step::Work(self.milliseconds(nature, random))
            }
            (Stage::Fetching, Some(Reply::Stored(false))) => self.held_up(),
            (Stage::Working, _) => self.worked(nature, random),
            (Stage::Storing(results), Some(Reply::Stored(true))) => {
                let next = results.front().cloned();
                self.stage = Stage::Writing(results);
                next.map_or(Step::Wait, |fact| Step::Ask(Request::Publish(Box::new(fact))))
            }
            // The training is done: its files wait for the store.
            (Stage::Storing(results), _) => self.write(results),
            (Stage::Writing(mut results), Some(Reply::Published(_))) => {
                // That somebody else was first is as good.
                results.pop_front();
                self.write(results)
            }
            (Stage::Looking(fault), Some(Reply::Record(last))) => {
                let last = last.and_then(|record| match &record.fact.body {
                    FactBody::Failure(failure) => Some(failure.clone()),
                    _ => None,
                });
                self.failed_before(nature, fault, last)
            }
            (Stage::Failing(fault, failure), Some(Reply::Published(published))) => {
                match published.ours {
                    true => self.told(fault, &[*failure]),
                    false => self.look_for_failures(fault),
                }
            }
            (Stage::Settling { well: false, how }, Some(Reply::Settled))
                if nature.zombie && how != (Settle::Nak { delay_ms: NACK_PAUSE_MS }) =>
            {
                // It comes too late, or just in time.
                self.stage = Stage::Undead(self.results(nature, random));
                Step::Work(random.u64(1..5_000))
            }
            (Stage::Undead(mut results), _) => match results.pop_front() {
                Some(fact) => {
                    self.stage = Stage::Undead(results);
                    Step::Ask(Request::Publish(Box::new(fact)))
                }
                None => Step::Over { well: false },
            },
            (Stage::Settling { well, .. }, _) => Step::Over { well },
            (stage, _) => {
                // An answer to something asked before.
                self.stage = stage;
                Step::Wait
            }
        }
    }

    fn worked(&mut self, nature: &Nature, random: &mut fastrand::Rng) -> Step {
        if random.u32(0..1000) < nature.fails {
            // A known way to die, or not.
            let fault =
                if random.bool() { JobFault::Transient("gpu_hang") } else { JobFault::WorkFailed };
            return self.look_for_failures(fault);
        }
        if nature.broken {
            return self.look_for_failures(JobFault::HostBroken);
        }
        let results = self.results(nature, random);
        if nature.bug == Some(Bug::AcksFirst) {
            self.stage = Stage::Storing(results);
            let (kind, sequence) = (self.delivery.kind, self.delivery.record.sequence);
            return Step::Ask(Request::Settle(kind, sequence, Settle::Ack));
        }
        self.write(results)
    }

    fn receive(&mut self, course: RunStatus, at_hand: InFlightState) -> Step {
        let body = &self.delivery.record.fact.body;
        match agent_core::admit_delivery(body, self.delivery.delivered, course, at_hand) {
            DeliveryAction::Ignore => Step::Over { well: false },
            DeliveryAction::Acknowledge => self.settling(Settle::Ack, false),
            DeliveryAction::Nack => self.settling(Settle::Nak { delay_ms: NACK_PAUSE_MS }, false),
            DeliveryAction::DeadLetter => self.look_for_failures(JobFault::InvalidInput),
            DeliveryAction::Wait => {
                self.stage = Stage::Parked;
                Step::Wait
            }
            DeliveryAction::Run => {
                self.stage = Stage::Checking;
                Step::Begin(self.look_for_result())
            }
        }
    }

    fn look_for_result(&self) -> Request {
        let subject = &self.delivery.record.fact.subject;
        let at = |place| Request::Get(Subject::new(&subject.run, place).to_string());
        match &subject.key {
            FactKey::GenerateOrder { cycle, job, .. } => {
                at(FactKey::Samples { cycle: *cycle, job: job.clone() })
            }
            FactKey::Samples { cycle, job } => {
                at(FactKey::Verdicts { cycle: *cycle, job: job.clone() })
            }
            FactKey::TrainOrder { cycle, .. } => {
                Request::LastBelow(format!("flotilla.{}.checkpoint.{cycle}.", subject.run))
            }
            FactKey::Checkpoint { cycle, step } => {
                let suite = task::SUITE.parse().expect("a legal name");
                at(FactKey::Eval { cycle: *cycle, step: *step, suite })
            }
            place => Request::Get(format!("{place:?}")),
        }
    }

    fn checked(&mut self, nature: &Nature, found: Option<&wire::Record>) -> Step {
        let done = found.is_some_and(|record| match &record.fact.body {
            FactBody::Checkpoint(checkpoint) => checkpoint.r#final,
            _ => true,
        });
        if done {
            return self.settling(Settle::Ack, true);
        }
        let (kind, cycle, name) = self.name();
        if nature.poison && (kind, cycle, &*name) == (WorkKind::Generate, 1, "t00001") {
            return Step::Die;
        }
        self.fetch()
    }

    fn fetch(&mut self) -> Step {
        self.stage = Stage::Fetching;
        Step::Ask(Request::Store)
    }

    fn held_up(&mut self) -> Step {
        let pause = CircuitBreaker::dependency_backoff(self.look);
        self.look += 1;
        let Some(pause) = pause else { return self.look_for_failures(JobFault::WorkFailed) };
        self.stage = Stage::HeldUp;
        Step::Work(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX))
    }

    /// Samples it is to make.
    pub(crate) fn samples(&self) -> u32 {
        match &self.delivery.record.fact.body {
            FactBody::GenerateOrder(order) => order.requests.iter().map(|r| r.count).sum(),
            _ => 0,
        }
    }

    fn milliseconds(&self, nature: &Nature, random: &mut fastrand::Rng) -> u64 {
        let samples = match &self.delivery.record.fact.body {
            FactBody::GenerateOrder(_) => f64::from(self.samples()),
            _ => 4.0,
        };
        let seconds = samples / nature.samples_per_s * (0.5 + random.f64());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "minutes")]
        let milliseconds = (1000.0 * seconds) as u64;
        50 + milliseconds
    }

    fn results(&self, nature: &Nature, random: &mut fastrand::Rng) -> VecDeque<Fact> {
        let record = &self.delivery.record;
        let subject = &record.fact.subject;
        let agent = nature.name.as_str();
        let fact = |place, body| task::fact(subject, place, body);
        match (&subject.key, &record.fact.body) {
            (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) => {
                let lies = nature.lies && random.bool();
                let wall_s = 0.25 * f64::from(task::PROMPTS);
                let place = FactKey::Samples { cycle: *cycle, job: job.clone() };
                let stale = nature.stale && random.u32(0..4) > 0;
                let samples = task::samples(order, agent, wall_s, lies, stale);
                let samples = match nature.bug {
                    Some(Bug::WrongPolicy) if random.bool() => task::made_otherwise(samples),
                    _ => samples,
                };
                [fact(place, samples)].into()
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let place = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
                [fact(place, task::verdicts(samples, record.sequence, agent))].into()
            }
            (FactKey::TrainOrder { cycle, .. }, FactBody::TrainOrder(order)) => (1..=task::STEPS)
                .filter(|step| step % task::SAVE_EVERY == 0)
                .map(|step| {
                    let place = FactKey::Checkpoint { cycle: *cycle, step };
                    fact(place, task::checkpoint(order, step, agent))
                })
                .collect(),
            (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => {
                let suite = task::SUITE.parse().expect("a legal name");
                let place = FactKey::Eval { cycle: *cycle, step: *step, suite };
                [fact(place, task::eval(checkpoint, agent))].into()
            }
            _ => VecDeque::new(),
        }
    }

    /// Files first, then the fact that names them.
    fn write(&mut self, results: VecDeque<Fact>) -> Step {
        if results.is_empty() {
            return self.settling(Settle::Ack, true);
        }
        self.stage = Stage::Storing(results);
        Step::Ask(Request::Store)
    }

    fn look_for_failures(&mut self, fault: JobFault) -> Step {
        let subject = &self.delivery.record.fact.subject;
        let kind = self.delivery.kind;
        let suites = [v1::Suite { name: task::SUITE.into(), ..Default::default() }];
        let owed = agent_core::expected_results(&subject.key, &suites);
        let Some((id, _)) = owed.first() else { return self.settling(Settle::Ack, false) };
        self.stage = Stage::Looking(fault);
        Step::Ask(Request::LastBelow(format!("flotilla.{}.failure.{kind}.{id}.", subject.run)))
    }

    fn failed_before(
        &mut self,
        nature: &Nature,
        fault: JobFault,
        last: Option<v1::Failure>,
    ) -> Step {
        let subject = &self.delivery.record.fact.subject;
        let kind = self.delivery.kind;
        let suites = [v1::Suite { name: task::SUITE.into(), ..Default::default() }];
        let owed = agent_core::expected_results(&subject.key, &suites);
        let (run, agent) = (&subject.run, nature.name.as_str());
        let blow = FailedAttempt { run, kind, agent, fault, message: "failed", log_tail: "" };
        let given_up = last.as_ref().is_some_and(|last| last.r#final);
        let next = owed.first().filter(|_| !given_up);
        let next = next.and_then(|(id, _)| agent_core::build_failure(&blow, id, last.as_ref()));
        let Some(failure) = next else { return self.told(fault, last.as_slice()) };
        let place = FactKey::Failure { kind, id: failure.id.clone(), attempt: failure.attempt };
        let fact = task::fact(subject, place, FactBody::Failure(failure.clone()));
        self.stage = Stage::Failing(fault, Box::new(failure));
        Step::Ask(Request::Publish(Box::new(fact)))
    }

    fn told(&mut self, fault: JobFault, failures: &[v1::Failure]) -> Step {
        let (how, delay_ms) = match agent_core::decide_retry(failures) {
            RetryDecision::GiveUp => (Settle::Ack, 0),
            RetryDecision::RetryAfter { delay_ms } => (Settle::Nak { delay_ms }, delay_ms),
        };
        self.stage = Stage::Settling { how, well: false };
        Step::Failed { fault, delay_ms }
    }
}
