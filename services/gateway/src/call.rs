//! Common parts of all calls: a tracing span, a time limit, a bounded answer, and an end when the
//! gateway stops. Knows nothing about the services.

use std::{pin::Pin, sync::Arc, time::Duration};

use control::FleetControl;
use futures::{Stream, StreamExt, stream, stream::BoxStream};
use identity::GatewayCaller;
use prost::Message;
use run_view::{FleetView, RunView};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tracing::{Instrument, Span};
use wire::RunId;

use crate::{
    call_counts::{CallCounts, StreamGuard},
    error::{ANSWER_BYTES_MAX, CallError, CallRefusal},
    member_limit::{MemberLimit, MemberPermit},
    stalled_stream::{STALL_LIMIT, end_when_stalled},
    views::{SharedView, ViewCache},
};

/// The limit of a unary call, or of opening a stream, without receiving the request.
const UNARY_LIMIT: Duration = Duration::from_secs(30);
/// A restarted nats-server is back within 3 s; without this limit, reads wait half a minute.
const BUS_LIMIT: Duration = Duration::from_secs(5);
const BUS_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum open streams of all members. Each stream that watches a run is a consumer of the log.
const STREAMS_MAX: usize = 1024;
/// Maximum open streams of one member of a closed fleet: enough for a script that watches each run
/// of a sweep.
const MEMBER_STREAMS_MAX: usize = 128;
/// Each read holds all facts of a cycle in memory. Further reads wait.
const CYCLE_READS_MAX: usize = 2;
/// The logged characters of a client's name. No valid id is longer.
const NAME_CHARS_MAX: usize = 64;

pub(crate) type ItemStream<T> = BoxStream<'static, Result<T, Status>>;

pub(crate) struct CallSpan {
    pub(crate) method: &'static str,
    pub(crate) span: Span,
}

/// Creates the span of a call. `run` is as the client wrote it, or empty.
pub(crate) fn create_call_span(method: &'static str, run: &str) -> CallSpan {
    CallSpan { method, span: tracing::info_span!("call", method, run = ?truncate_name(run)) }
}

