//! HTTP requests to servers that users name, whose answers are bounded, and a client of completion
//! servers. Other errors are for callers to word; they never repeat a URL, which may contain a
//! secret.

mod chat_reply;
mod completion_client;
mod transfer_pace;

use std::time::Duration;

use reqwest::{Client, ClientBuilder, RequestBuilder, Response, StatusCode, redirect::Policy};
use rustls::crypto::ring;

pub use chat_reply::ChatReply;
pub use completion_client::{CompletionClient, CompletionHttpError, read_key_file};
pub use transfer_pace::{PACE_BYTES_MIN, PACE_INTERVAL, TransferPace};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The status and the body of an answer.
#[derive(Debug)]
pub struct BoundedResponse {
    pub status: StatusCode,
    /// `None` if the body was longer than the limit.
    pub body: Option<Vec<u8>>,
}

/// Selects ring as the crypto provider of the process. Without one, reqwest panics when a client is
/// built. May be called repeatedly.
pub fn install_crypto_provider() {
    // This fails if a provider is already installed.
    let _ = ring::default_provider().install_default();
}

/// Returns a builder of clients that follow no redirects, as a redirected POST would arrive without
/// its body.
pub fn client_builder() -> ClientBuilder {
    install_crypto_provider();
    Client::builder().redirect(Policy::none()).connect_timeout(CONNECT_TIMEOUT)
}

/// Sends a request and reads the answer. `bytes_max` gives the limit of the body for a status.
///
/// # Errors
/// When the server is not reached, or the connection breaks off.
pub async fn send_request(
    request: RequestBuilder,
    bytes_max: impl Fn(StatusCode) -> usize,
) -> Result<BoundedResponse, reqwest::Error> {
    let response = request.send().await.map_err(reqwest::Error::without_url)?;
    let status = response.status();
    let body = read_body(response, bytes_max(status)).await.map_err(reqwest::Error::without_url)?;
    Ok(BoundedResponse { status, body })
}

/// Returns `None` above the limit.
async fn read_body(
    mut response: Response,
    bytes_max: usize,
) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if bytes.len() + chunk.len() > bytes_max {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Some(bytes))
}
