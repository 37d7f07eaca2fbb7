//! The log of facts and the fleet's presence, over NATS JetStream, and the
//! managed nats-server child. Decides how facts travel and that each is accepted
//! once; does not know what they mean or who reacts to them.
//!
//! Architecture Invariant: nothing outside this crate names async-nats.

mod backoff;
mod batch;
mod connect;
mod connection;
mod delivery;
mod follow;
mod http;
mod kv;
mod leadership;
mod members;
mod prepare;
mod presence;
mod publish;
mod publish_all;
mod pull;
mod purge;
mod read;
mod reading;
mod request;
pub mod server;
mod snapshot;
pub mod system;
mod tail;
mod version;
mod work;
mod yardstick;

pub use connect::{Bus, ConnectError, ConnectOptions, Producer};
pub use delivery::{AckError, Delivery};
pub use follow::Followed;
pub use leadership::Leadership;
#[doc(hidden)]
pub use leadership::fuzzing;
pub use members::{MembersError, MembersEvent, Slot, Written};
pub use prepare::{Durability, LogLimit, PrepareError, Prepared};
pub use presence::PresenceError;
pub use publish::{PublishError, Published};
pub use purge::PurgeError;
pub use read::{Lost, ReadError, Usage};
pub use request::RequestError;
pub use snapshot::{Snapshot, SnapshotError};
pub use work::{WorkError, WorkQueue};

/// The stream that is the log.
pub const STREAM: &str = "FLOTILLA";

/// The key-value bucket of the fleet: who leads, what agents last said, how to join.
pub const BUCKET: &str = "FLOTILLA_FLEET";

/// The key-value bucket of a closed fleet's members and join tokens.
pub const MEMBERS_BUCKET: &str = "FLOTILLA_MEMBERS";
