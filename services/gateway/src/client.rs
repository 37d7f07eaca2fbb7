//! A client for the membership calls of a gateway, over TLS that trusts only the fleet's
//! certificate authority. Also fetches that authority for a box that knows only its hash from a
//! join token.

mod authority_pin;
mod membership_renewal;

use std::{str::FromStr, time::Duration};

use identity::SERVER_NAME;
use tokio::time::timeout;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use wire::v1;

use crate::{MESSAGE_BYTES_MAX, rpc::members_client::MembersClient};

pub use authority_pin::{PinError, fetch_authority};
pub use membership_renewal::MembershipRenewal;

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The limit of the connection and of the handshakes of TLS and HTTP/2.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Longer than the gateway's own limit.
const CALL_LIMIT: Duration = Duration::from_secs(40);

/// The addresses of a gateway and the credentials for it.
#[derive(Clone)]
pub struct GatewayTarget {
    /// `host:port`; the first that answers is used.
    pub addresses: Vec<String>,
    pub ca_pem: String,
    /// Absent for joins and renewals.
    pub bearer: Option<String>,
}

/// A failed call to a gateway.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("call the gateway: no address configured; pass one as host:port (G106)")]
    NoAddress,
    #[error("call the gateway: {0:?} is not an address; write it as host:port (G106)")]
    Address(String),
    #[error("the credentials' bearer is malformed; create the credentials again (K102)")]
    Bearer,
    #[error("call the gateway at {address}: {problem} (G106)")]
    Unreachable { address: String, problem: String },
    /// Contains the gateway's message without any addition.
    #[error("{}", .0.message())]
    Refused(RefusedCall),
}

/// The status code and message of a call that the gateway refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedCall {
    code: Code,
    message: String,
}

impl RefusedCall {
    /// Returns the gateway's message.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl ClientError {
    /// Returns true if the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused(refused) => matches!(
                refused.code,
                Code::Unavailable
                    | Code::ResourceExhausted
                    | Code::Aborted
                    | Code::DeadlineExceeded
            ),
            Self::NoAddress | Self::Address(_) | Self::Bearer => false,
        }
    }

    /// Returns true if the member or token of the call does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(RefusedCall { code: Code::NotFound, .. }))
    }

    /// Returns true if the caller was a member but is revoked or otherwise refused for good.
    pub fn is_revoked(&self) -> bool {
        matches!(self, Self::Refused(RefusedCall { code: Code::PermissionDenied, .. }))
    }
}

/// A connection to a gateway for membership calls.
pub struct MembershipClient {
    /// The `host:port` that answered.
    address: String,
    members: MembersClient<InterceptedService<Channel, BearerInterceptor>>,
}

