//! `flotilla.v1.Fleet`.

use authority::Caller;
use tonic::{Request, Response, Status};
use wire::{AgentId, v1};

use crate::{
    call::{Call, Calls, Items, called, deadline, shortened},
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
        self.0.unary(called("Fleet.Agents", ""), agents).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        let v1::DrainRequest { agent } = request.into_inner();
        let method = "Fleet.Drain";
        let span = tracing::info_span!("call", method, agent = ?shortened(&agent));
        let call = Call { method, span };
        let drain = async {
            self.0.control.drain(&AgentId::new(agent.as_str())?).await?;
            Ok(v1::DrainResponse {})
        };
        self.0.unary(call, drain).await
    }

    type WatchStream = Items<v1::FleetChange>;

    async fn watch(
        &self,
        request: Request<v1::WatchFleetRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let deadline = deadline(&request);
        let open = async { Ok(self.0.fleet().changes()) };
        self.0.stream(called("Fleet.Watch", ""), deadline, open).await
    }

    async fn hello(
        &self,
        request: Request<v1::HelloRequest>,
    ) -> Result<Response<v1::HelloResponse>, Status> {
        // Put there by what lets callers in, where somebody does.
        let caller = request.extensions().get::<Caller>();
        let scope = caller.and_then(|caller| caller.scope);
        Ok(Response::new(v1::HelloResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            open: caller.is_none(),
            name: caller.map_or(String::new(), |caller| caller.name.to_string()),
            scope: scope.map_or(String::new(), |scope| scope.to_string()),
        }))
    }
}
