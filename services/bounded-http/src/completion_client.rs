//! An HTTP client of a completion server; every answer is bounded in size and time.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    time::Duration,
};

use reqwest::{Certificate, Client, Method, StatusCode};
use serde_json::Value;

use crate::{BoundedResponse, client_builder};

/// A server's error text is shown to users up to this length.
const ERROR_TEXT_CHARS: usize = 300;

const ERROR_BYTES_MAX: usize = 64 * 1024;

/// A key is shorter.
const KEY_BYTES_MAX: u64 = 16 * 1024;

/// The reason why a completion server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CompletionHttpError {
    #[error("set up the client (E109)")]
    Setup(#[source] reqwest::Error),
    /// The server was not reached, or the connection broke off.
    #[error("{at} does not answer (E109)")]
    Transport {
        at: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{at} answers {status}: {message} (E109)")]
    Status { at: String, status: u16, message: String },
    #[error("{at} answers more than {max} bytes (E109)")]
    TooLarge { at: String, max: usize },
}

impl CompletionHttpError {
    /// Returns true if the server gave no complete answer.
    pub fn is_transport(&self) -> bool {
        matches!(self, Self::Transport { .. })
    }

    /// Returns true if the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Status { status: 408 | 425 | 429 | 500..=599, .. })
            || self.is_transport()
    }

    /// Returns the reason why the server does not accept this request, if it may accept others. An
    /// answer that is too long counts, too.
    pub fn refusal_reason(&self) -> Option<String> {
        match self {
            Self::Status { status: status @ (400 | 413 | 422), message, .. } => {
                Some(format!("{status}: {message}"))
            }
            Self::TooLarge { max, .. } => Some(format!("an answer of more than {max} bytes")),
            Self::Status { .. } | Self::Setup(_) | Self::Transport { .. } => None,
        }
    }

    /// Returns true if the server does not have the requested path or method.
    pub fn is_unknown_path(&self) -> bool {
        matches!(self, Self::Status { status: 404 | 405 | 501, .. })
    }
}

/// A client of one server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CompletionClient {
    client: Client,
    root: String,
    key: Option<String>,
}

impl CompletionClient {
    /// Builds a client that appends paths to the URL.
    ///
    /// # Errors
    /// The TLS of this machine cannot be used.
    pub fn for_url(url: &str, key: Option<String>) -> Result<Self, CompletionHttpError> {
        let client = direct_client().build().map_err(CompletionHttpError::Setup)?;
        Ok(Self { client, root: url.to_owned(), key })
    }

    /// Builds a client that trusts only this authority, as PEM.
    ///
    /// # Errors
    /// The certificate cannot be read.
    pub fn for_authority(
        url: &str,
        key: String,
        authority: &[u8],
    ) -> Result<Self, CompletionHttpError> {
        let build = || {
            let authority = Certificate::from_pem(authority)?;
            direct_client().tls_certs_only([authority]).build()
        };
        let client = build().map_err(CompletionHttpError::Setup)?;
        Ok(Self { client, root: url.to_owned(), key: Some(key) })
    }

    /// Builds a client of a server on a Unix socket.
    ///
    /// # Errors
    /// The TLS of this machine cannot be used.
    pub fn for_socket(socket: &Path, key: &str) -> Result<Self, CompletionHttpError> {
        let client =
            direct_client().unix_socket(socket).build().map_err(CompletionHttpError::Setup)?;
        Ok(Self { client, root: "http://localhost".to_owned(), key: Some(key.to_owned()) })
    }

