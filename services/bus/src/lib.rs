//! The log of facts and the presence of agents over NATS JetStream, and the managed nats-server
//! child process. Decides how facts travel and ensures that each is accepted once; does not know
//! what they mean.
//!
//! Architecture Invariant: no other crate names async-nats.

mod backoff;
mod baseline;
mod batch_get;
mod batch_publish;
mod connect;
mod connection_state;
mod consumer_pull;
mod delivery;
mod exchanges;
mod facts;
mod kv;
mod leadership;
mod members_bucket;
mod monitor_http;
mod ordered_reader;
mod point_read;
mod prepare;
mod presence;
mod publish;
mod purge;
mod request;
mod request_error;
pub mod server;
mod serving;
mod snapshot;
mod stream_tail;
pub mod system_account;
mod tail_message;
mod version;
mod work_queue;

pub use connect::{Bus, ConnectError, ConnectOptions, FactProducer};
pub use delivery::{AckError, Delivery};
pub use exchanges::{
    EXCHANGE_BYTES_MAX, ExchangeError, ExchangeMessage, ExchangePart, KEEP_DAYS_MAX, is_exchange_id,
};
pub use facts::LogEvent;
pub use leadership::LeadershipHandle;
#[doc(hidden)]
pub use leadership::fuzzing;
pub use members_bucket::{CasOutcome, MemberEntry, MembersError, MembersEvent};
pub use point_read::{LogUsage, LostEntries, ReadError};
pub use prepare::{AckDurability, LogLimit, PrepareError, PreparedLog};
pub use presence::PresenceError;
pub use publish::{PublishError, PublishOutcome};
pub use purge::PurgeError;
pub use request_error::RequestError;
pub use serving::{
    AnswerHead, AnswerPart, AnswerReceiver, AnswerSender, ServingClient, ServingClosed,
    ServingMessage, ServingRequest,
};
pub use snapshot::{SnapshotError, StreamSnapshot};
pub use work_queue::{WorkError, WorkQueue};

/// Name of the stream that stores the log.
pub const LOG_STREAM: &str = "FLOTILLA";

/// Key-value bucket of the fleet: the leader, the last status of each agent, and how to join.
pub const FLEET_BUCKET: &str = "FLOTILLA_FLEET";

/// Key-value bucket of a closed fleet's members and join tokens.
pub const MEMBERS_BUCKET: &str = "FLOTILLA_MEMBERS";

/// Name of the stream that stores kept requests to served models, and feedback.
pub const EXCHANGES_STREAM: &str = "FLOTILLA_EXCHANGES";
