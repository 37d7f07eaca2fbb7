//! `flotilla.v1.Evals`.

use tonic::{Request, Response, Status};
use wire::v1;

use crate::{
    arguments,
    call::{Calls, Items, called, deadline},
    rpc::evals_server,
};

pub(crate) struct Evals(pub(crate) Calls);

#[tonic::async_trait]
impl evals_server::Evals for Evals {
    async fn history(
        &self,
        request: Request<v1::EvalFilter>,
    ) -> Result<Response<v1::EvalHistory>, Status> {
        let filter = request.into_inner();
        let call = called("Evals.History", &filter.run);
        let history = async {
            let (run, suite) = arguments::filter(Some(filter))?;
            if let Some(run) = &run {
                self.0.known(run).await?;
            }
            Ok(v1::EvalHistory { evals: self.0.control.evals(run.as_ref(), &suite).await? })
        };
        self.0.unary(call, history).await
    }

    type WatchStream = Items<v1::EvalEvent>;

    async fn watch(
        &self,
        request: Request<v1::WatchEvalsRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let deadline = deadline(&request);
        let v1::WatchEvalsRequest { filter, after } = request.into_inner();
        let call = called("Evals.Watch", filter.as_ref().map_or("", |filter| &filter.run));
        let open = async {
            let (run, suite) = arguments::filter(filter)?;
            if let Some(run) = &run {
                self.0.known(run).await?;
            }
            Ok(self.0.control.watch_evals(run.as_ref(), suite, after))
        };
        self.0.stream(call, deadline, open).await
    }
}
