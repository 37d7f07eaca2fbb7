//! `flotilla.v1.Checkpoints`.

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use store::GetError;
use tonic::{Request, Response, Status};
use wire::{RunId, v1};

use crate::{
    arguments,
    call::{Calls, Items, called, deadline},
    rpc::checkpoints_server,
};

/// Large enough to be quick, small enough for every client and for memory.
const CHUNK_BYTES_MAX: usize = 256 << 10;

pub(crate) struct Checkpoints(pub(crate) Calls);

#[tonic::async_trait]
impl checkpoints_server::Checkpoints for Checkpoints {
    async fn list(
        &self,
        request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let v1::ListCheckpointsRequest { run } = request.into_inner();
        let list = async {
            let run = RunId::new(run.as_str())?;
            self.0.known(&run).await?;
            let checkpoints = self.0.control.checkpoints(&run).await?;
            Ok(v1::ListCheckpointsResponse { checkpoints })
        };
        self.0.unary(called("Checkpoints.List", &run), list).await
    }

    async fn get(
        &self,
        request: Request<v1::CheckpointRef>,
    ) -> Result<Response<v1::CheckpointInfo>, Status> {
        let reference = request.into_inner();
        let call = called("Checkpoints.Get", &reference.run);
        let get = async {
            let reference = arguments::checkpoint(Some(reference))?;
            Ok(self.0.control.checkpoint(&reference).await?)
        };
        self.0.unary(call, get).await
    }

    type DownloadStream = Items<v1::DownloadChunk>;

    async fn download(
        &self,
        request: Request<v1::DownloadRequest>,
    ) -> Result<Response<Self::DownloadStream>, Status> {
        let deadline = deadline(&request);
        let v1::DownloadRequest { checkpoint, path } = request.into_inner();
        let call = called("Checkpoints.Download", checkpoint.as_ref().map_or("", |c| &c.run));
        let open = async {
            let reference = arguments::checkpoint(checkpoint)?;
            let path = arguments::path(path)?;
            Ok(split(self.0.control.download(&reference, path.as_str()).await?))
        };
        self.0.stream(call, deadline, open).await
    }
}

fn split(
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
            split(stream::iter(pieces.map(Ok))).try_collect().await.unwrap();
        let lengths: Vec<usize> = chunks.iter().map(|chunk| chunk.data.len()).collect();
        assert_eq!(lengths, [CHUNK_BYTES_MAX, CHUNK_BYTES_MAX, 7, 3]);
        let joined: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.data).collect();
        assert_eq!(joined, [&bytes[..], b"end"].concat());
    }
}
