//! The gRPC service `flotilla.v1.Members`.

use control::{MemberRegistry as Membership, MembershipError, MembershipRefusal};
use identity::GatewayCaller;
use tonic::{Code, Request, Response, Status};
use wire::{AgentId, v1};

use crate::{
    call::{CallContext, CallSpan, caller_name, create_call_span, truncate_name},
    error::CallRefusal as Refused,
    rpc::members_server,
    status::HasStatusCode,
};

/// An open fleet has no registry.
pub(crate) struct MembersService(pub(crate) CallContext, pub(crate) Option<Membership>);

type MembersResult<T> = Result<Response<T>, Status>;

#[derive(Debug, thiserror::Error)]
#[error(
    "this fleet is open: it has no members and needs no tokens; `flotilla agent --nats …` just joins it, and `flotilla init` makes a closed fleet (K105)"
)]
struct OpenFleetError;

impl HasStatusCode for OpenFleetError {
    fn status_code(&self) -> Code {
        Code::FailedPrecondition
    }
}

impl MembersService {
    fn require_registry(&self) -> Result<&Membership, Refused> {
        Ok(self.1.as_ref().ok_or(OpenFleetError)?)
    }
}

fn create_member_span(method: &'static str, name: &str) -> CallSpan {
    CallSpan { method, span: tracing::info_span!("call", method, name = ?truncate_name(name)) }
}

#[tonic::async_trait]
impl members_server::Members for MembersService {
    async fn create_token(
        &self,
        request: Request<v1::CreateTokenRequest>,
    ) -> MembersResult<v1::CreateTokenResponse> {
        let by = caller_name(&request);
        let create =
            async { Ok(self.require_registry()?.create_token(&by, request.get_ref()).await?) };
        self.0.answer_unary(create_call_span("Members.CreateToken", ""), create).await
    }

    async fn list_tokens(
        &self,
        _: Request<v1::ListTokensRequest>,
    ) -> MembersResult<v1::ListTokensResponse> {
        let list = async {
            Ok(v1::ListTokensResponse { tokens: self.require_registry()?.list_tokens().await? })
        };
        self.0.answer_unary(create_call_span("Members.ListTokens", ""), list).await
    }

    async fn revoke_token(
        &self,
        request: Request<v1::RevokeTokenRequest>,
    ) -> MembersResult<v1::RevokeTokenResponse> {
        let by = caller_name(&request);
        let revoke = async {
            self.require_registry()?.revoke_token(&by, &request.get_ref().id).await?;
            Ok(v1::RevokeTokenResponse {})
        };
        self.0.answer_unary(create_call_span("Members.RevokeToken", ""), revoke).await
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> MembersResult<v1::Membership> {
        let request = request.into_inner();
        let call = create_member_span("Members.Join", &request.name);
        self.0
            .answer_unary(call, async { Ok(self.require_registry()?.join_agent(&request).await?) })
            .await
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> MembersResult<v1::Membership> {
        let request = request.into_inner();
        let call = create_member_span("Members.Renew", &request.name);
        self.0
            .answer_unary(call, async {
                Ok(self.require_registry()?.renew_membership(&request).await?)
            })
            .await
    }

    async fn list_members(
        &self,
        _: Request<v1::ListMembersRequest>,
    ) -> MembersResult<v1::ListMembersResponse> {
        let list = async {
            Ok(v1::ListMembersResponse { members: self.require_registry()?.list_members().await? })
        };
        self.0.answer_unary(create_call_span("Members.ListMembers", ""), list).await
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeRequest>,
    ) -> MembersResult<v1::RevokeResponse> {
        let by = caller_name(&request);
        let call = create_member_span("Members.Revoke", &request.get_ref().name);
        let revoke = async {
            let name = AgentId::new(request.get_ref().name.as_str())?;
            let revoked_at = Some(self.require_registry()?.revoke_member(&by, &name).await?);
            Ok(v1::RevokeResponse { revoked_at })
        };
        self.0.answer_unary(call, revoke).await
    }

    async fn create_user(
        &self,
        request: Request<v1::CreateUserRequest>,
    ) -> MembersResult<v1::Membership> {
        let by = caller_name(&request);
        let call = create_member_span("Members.CreateUser", &request.get_ref().name);
        let create =
            async { Ok(self.require_registry()?.create_user(&by, request.get_ref()).await?) };
        self.0.answer_unary(call, create).await
    }

    async fn create_login_code(
        &self,
        request: Request<v1::CreateLoginCodeRequest>,
    ) -> MembersResult<v1::LoginCode> {
        // The access layer adds the caller; an open fleet has none, and no registry.
        let caller = request.extensions().get::<GatewayCaller>().cloned();
        let create = async {
            let registry = self.require_registry()?;
            Ok(registry.create_login_code(caller.ok_or(OpenFleetError)?)?)
        };
        self.0.answer_unary(create_call_span("Members.CreateLoginCode", ""), create).await
    }

    async fn exchange_login_code(
        &self,
        request: Request<v1::ExchangeLoginCodeRequest>,
    ) -> MembersResult<v1::LoginSession> {
        let exchange =
            async { Ok(self.require_registry()?.exchange_login_code(&request.get_ref().code)?) };
        self.0.answer_unary(create_call_span("Members.ExchangeLoginCode", ""), exchange).await
    }
}

impl HasStatusCode for MembershipError {
    fn status_code(&self) -> Code {
        match self {
            Self::Refused(refusal) => refusal.status_code(),
            Self::Busy(_) => Code::Aborted,
            Self::Presence(error) => error.status_code(),
            Self::Damaged { .. } => Code::DataLoss,
            Self::Bucket(_) | Self::NotRevokedEverywhere { .. } | Self::NotAdmitted { .. } => {
                Code::Unavailable
            }
            Self::Keys(_) | Self::Certificate(_) | Self::Tls(_) | Self::Random(_) => Code::Internal,
        }
    }
}

impl HasStatusCode for MembershipRefusal {
    fn status_code(&self) -> Code {
        match self {
            Self::NoToken | Self::Proof(_) | Self::ProofReused | Self::UnknownLoginCode => {
                Code::Unauthenticated
            }
            Self::TooManyLoginCodes => Code::ResourceExhausted,
            Self::UnknownToken { .. } | Self::NoMember { .. } => Code::NotFound,
            Self::TokenRevoked { .. }
            | Self::TokenExpired { .. }
            | Self::TokenUsedUp { .. }
            | Self::RoleNotOffered { .. }
            | Self::Revoked { .. }
            | Self::NotRenewed { .. } => Code::PermissionDenied,
            Self::NameTaken { .. }
            | Self::KeyTaken { .. }
            | Self::RightsChanged { .. }
            | Self::Reserved { .. } => Code::AlreadyExists,
            Self::Field { .. } | Self::Name(_) | Self::Role(_) | Self::Scope(_) => {
                Code::InvalidArgument
            }
        }
    }
}
