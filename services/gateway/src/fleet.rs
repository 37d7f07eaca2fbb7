//! The gRPC service `flotilla.v1.Fleet`.

use identity::GatewayCaller;
use tonic::{Request, Response, Status};
use wire::{AgentId, v1};

use crate::{
    call::{CallContext, CallSpan, ItemStream, StreamCaller, create_call_span, truncate_name},
    rpc::fleet_server,
};

pub(crate) struct FleetService(pub(crate) CallContext);

#[tonic::async_trait]
impl fleet_server::Fleet for FleetService {
    async fn agents(
        &self,
        _: Request<v1::AgentsRequest>,
    ) -> Result<Response<v1::AgentsResponse>, Status> {
        let agents =
            async { Ok(v1::AgentsResponse { agents: self.0.control.list_agents().await? }) };
        self.0.answer_unary(create_call_span("Fleet.Agents", ""), agents).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        let v1::DrainRequest { agent } = request.into_inner();
        let method = "Fleet.Drain";
        let span = tracing::info_span!("call", method, agent = ?truncate_name(&agent));
        let call = CallSpan { method, span };
        let drain = async {
            self.0.control.drain_agent(&AgentId::new(agent.as_str())?).await?;
            Ok(v1::DrainResponse {})
        };
        self.0.answer_unary(call, drain).await
    }

    type WatchStream = ItemStream<v1::FleetChange>;

    async fn watch(
        &self,
        request: Request<v1::WatchFleetRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = StreamCaller::from_request(&request);
        let open = async { Ok(self.0.fleet_view().watch_changes()) };
        self.0.open_stream(create_call_span("Fleet.Watch", ""), caller, open).await
    }

    async fn hello(
        &self,
        request: Request<v1::HelloRequest>,
    ) -> Result<Response<v1::HelloResponse>, Status> {
        // The access layer adds the caller; an open fleet has none.
        let caller = request.extensions().get::<GatewayCaller>();
        let scope = caller.and_then(|caller| caller.scope);
        Ok(Response::new(v1::HelloResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            open: caller.is_none(),
            name: caller.map_or(String::new(), |caller| caller.name.to_string()),
            scope: scope.map_or(String::new(), |scope| scope.to_string()),
        }))
    }
}