    /// Returns the body of a successful answer.
    ///
    /// # Errors
    /// The server gives none within the limits.
    pub async fn get(
        &self,
        path: &str,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, CompletionHttpError> {
        self.send_request(Method::GET, path, None, limit, bytes_max).await
    }

    /// Returns the body of a successful answer.
    ///
    /// # Errors
    /// The server gives none within the limits.
    pub async fn post_json(
        &self,
        path: &str,
        body: &Value,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, CompletionHttpError> {
        self.send_request(Method::POST, path, Some(body), limit, bytes_max).await
    }

    async fn send_request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, CompletionHttpError> {
        let at = format!("{}{path}", self.root);
        let transport = |source: reqwest::Error| {
            // `at` contains the URL already.
            CompletionHttpError::Transport { at: at.clone(), source }
        };
        let mut request = self.client.request(method, &at).timeout(limit);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let max =
            |status: StatusCode| if status.is_success() { bytes_max } else { ERROR_BYTES_MAX };
        let response = crate::send_request(request, max).await;
        let BoundedResponse { status, body } = response.map_err(transport)?;
        match body {
            None => Err(CompletionHttpError::TooLarge { at, max: max(status) }),
            Some(bytes) if status.is_success() => Ok(bytes),
            Some(bytes) => Err(CompletionHttpError::Status {
                at,
                status: status.as_u16(),
                message: error_text(&bytes),
            }),
        }
    }
}

/// Reads the key of a server from a file. Surrounding white space is removed.
///
/// # Errors
/// The file cannot be read.
pub fn read_key_file(path: &Path) -> io::Result<String> {
    let mut key = String::new();
    File::open(path)?.take(KEY_BYTES_MAX).read_to_string(&mut key)?;
    Ok(key.trim().to_owned())
}

/// Connects only to the named server: no proxy.
fn direct_client() -> reqwest::ClientBuilder {
    client_builder().no_proxy()
}

/// Returns the message of an error's body, in any of the usual forms.
fn error_text(body: &[u8]) -> String {
    let json: Option<Value> = serde_json::from_slice(body).ok();
    let of = |json: &Value| {
        let texts = [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]];
        texts.iter().find_map(|one| one.as_str()).map(str::to_owned)
    };
    let text = json.as_ref().and_then(of);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.trim().chars().take(ERROR_TEXT_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    /// A server that answers one request with these bytes, then calls `then`.
    fn server(answer: &'static [u8], then: fn(std::net::TcpStream)) -> CompletionClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
            then(stream);
        });
        CompletionClient::for_url(&url, Some("key".into())).unwrap()
    }

    fn get(http: &CompletionClient, limit: Duration) -> Result<Vec<u8>, CompletionHttpError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(http.get("/x", limit, 1000))
    }

    #[test]
    fn a_server_that_floods_hangs_or_breaks_off_is_not_waited_for() {
        let long = Duration::from_secs(30);
        let flood =
            server(
                b"HTTP/1.1 200 OK\r\n\r\n",
                |mut stream| {
                    while stream.write_all(&[b'x'; 4096]).is_ok() {}
                },
            );
        assert!(matches!(get(&flood, long), Err(CompletionHttpError::TooLarge { max: 1000, .. })));
        let hang = server(b"", |stream| {
            std::thread::sleep(Duration::from_secs(5));
            drop(stream);
        });
        let began = std::time::Instant::now();
        assert!(get(&hang, Duration::from_millis(300)).unwrap_err().is_transport());
        assert!(began.elapsed() < Duration::from_secs(4));
        let half = server(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{", drop);
        assert!(get(&half, long).unwrap_err().is_transport());
        let babble = server(b"\0\xff not HTTP at all\r\n\r\n", drop);
        assert!(get(&babble, long).unwrap_err().is_transport());
        let refusal = b"HTTP/1.1 400 Bad\r\ncontent-length: 21\r\n\r\n{\"message\":\"no, no\"} ";
        let refused = get(&server(refusal, drop), long).unwrap_err();
        assert!(
            !refused.is_transport() && refused.to_string().ends_with("400: no, no (E109)"),
            "{refused}"
        );
    }

    #[test]
    fn the_message_is_found_in_every_server_s_error_format() {
        let openai = br#"{"error":{"message":"no such model","type":"x"}}"#;
        assert_eq!(error_text(openai), "no such model");
        assert_eq!(error_text(br#"{"detail":"Not Found"}"#), "Not Found");
        assert_eq!(error_text(br#"{"error":"model not found"}"#), "model not found");
        assert_eq!(error_text(b" <html>502</html> "), "<html>502</html>");
        assert_eq!(error_text(&[b'x'; 9999]).len(), ERROR_TEXT_CHARS);
    }
}
