//! What may be wrong with a store that answers: errors, slowness, bodies cut short, bits
//! that flip on the way. As a seed has it.

use std::{io, time::Duration};

use futures::stream;
use http_body_util::StreamBody;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
};
use s3s::{Body, service::S3Service};

/// Objects of tests are smaller.
const BODY_BYTES_MAX: usize = 256 << 20;

/// Shares of all requests, from 0 to 1, and of all answers that carry an object.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub seed: u64,
    /// Answered with 503 without being looked at.
    pub refused: f64,
    /// Objects whose body ends after half of what was promised.
    pub cut: f64,
    /// Objects with one bit that is another than what is stored.
    pub flipped: f64,
    /// Before every answer.
    pub delay: Duration,
}

/// How often each fault happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    pub refused: u64,
    pub cut: u64,
    pub flipped: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Weather {
    pub(crate) faults: Faults,
    pub(crate) counts: FaultCounts,
    /// Killed: a runtime that ends fails file operations, which would be answered as 404.
    pub(crate) dead: bool,
    drawn: u64,
}

impl Weather {
    /// A number of `SplitMix64`.
    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        let mixed = self.faults.seed.wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&mut self, share: f64) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
        let drawn = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        drawn < share
    }

    fn refuses(&mut self) -> bool {
        let refuses = self.happens(self.faults.refused);
        self.counts.refused += u64::from(refuses);
        refuses
    }

    /// What becomes of an object's bytes, and how many of them are sent.
    fn spoil(&mut self, body: Bytes) -> (Bytes, usize) {
        let whole = body.len();
        if whole > 0 && self.happens(self.faults.cut) {
            self.counts.cut += 1;
            return (body, whole / 2);
        }
        if whole > 0 && self.happens(self.faults.flipped) {
            self.counts.flipped += 1;
            let mut body = body.to_vec();
            let bit = self.draw();
            let place = usize::try_from(bit / 8 % whole as u64).expect("below the length");
            body[place] ^= 1 << (bit % 8);
            return (body.into(), whole);
        }
        (body, whole)
    }
}

/// The service behind the weather.
pub(crate) async fn answer(
    service: S3Service,
    weather: &std::sync::Mutex<Weather>,
    request: Request<Incoming>,
) -> Result<Response<Body>, s3s::HttpError> {
    let (Faults { delay, cut: cuts, flipped, .. }, refused) = {
        let mut weather = crate::lock(weather);
        (weather.faults, weather.refuses())
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
    if crate::lock(weather).dead {
        return std::future::pending().await;
    }
    // Otherwise it goes out as it is read, like any server's.
    let spoils = cuts > 0.0 || flipped > 0.0;
    if !spoils || !carries_object || !answer.status().is_success() {
        return Ok(answer);
    }
    let (head, mut body) = answer.into_parts();
    let Ok(bytes) = body.store_all_limited(BODY_BYTES_MAX).await else {
        return Ok(Response::from_parts(head, Body::empty()));
    };
    let (bytes, sent) = crate::lock(weather).spoil(bytes);
    let body = if sent < bytes.len() { cut(bytes.slice(..sent)) } else { Body::from(bytes) };
    Ok(Response::from_parts(head, body))
}

/// These bytes, and then the connection breaks.
fn cut(bytes: Bytes) -> Body {
    let broken = Err(io::Error::from(io::ErrorKind::BrokenPipe));
    Body::http_body_unsync(StreamBody::new(stream::iter([Ok(Frame::data(bytes)), broken])))
}
