//! The gRPC service `flotilla.v1.Checkpoints`.

use bytes::Bytes;
use control::{CategoryComparison, ComparedCheckpoint, DEFAULT_ALPHA, ModelComparison};
use futures::{Stream, StreamExt, stream};
use store::GetError;
use tonic::{Request, Response, Status};
use wire::{RunId, v1};

use crate::{
    arguments,
    call::{CallContext, ItemStream, StreamCaller, create_call_span},
    rpc::checkpoints_server,
};

/// Large enough for throughput, small enough for clients and memory.
const CHUNK_BYTES_MAX: usize = 256 << 10;

pub(crate) struct CheckpointsService(pub(crate) CallContext);

#[tonic::async_trait]
impl checkpoints_server::Checkpoints for CheckpointsService {
    async fn list(
        &self,
        request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let v1::ListCheckpointsRequest { run } = request.into_inner();
        let list = async {
            let run = RunId::new(run.as_str())?;
            let checkpoints = self.0.control.list_stored_checkpoints(&run).await?;
            Ok(v1::ListCheckpointsResponse { checkpoints })
        };
        self.0.answer_unary(create_call_span("Checkpoints.List", &run), list).await
    }

    async fn get(
        &self,
        request: Request<v1::CheckpointRef>,
    ) -> Result<Response<v1::CheckpointInfo>, Status> {
        let reference = request.into_inner();
        let call = create_call_span("Checkpoints.Get", &reference.run);
        let get = async {
            let reference = arguments::check_checkpoint_ref(Some(reference))?;
            Ok(self.0.control.get_checkpoint(&reference).await?)
        };
        self.0.answer_unary(call, get).await
    }

    type DownloadStream = ItemStream<v1::DownloadChunk>;

    async fn download(
        &self,
        request: Request<v1::DownloadRequest>,
    ) -> Result<Response<Self::DownloadStream>, Status> {
        let caller = StreamCaller::from_request(&request);
        let v1::DownloadRequest { checkpoint, path } = request.into_inner();
        let call =
            create_call_span("Checkpoints.Download", checkpoint.as_ref().map_or("", |c| &c.run));
        let open = async {
            let reference = arguments::check_checkpoint_ref(checkpoint)?;
            let path = arguments::parse_path(path)?;
            Ok(split_chunks(self.0.control.read_checkpoint_file(&reference, path.as_str()).await?))
        };
        self.0.open_stream(call, caller, open).await
    }

    async fn compare(
        &self,
        request: Request<v1::CompareRequest>,
    ) -> Result<Response<v1::Comparison>, Status> {
        let v1::CompareRequest { a, b, suite, alpha } = request.into_inner();
        let call = create_call_span("Checkpoints.Compare", a.as_ref().map_or("", |a| &a.run));
        let compare = async {
            let a = arguments::check_checkpoint_ref(a)?;
            let b = arguments::check_checkpoint_ref(b)?;
            let alpha = if alpha == 0.0 { DEFAULT_ALPHA } else { alpha };
            let _reading = self.0.acquire_cycle_read().await;
            let comparison = self.0.control.compare_checkpoints(&a, &b, &suite, alpha).await?;
            Ok(comparison_to_proto(comparison))
        };
        self.0.answer_unary(call, compare).await
    }
}

fn comparison_to_proto(comparison: ModelComparison) -> v1::Comparison {
    // Only a user's own command has a judge.
    let ModelComparison { test, pairs, alpha, unpaired, a, b, categories, judge: _ } = comparison;
    let side = |it: ComparedCheckpoint| v1::comparison::Side {
        run: it.run.to_string(),
        cycle: Some(it.cycle),
        pass_rate: it.pass_rate,
        mean_tokens: it.mean_tokens,
        perplexities: it.perplexities.into_iter().collect(),
    };
    let category = |it: CategoryComparison| v1::comparison::Category {
        category: it.category,
        pairs: it.pairs,
        mean_a: Some(it.mean_a),
        mean_b: Some(it.mean_b),
    };
    v1::Comparison {
        decision: test.decision.as_str().into(),
        at: u32::try_from(test.at).unwrap_or(u32::MAX),
        p: Some(test.p),
        difference: Some(test.difference),
        interval: test.interval.to_vec(),
        mean_a: Some(test.mean_a),
        mean_b: Some(test.mean_b),
        pairs,
        alpha,
        unpaired,
        a: Some(side(a)),
        b: Some(side(b)),
        categories: categories.into_iter().map(category).collect(),
    }
}

fn split_chunks(
    pieces: impl Stream<Item = Result<Bytes, GetError>>,
) -> impl Stream<Item = Result<v1::DownloadChunk, GetError>> {
    pieces.flat_map(|piece| {
        let (mut bytes, error) = match piece {
            Ok(bytes) => (bytes, None),
            Err(error) => (Bytes::new(), Some(error)),
        };
        let chunks = std::iter::from_fn(move || {
            let chunk = bytes.split_to(bytes.len().min(CHUNK_BYTES_MAX));
            (!chunk.is_empty()).then(|| Ok(v1::DownloadChunk { data: chunk.to_vec() }))
        });
        stream::iter(chunks.chain(error.map(Err)))
    })
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    #[tokio::test]
    async fn large_pieces_are_split_in_order_and_none_is_empty() {
        let bytes: Vec<u8> = (0..CHUNK_BYTES_MAX * 2 + 7).map(|n| (n % 251) as u8).collect();
        let pieces = [Bytes::new(), bytes.clone().into(), Bytes::from_static(b"end")];
        let chunks: Vec<v1::DownloadChunk> =
            split_chunks(stream::iter(pieces.map(Ok))).try_collect().await.unwrap();
        let lengths: Vec<usize> = chunks.iter().map(|chunk| chunk.data.len()).collect();
        assert_eq!(lengths, [CHUNK_BYTES_MAX, CHUNK_BYTES_MAX, 7, 3]);
        let joined: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.data).collect();
        assert_eq!(joined, [&bytes[..], b"end"].concat());
    }
}
