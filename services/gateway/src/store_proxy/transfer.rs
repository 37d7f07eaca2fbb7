//! Transfers of file data: limits their number and memory, in all and of each caller, and ends those
//! that are too slow.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use store::{ObjectStream, ReceiveError};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::error::StoreProxyError;
use crate::transfer_limit::transfer_limit;

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
/// The transfers and the memory of one caller are those of all, divided by this.
const CALLER_DIVISOR: usize = 4;

#[derive(Clone)]
pub(super) struct TransferLimiter {
    all: Arc<TransferRoom>,
    /// Of callers with transfers.
    callers: Arc<Mutex<BTreeMap<String, Arc<TransferRoom>>>>,
}

/// The transfers and the memory that all callers, or one, may use.
#[derive(Debug)]
struct TransferRoom {
    transfers: Arc<Semaphore>,
    memory: Arc<Semaphore>,
}

#[derive(Debug)]
pub(super) struct TransferPermit {
    _permits: [RoomPermit; 2],
    _caller: Arc<TransferRoom>,
}

type RoomPermit = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

impl TransferLimiter {
    pub(super) fn new() -> Self {
        Self { all: Arc::new(TransferRoom::new(1)), callers: Arc::default() }
    }

    /// Waits up to 10 s. `held` is the number of bytes that the transfer holds in memory besides
    /// its pieces.
    pub(super) async fn acquire_permit(
        &self,
        caller: &str,
        held: u64,
    ) -> Result<TransferPermit, StoreProxyError> {
        let busy =
            StoreProxyError::Busy { transfers: TRANSFERS_MAX, own: TRANSFERS_MAX / CALLER_DIVISOR };
        let caller = self.caller_room(caller);
        let permit = async {
            let own = caller.acquire_permits(held).await?;
            let permits = [own, self.all.acquire_permits(held).await?];
            Some(TransferPermit { _permits: permits, _caller: caller })
        };
        timeout(PERMIT_WAIT, permit).await.ok().flatten().ok_or(busy)
    }

    fn caller_room(&self, caller: &str) -> Arc<TransferRoom> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        // Transfers, and those that wait, have it as well.
        callers.retain(|_, room| Arc::strong_count(room) > 1);
        let room = callers.entry(caller.to_owned());
        room.or_insert_with(|| Arc::new(TransferRoom::new(CALLER_DIVISOR))).clone()
    }
}

impl TransferRoom {
    fn new(divisor: usize) -> Self {
        Self {
            transfers: Arc::new(Semaphore::new(TRANSFERS_MAX / divisor)),
            memory: Arc::new(Semaphore::new(BUFFERED_MIB_MAX / divisor)),
        }
    }

    async fn acquire_permits(&self, held: u64) -> Option<RoomPermit> {
        let transfer = self.transfers.clone().acquire_owned().await.ok()?;
        let memory = match u32::try_from(held.div_ceil(1 << 20)).ok()? {
            0 => None,
            mib => Some(self.memory.clone().acquire_many_owned(mib).await.ok()?),
        };
        Some((transfer, memory))
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

/// Returns a response body of `bytes` bytes. A task reads the object and ends after 60 s without
/// progress, or when it takes longer than an upload may: a client that takes nothing never polls the
/// body, and would keep its permit forever.
pub(super) fn send_object(pieces: ObjectStream, bytes: u64, permit: TransferPermit) -> Body {
    let (send, receive) = mpsc::channel(BUFFERED_PIECES);
    tokio::spawn(async move {
        let _permit = permit;
        if timeout(transfer_limit(bytes), send_pieces(pieces, send)).await.is_err() {
            tracing::info!(bytes, "a download was too slow and was ended");
        }
    });
    Body::from_stream(stream::unfold(receive, |mut receive| async move {
        Some((receive.recv().await?, receive))
    }))
}

async fn send_pieces(
    mut pieces: ObjectStream,
    send: mpsc::Sender<Result<Bytes, store::StorageError>>,
) {
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
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_caller_leaves_transfers_and_memory_to_others() {
        let limiter = TransferLimiter::new();
        let mut eve = Vec::new();
        for _ in 0..TRANSFERS_MAX / CALLER_DIVISOR {
            eve.push(limiter.acquire_permit("eve", 0).await.unwrap());
        }
        limiter.acquire_permit("eve", 0).await.unwrap_err();
        limiter.acquire_permit("bob", 64 << 20).await.unwrap();
        eve.clear();
        for _ in 0..2 {
            eve.push(limiter.acquire_permit("eve", 64 << 20).await.unwrap());
        }
        limiter.acquire_permit("eve", 1).await.unwrap_err();
        limiter.acquire_permit("bob", 64 << 20).await.unwrap();
        drop(eve);
        limiter.acquire_permit("bob", 0).await.unwrap();
        let callers = limiter.callers.lock().unwrap();
        assert_eq!(callers.keys().collect::<Vec<_>>(), ["bob"], "eve is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_download_that_its_client_reads_too_slowly_ends() {
        const PIECE: usize = 256 << 10;
        let limiter = TransferLimiter::new();
        let read_slowly = async |pause: Duration| {
            let permit = limiter.acquire_permit("eve", 0).await.unwrap();
            let pieces = stream::repeat_with(|| Ok(Bytes::from_static(&[0; PIECE]))).take(64);
            let body = send_object(pieces.boxed(), 64 * PIECE as u64, permit);
            let (mut body, mut read) = (body.into_data_stream(), 0);
            while let Some(piece) = body.next().await {
                read += piece.unwrap().len();
                sleep(pause).await;
            }
            read
        };
        assert_eq!(read_slowly(Duration::from_secs(4)).await, 64 * PIECE);
        let began = Instant::now();
        assert!(read_slowly(Duration::from_secs(50)).await < 64 * PIECE);
        let limit = transfer_limit(64 * PIECE as u64);
        assert!(began.elapsed() < limit + Duration::from_secs(200), "{:?}", began.elapsed());
    }
}
