//! The gRPC service `flotilla.v1.Evals`.

use tonic::{Request, Response, Status};
use wire::v1;

use crate::{
    arguments,
    call::{CallContext, ItemStream, StreamCaller, create_call_span},
    rpc::evals_server,
};

pub(crate) struct EvalsService(pub(crate) CallContext);

#[tonic::async_trait]
impl evals_server::Evals for EvalsService {
    async fn history(
        &self,
        request: Request<v1::EvalFilter>,
    ) -> Result<Response<v1::EvalHistory>, Status> {
        let filter = request.into_inner();
        let call = create_call_span("Evals.History", &filter.run);
        let history = async {
            let (run, suite) = arguments::parse_filter(Some(filter))?;
            if let Some(run) = &run {
                self.0.control.require_suite(run, &suite).await?;
            }
            Ok(v1::EvalHistory { evals: self.0.control.list_evals(run.as_ref(), &suite).await? })
        };
        self.0.answer_unary(call, history).await
    }

    type WatchStream = ItemStream<v1::EvalEvent>;

    async fn watch(
        &self,
        request: Request<v1::WatchEvalsRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = StreamCaller::from_request(&request);
        let v1::WatchEvalsRequest { filter, after } = request.into_inner();
        let call =
            create_call_span("Evals.Watch", filter.as_ref().map_or("", |filter| &filter.run));
        let open = async {
            let (run, suite) = arguments::parse_filter(filter)?;
            if let Some(run) = &run {
                self.0.control.require_suite(run, &suite).await?;
            }
            Ok(self.0.control.watch_evals(run.as_ref(), suite, after))
        };
        self.0.open_stream(call, caller, open).await
    }
}
