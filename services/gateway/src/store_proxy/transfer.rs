//! Transfers of file data: limits their number and memory, and ends those that make no progress.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use store::{ObjectStream, ReceiveError};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::error::StoreProxyError;

/// With the pieces that each transfer holds, some 100 MiB.
const TRANSFERS_MAX: usize = 64;
/// After this time, the client must retry.
const PERMIT_WAIT: Duration = Duration::from_secs(10);
/// The longest time without a byte in or out.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// Pieces of 256 KiB that are read but not yet sent.
const BUFFERED_PIECES: usize = 2;
/// MiB for bodies that are sent to S3 in one piece.
const BUFFERED_MIB_MAX: usize = 512;

#[derive(Clone)]
pub(super) struct TransferLimiter {
    transfers: Arc<Semaphore>,
    memory: Arc<Semaphore>,
}

#[derive(Debug)]
pub(super) struct TransferPermit {
    _room: OwnedSemaphorePermit,
    _memory: Option<OwnedSemaphorePermit>,
}

impl TransferLimiter {
    pub(super) fn new() -> Self {
        Self {
            transfers: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            memory: Arc::new(Semaphore::new(BUFFERED_MIB_MAX)),
        }
    }

    /// Waits up to 10 s. `held` is the number of bytes that the transfer holds in memory besides
    /// its pieces.
    pub(super) async fn acquire_permit(
        &self,
        held: u64,
    ) -> Result<TransferPermit, StoreProxyError> {
        let busy = StoreProxyError::Busy { transfers: TRANSFERS_MAX };
        let permit = async {
            let room = self.transfers.clone().acquire_owned().await.ok()?;
            let mib = u32::try_from(held.div_ceil(1 << 20)).ok()?;
            let memory = match mib {
                0 => None,
                mib => Some(self.memory.clone().acquire_many_owned(mib).await.ok()?),
            };
            Some(TransferPermit { _room: room, _memory: memory })
        };
        timeout(PERMIT_WAIT, permit).await.ok().flatten().ok_or(busy)
    }
}

/// Converts a request body to a stream, which fails if nothing arrives for 60 s.
pub(super) fn receive_body(body: Body) -> impl Stream<Item = Result<Bytes, ReceiveError>> + Send {
    stream::try_unfold(body.into_data_stream(), |mut pieces| async move {
        match timeout(IDLE_LIMIT, pieces.next()).await {
            Err(_) => Err(ReceiveError::Broken("no data for a minute".into())),
            Ok(None) => Ok(None),
            Ok(Some(Ok(piece))) => Ok(Some((piece, pieces))),
            Ok(Some(Err(error))) => Err(ReceiveError::Broken(error.into())),
        }
    })
}

/// Returns a response body. A task reads the object and ends after 60 s without progress: a client
/// that takes nothing never polls the body, and would keep its permit forever.
pub(super) fn send_object(mut pieces: ObjectStream, permit: TransferPermit) -> Body {
    let (send, receive) = mpsc::channel(BUFFERED_PIECES);
    tokio::spawn(async move {
        let _permit = permit;
        loop {
            let piece = match pieces.try_next().await {
                Ok(None) => return,
                Ok(Some(piece)) => Ok(piece),
                Err(fault) => {
                    tracing::warn!(error = %fault, "a download from the store was interrupted");
                    Err(fault)
                }
            };
            let last = piece.is_err();
            match timeout(IDLE_LIMIT, send.send(piece)).await {
                Ok(Ok(())) if !last => {}
                Ok(_) => return,
                Err(_) => {
                    tracing::info!("the client stopped reading; download ended");
                    return;
                }
            }
        }
    });
    Body::from_stream(stream::unfold(receive, |mut receive| async move {
        Some((receive.recv().await?, receive))
    }))
}
