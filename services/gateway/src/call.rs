//! What all calls have in common: a span, a time limit, a bounded answer, and an end when
//! the gateway stops. Knows nothing of what they do.

use std::{pin::Pin, sync::Arc, time::Duration};

use board::{Board, Fleet};
use control::Control;
use futures::{Stream, StreamExt, stream, stream::BoxStream};
use prost::Message;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tracing::{Instrument, Span};
use wire::RunId;

use crate::{
    counts::{Counts, Open},
    live::{Gallery, Live},
    status::Refusal,
};

/// How long a unary call, or opening a stream, may take; receiving the request not counted.
const UNARY_LIMIT: Duration = Duration::from_secs(30);
/// A restarted nats-server is back within 3 s. Without this, reads wait half a minute.
const BUS_LIMIT: Duration = Duration::from_secs(5);
const BUS_POLL: Duration = Duration::from_millis(50);
/// Cycles whose samples are read at once; more wait. Each is all of a cycle's texts.
const READINGS_MAX: usize = 2;
/// What clients accept by default, less a little for the envelope.
const ANSWER_BYTES_MAX: usize = (4 << 20) - 1024;
/// Each watch is a consumer of the log.
const STREAMS_MAX: usize = 1024;
/// No id is longer; what is not an id need not fill our log.
const NAME_CHARS_MAX: usize = 64;

pub(crate) type Items<T> = BoxStream<'static, Result<T, Status>>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(
        "the gateway has lost the bus; is the nats-server running and reachable from it? (G105)"
    )]
    BusAway,
    #[error("not done within {limit:?}; look at the result before calling again (G102)")]
    Overdue { limit: Duration },
    #[error(
        "the answer has {bytes} bytes, the limit is {ANSWER_BYTES_MAX}; name a run or a suite, or \
         use the service's Watch (G103)"
    )]
    TooLarge { bytes: usize },
    #[error("{STREAMS_MAX} streams are open already; end one, or try again later (G104)")]
    TooManyStreams,
    #[error("as many runs are looked at as can be; close a page, or try again in a minute (G104)")]
    TooManyBoards,
    #[error("the picture is no longer kept up to date ({why}); ask for it again (G105)")]
    Lost { why: String },
    #[error("the call's own deadline has passed (G102)")]
    Deadline,
    #[error("the gateway is stopping; connect again later and go on from the last cursor (G105)")]
    Stopping,
}

/// One call, as it is logged and counted.
pub(crate) struct Call {
    pub(crate) method: &'static str,
    pub(crate) span: Span,
}

/// `run` as the caller wrote it, empty when the call is about none.
pub(crate) fn called(method: &'static str, run: &str) -> Call {
    Call { method, span: tracing::info_span!("call", method, run = ?shortened(run)) }
}

