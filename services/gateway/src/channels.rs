//! The gRPC service `flotilla.v1.Channels`.

use std::{collections::BTreeMap, sync::Arc};

use bus::ExchangeError;
use control::{SpecFiles, TransferCallback, parse_channel_name};
use futures::stream;
use tonic::{Request, Response, Status};
use wire::v1;

use crate::{
    arguments,
    call::{CallContext, ItemStream, StreamCaller, caller_name, create_call_span},
    rpc::channels_server,
};

pub(crate) struct ChannelsService(pub(crate) CallContext);

#[tonic::async_trait]
impl channels_server::Channels for ChannelsService {
    async fn list(
        &self,
        _: Request<v1::ListChannelsRequest>,
    ) -> Result<Response<v1::ListChannelsResponse>, Status> {
        let list = async {
            let channels = self.0.control.list_channels().await?;
            Ok(v1::ListChannelsResponse { channels })
        };
        self.0.answer_unary(create_call_span("Channels.List", ""), list).await
    }

    async fn history(
        &self,
        request: Request<v1::ChannelRequest>,
    ) -> Result<Response<v1::ChannelHistory>, Status> {
        let v1::ChannelRequest { channel } = request.into_inner();
        let history = async {
            let channel = parse_channel_name(&channel)?;
            Ok(self.0.control.describe_channel_history(&channel).await?)
        };
        self.0.answer_unary(create_call_span("Channels.History", &channel), history).await
    }

    async fn r#move(
        &self,
        request: Request<v1::MoveChannelRequest>,
    ) -> Result<Response<v1::Channel>, Status> {
        let user = caller_name(&request);
        let request = request.into_inner();
        let call = create_call_span("Channels.Move", &request.channel);
        let moved = async {
            arguments::check_reason(&request.reason)?;
            // A model on the caller's machine is not here.
            let files = SpecFiles::Attached(BTreeMap::new());
            let watch: TransferCallback = Arc::new(|_| ());
            Ok(self.0.control.move_channel(request, user, &files, &watch).await?)
        };
        self.0.answer_unary(call, moved).await
    }

    async fn learn(
        &self,
        request: Request<v1::LearnRequest>,
    ) -> Result<Response<v1::Channel>, Status> {
        let user = caller_name(&request);
        let v1::LearnRequest { channel, spec_yaml, files, at_least, stop } = request.into_inner();
        let call = create_call_span("Channels.Learn", &channel);
        let learned = async {
            let channel = parse_channel_name(&channel)?;
            if stop {
                return Ok(self.0.control.stop_learning(&channel, user).await?);
            }
            let files = files.into_iter().map(|(name, content)| (name, content.into()));
            let files = SpecFiles::Attached(files.collect());
            let control = &self.0.control;
            Ok(control.learn_channel(&channel, &spec_yaml, &files, at_least, user).await?)
        };
        self.0.answer_unary(call, learned).await
    }

    type KeptStream = ItemStream<v1::KeptExchange>;

    async fn kept(
        &self,
        request: Request<v1::KeptRequest>,
    ) -> Result<Response<Self::KeptStream>, Status> {
        let caller = StreamCaller::from_request(&request);
        let v1::KeptRequest { channel } = request.into_inner();
        let call = create_call_span("Channels.Kept", &channel);
        let open = async {
            let channel = parse_channel_name(&channel)?;
            self.0.control.list_channel_moves(&channel).await?;
            let kept = self.0.control.list_exchanges(&channel).await?;
            Ok(stream::iter(kept.into_iter().map(Ok::<_, ExchangeError>)))
        };
        self.0.open_stream(call, caller, open).await
    }

    async fn roll_back(
        &self,
        request: Request<v1::RollBackRequest>,
    ) -> Result<Response<v1::Channel>, Status> {
        let user = caller_name(&request);
        let v1::RollBackRequest { channel, reason, number } = request.into_inner();
        let call = create_call_span("Channels.RollBack", &channel);
        let rolled = async {
            let reason = arguments::check_reason(&reason)?;
            let channel = parse_channel_name(&channel)?;
            Ok(self.0.control.roll_back_channel(&channel, number, reason, user).await?)
        };
        self.0.answer_unary(call, rolled).await
    }
}
