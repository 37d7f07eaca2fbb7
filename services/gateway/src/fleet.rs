//! `flotilla.v1.Fleet`.

use tonic::{Request, Response, Status};
use wire::{AgentId, v1};

use crate::{
    call::{Calls, shortened, span},
    rpc::fleet_server,
};

pub(crate) struct Fleet(pub(crate) Calls);

#[tonic::async_trait]
impl fleet_server::Fleet for Fleet {
    async fn agents(
        &self,
        _: Request<v1::AgentsRequest>,
    ) -> Result<Response<v1::AgentsResponse>, Status> {
        let agents = async { Ok(v1::AgentsResponse { agents: self.0.control.agents().await? }) };
        self.0.unary(span("Fleet.Agents", ""), agents).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        let v1::DrainRequest { agent } = request.into_inner();
        let span = tracing::info_span!("call", method = "Fleet.Drain", agent = ?shortened(&agent));
        let drain = async {
            self.0.control.drain(&AgentId::new(agent.as_str())?).await?;
            Ok(v1::DrainResponse {})
        };
        self.0.unary(span, drain).await
    }
}