pub(crate) fn shortened(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

/// When the caller loses interest, by `grpc-timeout`. For unary calls tonic sees to it.
pub(crate) fn deadline<T>(request: &Request<T>) -> Option<Instant> {
    let text = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    Instant::now().checked_add(parse_timeout(text)?)
}

/// One to eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// What every service works with.
#[derive(Clone)]
pub(crate) struct Calls {
    pub(crate) control: Control,
    stop: CancellationToken,
    streams: Arc<Semaphore>,
    gallery: Arc<Gallery>,
    readings: Arc<Semaphore>,
    counts: Counts,
}

impl Calls {
    pub(crate) fn new(control: Control, stop: CancellationToken, counts: Counts) -> Self {
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        let readings = Arc::new(Semaphore::new(READINGS_MAX));
        Self { control, stop, streams, gallery: Arc::default(), readings, counts }
    }

    /// Leave to read a cycle's samples, until dropped.
    pub(crate) async fn reading(&self) -> Option<OwnedSemaphorePermit> {
        // Nobody closes it.
        self.readings.clone().acquire_owned().await.ok()
    }

    pub(crate) fn fleet(&self) -> Arc<Live<Fleet>> {
        self.gallery.fleet(&self.control, &self.stop)
    }

    /// Of a run that there is.
    pub(crate) fn board(&self, run: &RunId) -> Result<Arc<Live<Board>>, CallError> {
        self.gallery.board(&self.control, run, &self.stop)
    }

    /// Runs a call that has one answer.
    pub(crate) async fn unary<T: Message>(
        &self,
        call: Call,
        work: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<Response<T>, Status> {
        let answer = async {
            let answer = self.in_time(work).await?;
            match answer.encoded_len() {
                bytes if bytes > ANSWER_BYTES_MAX => Err(CallError::TooLarge { bytes }.into()),
                _ => Ok(answer),
            }
        };
        self.noted(call, answer).await.map(Response::new)
    }

    /// Opens a call that has many answers. It ends behind its first error, which may be that
    /// the gateway stops.
    pub(crate) async fn stream<T, E, S>(
        &self,
        call: Call,
        deadline: Option<Instant>,
        open: impl Future<Output = Result<S, Refusal>>,
    ) -> Result<Response<Items<T>>, Status>
    where
        S: Stream<Item = Result<T, E>> + Send + 'static,
        Refusal: From<E>,
        T: Send + 'static,
        E: 'static,
    {
        let flow = async {
            let permit = self.streams.clone().try_acquire_owned();
            let permit = permit.map_err(|_| CallError::TooManyStreams)?;
            let items = Box::pin(self.in_time(open).await?);
            let (stop, span) = (self.stop.clone(), Span::current());
            let _open = self.counts.open();
            Ok(Flow { items, stop, deadline, span, sent: 0, _open, _permit: permit })
        };
        let flow = self.noted(call, flow).await?;
        Ok(Response::new(stream::unfold(Some(flow), next).boxed()))
    }

    async fn noted<T>(
        &self,
        Call { method, span }: Call,
        work: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<T, Status> {
        let started = Instant::now();
        let done = work.instrument(span.clone()).await.map_err(Status::from);
        let elapsed = started.elapsed();
        let code = done.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.counts.note(method, code, elapsed);
        span.in_scope(|| match &done {
            Ok(_) => tracing::debug!(?elapsed, "answered"),
            Err(status) => log_refusal(status, elapsed),
        });
        done
    }

    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<T, Refusal> {
        self.bus_is_there().await?;
        match timeout(UNARY_LIMIT, work).await {
            Ok(done) => done,
            Err(_) if !self.control.bus().is_connected() => Err(CallError::BusAway.into()),
            Err(_) => Err(CallError::Overdue { limit: UNARY_LIMIT }.into()),
        }
    }

    async fn bus_is_there(&self) -> Result<(), CallError> {
        let deadline = Instant::now() + BUS_LIMIT;
        while !self.control.bus().is_connected() {
            if Instant::now() >= deadline {
                return Err(CallError::BusAway);
            }
            sleep(BUS_POLL).await;
        }
        Ok(())
    }
}

fn log_refusal(status: &Status, elapsed: Duration) {
    let (code, message) = (status.code(), status.message());
    match code {
        Code::Internal | Code::DataLoss | Code::Unavailable | Code::ResourceExhausted => {
            tracing::warn!(?code, message, ?elapsed, "refused");
        }
        _ => tracing::info!(?code, message, ?elapsed, "refused"),
    }
}

/// An open stream. Holds one item at most: the next is asked for when the client takes it.
struct Flow<S> {
    items: Pin<Box<S>>,
    stop: CancellationToken,
    deadline: Option<Instant>,
    span: Span,
    sent: u64,
    _open: Open,
    _permit: OwnedSemaphorePermit,
}

impl<S> Drop for Flow<S> {
    fn drop(&mut self) {
        self.span.in_scope(|| tracing::debug!(sent = self.sent, "the stream is over"));
    }
}

async fn next<T, E, S>(flow: Option<Flow<S>>) -> Option<(Result<T, Status>, Option<Flow<S>>)>
where
    S: Stream<Item = Result<T, E>>,
    Refusal: From<E>,
{
    let mut flow = flow?;
    let over = async {
        match flow.deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    let item = tokio::select! {
        biased;
        () = flow.stop.cancelled() => Err(CallError::Stopping.into()),
        () = over => Err(CallError::Deadline.into()),
        item = flow.items.next() => item?.map_err(Refusal::from),
    };
    match item {
        Ok(item) => {
            flow.sent += 1;
            Some((Ok(item), Some(flow)))
        }
        Err(refusal) => {
            let status = Status::from(refusal);
            flow.span.in_scope(|| log_refusal(&status, Duration::ZERO));
            Some((Err(status), None))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_up_to_eight_digits_and_a_unit() {
        assert_eq!(parse_timeout("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "5", "5x", "-5S", "123456789S", "5µ"] {
            assert_eq!(parse_timeout(wrong), None, "{wrong:?}");
        }
    }
}
