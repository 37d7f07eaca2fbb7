//! `flotilla.v1.Members`.

use authority::Caller;
use control::{Members as Membership, MembersError, Refusal};
use tonic::{Code, Request, Response, Status};
use wire::{AgentId, v1};

use crate::{
    call::{Call, Calls, called, shortened},
    rpc::members_server,
    status::{Coded, Refusal as Refused},
};

pub(crate) struct Members(pub(crate) Calls, pub(crate) Option<Membership>);

type Answer<T> = Result<Response<T>, Status>;

/// Everybody may do everything in an open fleet, so there is nobody to let in.
#[derive(Debug, thiserror::Error)]
#[error(
    "this fleet is open: it has no members and needs no tokens; `flotilla agent --nats …` just joins it, and `flotilla init` makes a closed fleet (K105)"
)]
struct Open;

impl Coded for Open {
    fn code(&self) -> Code {
        Code::FailedPrecondition
    }
}

impl Members {
    fn membership(&self) -> Result<&Membership, Refused> {
        Ok(self.1.as_ref().ok_or(Open)?)
    }
}

fn named(method: &'static str, name: &str) -> Call {
    Call { method, span: tracing::info_span!("call", method, name = ?shortened(name)) }
}

/// Who asks, for the log; the access layer has put it there.
fn by<T>(request: &Request<T>) -> String {
    request.extensions().get::<Caller>().map_or_else(String::new, |caller| caller.name.to_string())
}

#[tonic::async_trait]
impl members_server::Members for Members {
    async fn create_token(
        &self,
        request: Request<v1::CreateTokenRequest>,
    ) -> Answer<v1::CreateTokenResponse> {
        let by = by(&request);
        let create = async { Ok(self.membership()?.create_token(&by, request.get_ref()).await?) };
        self.0.unary(called("Members.CreateToken", ""), create).await
    }

    async fn list_tokens(
        &self,
        _: Request<v1::ListTokensRequest>,
    ) -> Answer<v1::ListTokensResponse> {
        let list =
            async { Ok(v1::ListTokensResponse { tokens: self.membership()?.tokens().await? }) };
        self.0.unary(called("Members.ListTokens", ""), list).await
    }

    async fn revoke_token(
        &self,
        request: Request<v1::RevokeTokenRequest>,
    ) -> Answer<v1::RevokeTokenResponse> {
        let by = by(&request);
        let revoke = async {
            self.membership()?.revoke_token(&by, &request.get_ref().id).await?;
            Ok(v1::RevokeTokenResponse {})
        };
        self.0.unary(called("Members.RevokeToken", ""), revoke).await
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Answer<v1::Membership> {
        let request = request.into_inner();
        let call = named("Members.Join", &request.name);
        self.0.unary(call, async { Ok(self.membership()?.join(&request).await?) }).await
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> Answer<v1::Membership> {
        let request = request.into_inner();
        let call = named("Members.Renew", &request.name);
        self.0.unary(call, async { Ok(self.membership()?.renew(&request).await?) }).await
    }

    async fn list_members(
        &self,
        _: Request<v1::ListMembersRequest>,
    ) -> Answer<v1::ListMembersResponse> {
        let list =
            async { Ok(v1::ListMembersResponse { members: self.membership()?.list().await? }) };
        self.0.unary(called("Members.ListMembers", ""), list).await
    }

    async fn revoke(&self, request: Request<v1::RevokeRequest>) -> Answer<v1::RevokeResponse> {
        let by = by(&request);
        let call = named("Members.Revoke", &request.get_ref().name);
        let revoke = async {
            let name = AgentId::new(request.get_ref().name.as_str())?;
            let revoked_at = Some(self.membership()?.revoke(&by, &name).await?);
            Ok(v1::RevokeResponse { revoked_at })
        };
        self.0.unary(call, revoke).await
    }

    async fn create_user(&self, request: Request<v1::CreateUserRequest>) -> Answer<v1::Membership> {
        let by = by(&request);
        let call = named("Members.CreateUser", &request.get_ref().name);
        let create = async { Ok(self.membership()?.create_user(&by, request.get_ref()).await?) };
        self.0.unary(call, create).await
    }
}

impl Coded for MembersError {
    fn code(&self) -> Code {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::Busy(_) => Code::Aborted,
            Self::Presence(error) => error.code(),
            Self::Damaged { .. } => Code::DataLoss,
            Self::Bucket(_) | Self::NotTold { .. } | Self::NotAdmitted { .. } => Code::Unavailable,
            Self::Keys(_) | Self::Certificate(_) | Self::Tls(_) | Self::Random(_) => Code::Internal,
        }
    }
}

impl Coded for Refusal {
    fn code(&self) -> Code {
        match self {
            Self::NoToken | Self::Proof(_) | Self::Repeated => Code::Unauthenticated,
            Self::UnknownToken { .. } | Self::NoMember { .. } => Code::NotFound,
            Self::TokenRevoked { .. }
            | Self::TokenExpired { .. }
            | Self::TokenUsedUp { .. }
            | Self::NotOffered { .. }
            | Self::Revoked { .. }
            | Self::NotRenewed { .. } => Code::PermissionDenied,
            Self::NameTaken { .. }
            | Self::KeyTaken { .. }
            | Self::Changed { .. }
            | Self::Reserved { .. } => Code::AlreadyExists,
            Self::Field { .. } | Self::Name(_) | Self::Role(_) | Self::Scope(_) => {
                Code::InvalidArgument
            }
        }
    }
}
