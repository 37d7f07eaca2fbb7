//! The processes of a simulation, and what they exchange with the world.

use std::rc::Rc;

use wire::{Fact, Record, RunId};

use crate::{
    agent::AgentStatus,
    server::{Delivery, Published, Queue, Settle},
    store::StoreOutcome,
};

/// A request of a peer to the server or the store.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Publish(Rc<Fact>),
    /// Publishes several facts as one batch, completely or not at all.
    PublishBatch(Rc<[Fact]>),
    Get(String),
    LastWithPrefix(String),
    After(u64),
    /// Reads the facts that say which channels there are and which runs move them.
    ReadChannels {
        after: u64,
    },
    /// Reads the facts of a run that are never purged.
    ReadRun(RunId),
    /// Reads the feedback on the channel.
    ReadFeedback,
    /// Reads the facts of a cycle that are archived, after one sequence up to another.
    ReadCycle {
        run: RunId,
        cycle: u32,
        after: u64,
        up_to: u64,
    },
    /// Removes one kind of bulky facts of a cycle, up to a sequence.
    Purge {
        run: RunId,
        cycle: u32,
        kind: usize,
        up_to: u64,
    },
    Pull(Queue),
    Settle(Queue, u64, Settle),
    /// Counts the leases of a queue, for an agent that could decline an order and holds this many.
    CountLeased {
        queue: Queue,
        order: String,
        own: usize,
    },
    /// Reads files, by their digests.
    Fetch(Vec<String>),
    /// Writes a file with this digest.
    Store(String),
    /// Writes the facts of a cycle as a file.
    StoreArchive(Rc<Vec<Rc<Record>>>),
    /// A timer of a job, which is never sent.
    Timer,
}

#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Published(Published),
    /// The sequence of the first fact of a batch; `None` if the server did not accept the batch.
    PublishedBatch(Option<u64>),
    /// The log is full.
    LogFull,
    Record(Option<Rc<Record>>),
    /// Records in log order, and the last sequence of the log.
    Records(Vec<Rc<Record>>, u64),
    /// Positions of feedback.
    Feedback(Vec<u64>),
    Purged,
    Settled,
    Leased(usize),
    Stored(StoreOutcome),
}

/// An event for a peer.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    Start,
    Reply(u64, Reply),
    Deliver(Delivery),
    /// The log has grown.
    Notify,
    /// The broadcast status of an agent.
    Status(Rc<AgentStatus>),
    Timer(u64),
    /// The phase with faults is over.
    Healed,
}

/// An action of a peer.
#[derive(Debug)]
pub(crate) enum Command {
    Send(u64, Request),
    SetTimer(u64, u64),
    Broadcast(AgentStatus),
    /// A coordinator decides on an order, with its position in the log.
    OrderDecision(Rc<Fact>, u64),
    /// An agent starts a job, with its position in the log.
    JobStart(Rc<Record>, u64),
    /// An agent starts a job that it already works on.
    DuplicateStart(Rc<Record>),
    Die,
}

/// A process that handles events and returns commands. Times are those of its own clock.
pub(crate) trait Peer {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command>;

    /// Forgets everything, like a killed process.
    fn reset(&mut self, incarnation: u64);
}
