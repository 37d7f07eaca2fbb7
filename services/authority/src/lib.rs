//! Who may do what in a closed fleet: its keys, its certificates, and the words that let a
//! member in. Decides permissions and mints what proves them; talks to no server.
//!
//! A *member* is an agent, a user or a coordinator. It has a key of its own that never leaves
//! its box; what it is given is a NATS user JWT for the bus, and a bearer for the gateway, both
//! signed by the fleet's signing key. On the bus it has an account of its own, which imports what
//! it may say and hear; the coordinator and admins are in the fleet's.
//!
//! Architecture Invariant: nothing here reads a clock or opens a connection.

mod bearer;
mod certificates;
mod claims;
mod files;
pub mod join_token;
mod keys;
mod kit;
mod member;
mod peer;
mod permissions;
mod proof;
mod tls;

pub use bearer::{BearerError, Caller, Shown};
pub use certificates::{CertificateError, SERVER_NAME};
pub use claims::{ClaimsError, Held};
pub use files::FileError;
pub use join_token::{Fingerprint, JoinToken, JoinTokenError, NoRandomness};
pub use keys::{Access, Admission, Authority, AuthorityError, Created};
pub use kit::{Identity, KitFiles};
pub use member::{Member, Role, Scope, Standing, UnknownRole, UnknownScope};
pub use peer::{PeerError, PeerIdentity};
pub use permissions::Permissions;
pub use proof::{ProofError, Purpose, SKEW_MS, Statement, check_user_key};
pub use tls::{TlsError, choose_provider, client_config};
