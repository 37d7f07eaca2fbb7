//! Bytes on their way in and out: so many transfers at once, so much memory for them, and none
//! that stands still.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use store::{Pieces, ReceiveError};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::answer::Refusal;

/// With the pieces that each holds, some 100 MiB.
const TRANSFERS_MAX: usize = 64;
/// How long one waits for another to end; then its client waits.
const WAIT: Duration = Duration::from_secs(10);
/// Without a byte in or out.
const STANDSTILL: Duration = Duration::from_secs(60);
/// Pieces read and not yet sent, of 256 KiB.
const AHEAD: usize = 2;
/// What bodies may hold that pass through to S3 in one piece.
const HELD_MIB_MAX: usize = 512;

#[derive(Clone)]
pub(super) struct Transfers {
    room: Arc<Semaphore>,
    memory: Arc<Semaphore>,
}

/// A transfer that may be.
#[derive(Debug)]
pub(super) struct Permit {
    _room: OwnedSemaphorePermit,
    _memory: Option<OwnedSemaphorePermit>,
}

impl Transfers {
    pub(super) fn new() -> Self {
        Self {
            room: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            memory: Arc::new(Semaphore::new(HELD_MIB_MAX)),
        }
    }

    /// `held` bytes will be in memory together, beside the pieces.
    pub(super) async fn permit(&self, held: u64) -> Result<Permit, Refusal> {
        let busy = Refusal::Busy { transfers: TRANSFERS_MAX };
        let permit = async {
            let room = self.room.clone().acquire_owned().await.ok()?;
            let mib = u32::try_from(held.div_ceil(1 << 20)).ok()?;
            let memory = match mib {
                0 => None,
                mib => Some(self.memory.clone().acquire_many_owned(mib).await.ok()?),
            };
            Some(Permit { _room: room, _memory: memory })
        };
        timeout(WAIT, permit).await.ok().flatten().ok_or(busy)
    }
}

/// What a client sends, as the store receives it.
pub(super) fn incoming(body: Body) -> impl Stream<Item = Result<Bytes, ReceiveError>> + Send {
    stream::try_unfold(body.into_data_stream(), |mut pieces| async move {
        match timeout(STANDSTILL, pieces.next()).await {
            Err(_) => Err(ReceiveError::Broken("nothing came for a minute".into())),
            Ok(None) => Ok(None),
            Ok(Some(Ok(piece))) => Ok(Some((piece, pieces))),
            Ok(Some(Err(error))) => Err(ReceiveError::Broken(error.into())),
        }
    })
}

/// A body of pieces of the store. Read by a task, for a client that takes nothing never asks
/// for more, and would keep its place for ever.
pub(super) fn outgoing(mut pieces: Pieces, permit: Permit) -> Body {
    let (send, receive) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let _permit = permit;
        loop {
            let piece = match pieces.try_next().await {
                Ok(None) => return,
                Ok(Some(piece)) => Ok(piece),
                Err(fault) => {
                    tracing::warn!(error = %fault, "a download from the store broke off");
                    Err(fault)
                }
            };
            let last = piece.is_err();
            match timeout(STANDSTILL, send.send(piece)).await {
                Ok(Ok(())) if !last => {}
                Ok(_) => return,
                Err(_) => {
                    tracing::info!("a client takes nothing; its download ends");
                    return;
                }
            }
        }
    });
    Body::from_stream(stream::unfold(receive, |mut receive| async move {
        Some((receive.recv().await?, receive))
    }))
}
