//! Injected faults of the S3 server: errors, delays, truncated objects and flipped bits, drawn from
//! a seed.

use std::{io, time::Duration};

use futures::stream;
use http_body_util::StreamBody;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
};
use s3s::{Body, service::S3Service};

/// Larger than all objects of tests.
const BODY_BYTES_MAX: usize = 256 << 20;

/// The probabilities of faults, from 0 to 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub seed: u64,
    /// The request is answered with 503 without processing.
    pub refused: f64,
    /// The body of the object ends after half of its length.
    pub cut: f64,
    /// One bit of the object is flipped.
    pub flipped: f64,
    /// The delay before every response.
    pub delay: Duration,
}

/// The number of injected faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    pub refused: u64,
    pub cut: u64,
    pub flipped: u64,
}

#[derive(Debug, Default)]
pub(crate) struct FaultState {
    pub(crate) faults: Faults,
    pub(crate) counts: FaultCounts,
    /// The server was killed. A runtime that shuts down fails file operations, which would be
    /// answered with 404.
    pub(crate) killed: bool,
    drawn: u64,
    /// Objects that were sent, whole or not.
    objects: u64,
}

impl FaultState {
    /// Returns the next `SplitMix64` number.
    fn next_u64(&mut self) -> u64 {
        self.drawn += 1;
        let mixed = self.faults.seed.wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&mut self, share: f64) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
        let drawn = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        drawn < share
    }

    /// Returns a number from 0 to 1 for the next object. Numbers of few objects are spread evenly, so
    /// that each fault that is likely also happens.
    fn draw_evenly(&mut self) -> f64 {
        const GOLDEN_RATIO: f64 = 0.618_033_988_749_894_9;
        self.objects += 1;
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let number = (self.faults.seed % 1000 + self.objects) as f64;
        (number * GOLDEN_RATIO).fract()
    }

    fn draw_refusal(&mut self) -> bool {
        let refuses = self.happens(self.faults.refused);
        self.counts.refused += u64::from(refuses);
        refuses
    }

    /// Returns the changed bytes of an object, and how many of them are sent.
    fn corrupt(&mut self, body: Bytes) -> (Bytes, usize) {
        let whole = body.len();
        if whole == 0 {
            return (body, whole);
        }
        let (drawn, Faults { cut, flipped, .. }) = (self.draw_evenly(), self.faults);
        if drawn < cut {
            self.counts.cut += 1;
            return (body, whole / 2);
        }
        if drawn < cut + flipped {
            self.counts.flipped += 1;
            let mut body = body.to_vec();
            let bit = self.next_u64();
            let place = usize::try_from(bit / 8 % whole as u64).expect("below the length");
            body[place] ^= 1 << (bit % 8);
            return (body.into(), whole);
        }
        (body, whole)
    }
}

/// Forwards a request to the service and injects faults.
pub(crate) async fn respond(
    service: S3Service,
    state: &std::sync::Mutex<FaultState>,
    request: Request<Incoming>,
) -> Result<Response<Body>, s3s::HttpError> {
    let (Faults { delay, cut: cuts, flipped, .. }, refused) = {
        let mut state = crate::lock(state);
        (state.faults, state.draw_refusal())
    };
    tokio::time::sleep(delay).await;
    if refused {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        return Ok(answer);
    }
    let carries_object =
        request.method() == Method::GET && !request.uri().path().trim_matches('/').is_empty();
    let answer = service.call(request.map(Body::from)).await?;
    if crate::lock(state).killed {
        return std::future::pending().await;
    }
    // Without these faults the response is streamed, as by any server.
    let corrupts = cuts > 0.0 || flipped > 0.0;
    if !corrupts || !carries_object || !answer.status().is_success() {
        return Ok(answer);
    }
    let (head, mut body) = answer.into_parts();
    let Ok(bytes) = body.store_all_limited(BODY_BYTES_MAX).await else {
        return Ok(Response::from_parts(head, Body::empty()));
    };
    let (bytes, sent) = crate::lock(state).corrupt(bytes);
    let body =
        if sent < bytes.len() { truncated_body(bytes.slice(..sent)) } else { Body::from(bytes) };
    Ok(Response::from_parts(head, body))
}

/// A body that breaks the connection after these bytes.
fn truncated_body(bytes: Bytes) -> Body {
    let broken = Err(io::Error::from(io::ErrorKind::BrokenPipe));
    Body::http_body_unsync(StreamBody::new(stream::iter([Ok(Frame::data(bytes)), broken])))
}