impl MembershipClient {
    /// Connects to the first address that answers. Fails with the error of the last address.
    pub async fn connect_first(target: &GatewayTarget) -> Result<Self, ClientError> {
        let bearer = BearerInterceptor::new(target.bearer.as_deref())?;
        let mut failed = ClientError::NoAddress;
        for address in &target.addresses {
            match open_channel(address, &target.ca_pem).await {
                Ok(channel) => {
                    let members = MembersClient::with_interceptor(channel, bearer)
                        .max_decoding_message_size(MESSAGE_BYTES_MAX);
                    return Ok(Self { address: address.clone(), members });
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Returns the `host:port` of the connected gateway.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Creates a join token. The answer has its secret, which is not stored.
    pub async fn create_token(
        &mut self,
        request: v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, ClientError> {
        into_answer(self.members.create_token(request).await)
    }

    /// Lists the join tokens, without their secrets.
    pub async fn list_tokens(&mut self) -> Result<Vec<v1::JoinTokenInfo>, ClientError> {
        into_answer(self.members.list_tokens(v1::ListTokensRequest {}).await)
            .map(|list| list.tokens)
    }

    /// Revokes a join token by its id.
    pub async fn revoke_token(&mut self, id: &str) -> Result<(), ClientError> {
        let request = v1::RevokeTokenRequest { id: id.to_owned() };
        into_answer(self.members.revoke_token(request).await).map(|_| ())
    }

    /// Joins the fleet with a token and returns the membership.
    pub async fn join_fleet(
        &mut self,
        request: v1::JoinRequest,
    ) -> Result<v1::Membership, ClientError> {
        into_answer(self.members.join(request).await)
    }

    /// Renews a membership, proven by a signature.
    pub async fn renew_membership(
        &mut self,
        request: v1::RenewRequest,
    ) -> Result<v1::Membership, ClientError> {
        into_answer(self.members.renew(request).await)
    }

    /// Lists the agents and users of the fleet.
    pub async fn list_members(&mut self) -> Result<Vec<v1::MemberInfo>, ClientError> {
        into_answer(self.members.list_members(v1::ListMembersRequest {}).await)
            .map(|list| list.members)
    }

    /// Revokes an agent or a user.
    pub async fn revoke_member(&mut self, name: &str) -> Result<v1::RevokeResponse, ClientError> {
        into_answer(self.members.revoke(v1::RevokeRequest { name: name.to_owned() }).await)
    }

    /// Creates a one-time code for this gateway's page.
    pub async fn create_login_code(&mut self) -> Result<v1::LoginCode, ClientError> {
        into_answer(self.members.create_login_code(v1::CreateLoginCodeRequest {}).await)
    }

    /// Creates a user and returns the membership.
    pub async fn create_user(
        &mut self,
        request: v1::CreateUserRequest,
    ) -> Result<v1::Membership, ClientError> {
        into_answer(self.members.create_user(request).await)
    }
}

fn into_answer<T>(answered: Result<tonic::Response<T>, Status>) -> Result<T, ClientError> {
    answered.map(tonic::Response::into_inner).map_err(|status| {
        ClientError::Refused(RefusedCall {
            code: status.code(),
            message: status.message().to_owned(),
        })
    })
}

async fn open_channel(address: &str, ca_pem: &str) -> Result<Channel, ClientError> {
    let wrong = || ClientError::Address(address.to_owned());
    let failed = |problem| ClientError::Unreachable { address: address.to_owned(), problem };
    let unreachable = |error: tonic::transport::Error| failed(format_source_chain(&error));
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(ca_pem))
        // The address of a box may change; the fleet's server name does not.
        .domain_name(SERVER_NAME);
    let endpoint = Endpoint::from_str(&format!("https://{address}"))
        .map_err(|_| wrong())?
        .connect_timeout(CONNECT_LIMIT)
        .timeout(CALL_LIMIT)
        .tls_config(tls)
        .map_err(unreachable)?;
    // The endpoint limits TCP alone; a program that says nothing would hold a renewal forever.
    match timeout(OPEN_LIMIT, endpoint.connect()).await {
        Ok(connected) => connected.map_err(unreachable),
        Err(_) => Err(failed(format!("it accepts connections, but no TLS within {OPEN_LIMIT:?}"))),
    }
}

#[derive(Clone)]
struct BearerInterceptor(Option<MetadataValue<Ascii>>);

impl BearerInterceptor {
    fn new(bearer: Option<&str>) -> Result<Self, ClientError> {
        let value = bearer.map(|bearer| format!("Bearer {bearer}").parse());
        let mut value: Option<MetadataValue<Ascii>> =
            value.transpose().map_err(|_| ClientError::Bearer)?;
        if let Some(value) = &mut value {
            value.set_sensitive(true);
        }
        Ok(Self(value))
    }
}

impl Interceptor for BearerInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

/// Formats an error and its sources, separated by colons, without repeated texts.
fn format_source_chain(error: &dyn std::error::Error) -> String {
    let mut causes = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !causes.contains(&text) {
            causes.push(text);
        }
        next = error.source();
    }
    causes.join(": ")
}
