//! Calling a fleet's gateway: over TLS that knows the fleet by its authority, with a bearer.
//! And the one call before that: fetching the authority that a join token knows by its hash.

mod pin;

use std::{str::FromStr, time::Duration};

use authority::SERVER_NAME;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use wire::v1;

use crate::{MESSAGE_BYTES_MAX, rpc::members_client::MembersClient};

pub use pin::{PinError, fetch_authority};

/// Reaching one address.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longer than the gateway takes for any call of these.
const CALL_LIMIT: Duration = Duration::from_secs(40);

/// Where a gateway is, and what it is called with.
#[derive(Clone)]
pub struct Target {
    /// `host:port`; the first that answers is used.
    pub addresses: Vec<String>,
    pub ca_pem: String,
    pub bearer: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("call the gateway: no address is known; name one as host:port (G106)")]
    NoAddress,
    #[error("call the gateway: {0:?} is not an address; write it as host:port (G106)")]
    Address(String),
    #[error("the kit's bearer is not one; make the kit anew (K102)")]
    Bearer,
    #[error("call the gateway at {address}: {problem} (G106)")]
    Unreachable { address: String, problem: String },
    /// What it said; nothing needs to be added.
    #[error("{}", .0.message())]
    Refused(Refused),
}

/// An answer that is a no.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    code: Code,
    message: String,
}

impl Refused {
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl ClientError {
    /// The same call may succeed a little later.
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

    /// Whether the fleet has never heard of whom this is about.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Refused(Refused { code: Code::NotFound, .. }))
    }

    /// Whether the fleet knows the caller and says that he is a member no more.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Refused(Refused { code: Code::PermissionDenied, .. }))
    }
}

/// A connection to a gateway.
pub struct Client {
    members: MembersClient<InterceptedService<Channel, Bearer>>,
}

impl Client {
    /// Connects to the first address that answers.
    ///
    /// # Errors
    /// What was wrong with the last one.
    pub async fn connect(target: &Target) -> Result<Self, ClientError> {
        authority::choose_provider();
        let bearer = Bearer::new(target.bearer.as_deref())?;
        let mut failed = ClientError::NoAddress;
        for address in &target.addresses {
            match channel(address, &target.ca_pem).await {
                Ok(channel) => {
                    let members = MembersClient::with_interceptor(channel, bearer)
                        .max_decoding_message_size(MESSAGE_BYTES_MAX);
                    return Ok(Self { members });
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn create_token(
        &mut self,
        request: v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, ClientError> {
        answer(self.members.create_token(request).await)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn tokens(&mut self) -> Result<Vec<v1::JoinTokenInfo>, ClientError> {
        answer(self.members.list_tokens(v1::ListTokensRequest {}).await).map(|list| list.tokens)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn revoke_token(&mut self, id: &str) -> Result<(), ClientError> {
        let request = v1::RevokeTokenRequest { id: id.to_owned() };
        answer(self.members.revoke_token(request).await).map(|_| ())
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn join(&mut self, request: v1::JoinRequest) -> Result<v1::Membership, ClientError> {
        answer(self.members.join(request).await)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn renew(
        &mut self,
        request: v1::RenewRequest,
    ) -> Result<v1::Membership, ClientError> {
        answer(self.members.renew(request).await)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn members(&mut self) -> Result<Vec<v1::MemberInfo>, ClientError> {
        answer(self.members.list_members(v1::ListMembersRequest {}).await).map(|list| list.members)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn revoke(&mut self, name: &str) -> Result<v1::RevokeResponse, ClientError> {
        answer(self.members.revoke(v1::RevokeRequest { name: name.to_owned() }).await)
    }

    /// # Errors
    /// When it is refused, or the gateway cannot be reached.
    pub async fn create_user(
        &mut self,
        request: v1::CreateUserRequest,
    ) -> Result<v1::Membership, ClientError> {
        answer(self.members.create_user(request).await)
    }
}

fn answer<T>(answered: Result<tonic::Response<T>, Status>) -> Result<T, ClientError> {
    answered.map(tonic::Response::into_inner).map_err(|status| {
        ClientError::Refused(Refused { code: status.code(), message: status.message().to_owned() })
    })
}

async fn channel(address: &str, ca_pem: &str) -> Result<Channel, ClientError> {
    let wrong = || ClientError::Address(address.to_owned());
    let unreachable = |error: tonic::transport::Error| ClientError::Unreachable {
        address: address.to_owned(),
        problem: chain(&error),
    };
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(ca_pem))
        // Boxes change their addresses; their fleet's name stays.
        .domain_name(SERVER_NAME);
    Endpoint::from_str(&format!("https://{address}"))
        .map_err(|_| wrong())?
        .connect_timeout(CONNECT_LIMIT)
        .timeout(CALL_LIMIT)
        .tls_config(tls)
        .map_err(unreachable)?
        .connect()
        .await
        .map_err(unreachable)
}

/// Shows who calls.
#[derive(Clone)]
struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
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

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut said = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !said.contains(&text) {
            said.push(text);
        }
        next = error.source();
    }
    said.join(": ")
}
