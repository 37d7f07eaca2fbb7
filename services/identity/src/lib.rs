//! Identity and permissions in a closed fleet: its keys, its certificates, and the tokens of its
//! members.
//!
//! Decides permissions and issues the tokens that prove them; contacts no server.
//!
//! A *member* is an agent, a user or a coordinator. It has its own key, which never leaves its
//! host. For that key it receives a NATS user JWT for the bus and a bearer token for the gateway,
//! both signed by the fleet's signing key. On the bus it has its own account, which imports exactly
//! the subjects it may publish and receive; the coordinator and admins use the fleet's account.
//!
//! Architecture Invariant: this crate reads no clock and opens no connection.

mod bearer;
mod certificate_verifier;
mod certificates;
mod claims;
mod credentials;
mod error;
mod files;
pub mod join_token;
mod keys;
mod member;
mod peer_tls;
mod permissions;
mod proof;
mod tls;

pub use bearer::{BearerError, BearerInfo, GatewayCaller};
pub use certificate_verifier::{CertificateCheck, CertificateVerifier};
pub use certificates::{CertificateError, SERVER_NAME};
pub use claims::{ClaimsError, UserJwtInfo};
pub use credentials::{CredentialFiles, MemberIdentity};
pub use error::AuthorityError;
pub use files::KeyFileError;
pub use join_token::{Fingerprint, JoinToken, JoinTokenError, RandomnessError};
pub use keys::{CreateOutcome, FleetAuthority, MemberAccess, MemberTokens};
pub use member::{Member, MemberKind, MemberRole, UnknownRoleError, UnknownScopeError, UserScope};
pub use peer_tls::{PeerIdentity, PeerTlsError};
pub use permissions::SubjectPermissions;
pub use proof::{CLOCK_SKEW_MAX_MS, ProofError, ProofPurpose, ProofStatement, check_user_key};
pub use tls::{FleetTlsError, fleet_client_config};