pub(crate) fn truncate_name(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

/// Returns the caller's name, which the access layer adds to the request; empty in an open fleet.
pub(crate) fn caller_name<T>(request: &Request<T>) -> String {
    request
        .extensions()
        .get::<GatewayCaller>()
        .map_or_else(String::new, |caller| caller.name.to_string())
}

/// The member that opens a stream, and its deadline.
pub(crate) struct StreamCaller {
    /// `None` in an open fleet.
    member: Option<String>,
    deadline: Option<Instant>,
}

impl StreamCaller {
    pub(crate) fn from_request<T>(request: &Request<T>) -> Self {
        let member = request.extensions().get::<GatewayCaller>();
        let member = member.map(|caller| caller.name.to_string());
        Self { member, deadline: read_deadline(request) }
    }
}

/// Returns the deadline from the `grpc-timeout` header. Only streams need it; tonic enforces it for
/// unary calls.
fn read_deadline<T>(request: &Request<T>) -> Option<Instant> {
    let text = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    Instant::now().checked_add(parse_timeout(text)?)
}

/// Parses a gRPC timeout: one to eight digits and a unit (`H`, `M`, `S`, `m`, `u`, `n`).
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

/// The shared state of all services: the control operations, the stop token, limits, views and
/// counters. Cheap to clone.
///
/// A service describes a call and passes its work:
///
/// ```text
/// let call = create_call_span("Runs.Get", &run);
/// self.0.answer_unary(call, async { ... }).await
/// ```
#[derive(Clone)]
pub(crate) struct CallContext {
    pub(crate) control: FleetControl,
    stop: CancellationToken,
    streams: MemberLimit,
    views: Arc<ViewCache>,
    cycle_read_permits: Arc<Semaphore>,
    counts: CallCounts,
}

impl CallContext {
    pub(crate) fn new(control: FleetControl, stop: CancellationToken, counts: CallCounts) -> Self {
        let streams = MemberLimit::new("streams", STREAMS_MAX, MEMBER_STREAMS_MAX);
        let cycle_read_permits = Arc::new(Semaphore::new(CYCLE_READS_MAX));
        Self { control, stop, streams, views: Arc::default(), cycle_read_permits, counts }
    }

    /// Waits for the permit to read the facts of whole cycles.
    pub(crate) async fn acquire_cycle_read(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        self.cycle_read_permits.clone().acquire_owned().await.ok()
    }

    pub(crate) fn fleet_view(&self) -> Arc<SharedView<FleetView>> {
        self.views.fleet_view(&self.control, &self.stop)
    }

    /// Returns the view of a run, whose existence the caller has checked.
    pub(crate) fn run_view(&self, run: &RunId) -> Result<Arc<SharedView<RunView>>, CallError> {
        self.views.run_view(&self.control, run, &self.stop, &self.cycle_read_permits)
    }

    /// Answers a call within the time limit and the size limit.
    pub(crate) async fn answer_unary<T: Message>(
        &self,
        call: CallSpan,
        work: impl Future<Output = Result<T, CallRefusal>>,
    ) -> Result<Response<T>, Status> {
        let answer = async {
            let answer = self.run_in_time(work).await?;
            match answer.encoded_len() {
                bytes if bytes > ANSWER_BYTES_MAX => Err(CallError::TooLarge { bytes }.into()),
                _ => Ok(answer),
            }
        };
        self.record_call(call, answer).await.map(Response::new)
    }

    /// Opens a call with many answers. The stream ends after its first error, at the deadline, when
    /// its reader takes nothing for a minute, and when the gateway stops.
    pub(crate) async fn open_stream<T, E, S>(
        &self,
        call: CallSpan,
        caller: StreamCaller,
        open: impl Future<Output = Result<S, CallRefusal>>,
    ) -> Result<Response<ItemStream<T>>, Status>
    where
        S: Stream<Item = Result<T, E>> + Send + 'static,
        CallRefusal: From<E>,
        T: Send + 'static,
        E: 'static,
    {
        let flow = async {
            let StreamCaller { member, deadline } = caller;
            let permit = self.streams.take_place(member).map_err(CallError::from)?;
            let items = Box::pin(self.run_in_time(open).await?);
            let (stop, span) = (self.stop.clone(), Span::current());
            let _open = self.counts.count_stream();
            Ok(OpenCallStream { items, stop, deadline, span, sent: 0, _open, _permit: permit })
        };
        let flow = self.record_call(call, flow).await?;
        let items = stream::unfold(Some(flow), next_item).boxed();
        Ok(Response::new(end_when_stalled(items, || Err(refuse_stalled_reader()))))
    }

    async fn record_call<T>(
        &self,
        CallSpan { method, span }: CallSpan,
        work: impl Future<Output = Result<T, CallRefusal>>,
    ) -> Result<T, Status> {
        let started = Instant::now();
        let done = work.instrument(span.clone()).await.map_err(Status::from);
        let elapsed = started.elapsed();
        let code = done.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.counts.count_call(method, code, elapsed);
        span.in_scope(|| match &done {
            Ok(_) => tracing::debug!(?elapsed, "answered"),
            Err(status) => log_refusal(status, elapsed),
        });
        done
    }

    async fn run_in_time<T>(
        &self,
        work: impl Future<Output = Result<T, CallRefusal>>,
    ) -> Result<T, CallRefusal> {
        self.wait_for_bus().await?;
        match timeout(UNARY_LIMIT, work).await {
            Ok(done) => done,
            Err(_) if !self.control.bus().is_connected() => Err(CallError::BusUnreachable.into()),
            Err(_) => Err(CallError::TimedOut { limit: UNARY_LIMIT }.into()),
        }
    }

    async fn wait_for_bus(&self) -> Result<(), CallError> {
        let deadline = Instant::now() + BUS_LIMIT;
        while !self.control.bus().is_connected() {
            if Instant::now() >= deadline {
                return Err(CallError::BusUnreachable);
            }
            sleep(BUS_POLL_INTERVAL).await;
        }
        Ok(())
    }
}

/// Returns the last item of a stream that nobody reads.
fn refuse_stalled_reader() -> Status {
    CallRefusal::from(CallError::ReaderStalled { limit: STALL_LIMIT }).into()
}

/// Warns if the gateway is at fault or at a limit.
fn log_refusal(status: &Status, elapsed: Duration) {
    let (code, message) = (status.code(), status.message());
    match code {
        Code::Internal | Code::DataLoss | Code::Unavailable | Code::ResourceExhausted => {
            tracing::warn!(?code, message, ?elapsed, "refused");
        }
        _ => tracing::info!(?code, message, ?elapsed, "refused"),
    }
}

/// An open stream. Holds at most one item: the next is requested when the client takes it.
struct OpenCallStream<S> {
    items: Pin<Box<S>>,
    stop: CancellationToken,
    deadline: Option<Instant>,
    span: Span,
    sent: u64,
    _open: StreamGuard,
    _permit: MemberPermit,
}

impl<S> Drop for OpenCallStream<S> {
    fn drop(&mut self) {
        self.span.in_scope(|| tracing::debug!(sent = self.sent, "the stream is over"));
    }
}

/// Returns an item and the stream, or an error without the stream.
async fn next_item<T, E, S>(
    flow: Option<OpenCallStream<S>>,
) -> Option<(Result<T, Status>, Option<OpenCallStream<S>>)>
where
    S: Stream<Item = Result<T, E>>,
    CallRefusal: From<E>,
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
        () = over => Err(CallError::DeadlinePassed.into()),
        item = flow.items.next() => item?.map_err(CallRefusal::from),
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
