//! Requests to a server of completions: every answer bounded in size and time.

use std::{path::Path, time::Duration};

use reqwest::{Client, Method, Response, redirect};
use serde_json::Value;

/// To be connected.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Of what a server says is wrong, for people.
const SAID_CHARS: usize = 300;

/// Beyond what is asked for.
const ERROR_BYTES_MAX: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    #[error("set up the client (E109)")]
    Setup(#[source] reqwest::Error),
    /// It was not reached, or broke off.
    #[error("{at} does not answer (E109)")]
    Transport {
        at: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{at} answers {status}: {said} (E109)")]
    Status { at: String, status: u16, said: String },
    #[error("{at} answers more than {max} bytes (E109)")]
    TooLarge { at: String, max: usize },
}

impl HttpError {
    /// Whether the server did not get to say anything.
    pub(super) fn is_transport(&self) -> bool {
        matches!(self, Self::Transport { .. })
    }

    /// Whether it knows no such thing to ask for.
    pub(super) fn is_unknown_path(&self) -> bool {
        matches!(self, Self::Status { status: 404 | 405 | 501, .. })
    }
}

/// One server. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Http {
    client: Client,
    root: String,
    key: Option<String>,
}

impl Http {
    /// A server at a URL, which paths are appended to.
    pub(super) fn at(url: &str, key: Option<String>) -> Result<Self, HttpError> {
        let client = plain().build().map_err(HttpError::Setup)?;
        Ok(Self { client, root: url.to_owned(), key })
    }

    /// A server at a unix socket.
    pub(super) fn over(socket: &Path, key: &str) -> Result<Self, HttpError> {
        let client = plain().unix_socket(socket).build().map_err(HttpError::Setup)?;
        Ok(Self { client, root: "http://localhost".to_owned(), key: Some(key.to_owned()) })
    }

    pub(super) async fn get(
        &self,
        path: &str,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, HttpError> {
        self.ask(Method::GET, path, None, limit, bytes_max).await
    }

    pub(super) async fn post(
        &self,
        path: &str,
        body: &Value,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, HttpError> {
        self.ask(Method::POST, path, Some(body), limit, bytes_max).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<Vec<u8>, HttpError> {
        let at = format!("{}{path}", self.root);
        let transport = |source: reqwest::Error| {
            // `at` says it already.
            HttpError::Transport { at: at.clone(), source: source.without_url() }
        };
        let mut request = self.client.request(method, &at).timeout(limit);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let response = request.send().await.map_err(transport)?;
        let status = response.status();
        let max = if status.is_success() { bytes_max } else { ERROR_BYTES_MAX };
        match read(response, max).await.map_err(transport)? {
            None => Err(HttpError::TooLarge { at, max }),
            Some(bytes) if status.is_success() => Ok(bytes),
            Some(bytes) => {
                Err(HttpError::Status { at, status: status.as_u16(), said: said(&bytes) })
            }
        }
    }
}

/// Straight to the server that was named, and to no other.
fn plain() -> reqwest::ClientBuilder {
    let none = redirect::Policy::none();
    Client::builder().no_proxy().redirect(none).connect_timeout(CONNECT_LIMIT)
}

/// The body, unless it is larger.
async fn read(mut response: Response, max: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if bytes.len() + chunk.len() > max {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Some(bytes))
}

/// What is wrong, from an error's body in any of the usual forms.
fn said(body: &[u8]) -> String {
    let json: Option<Value> = serde_json::from_slice(body).ok();
    let of = |json: &Value| {
        let told = [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]];
        told.iter().find_map(|one| one.as_str()).map(str::to_owned)
    };
    let text = json.as_ref().and_then(of);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.trim().chars().take(SAID_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    /// A server that answers one request with these bytes, and then does what it does.
    fn server(answer: &'static [u8], then: fn(std::net::TcpStream)) -> Http {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
            then(stream);
        });
        Http::at(&url, Some("key".into())).unwrap()
    }

    fn get(http: &Http, limit: Duration) -> Result<Vec<u8>, HttpError> {
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
        assert!(matches!(get(&flood, long), Err(HttpError::TooLarge { max: 1000, .. })));
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
    fn what_is_wrong_is_found_in_any_server_s_error() {
        let openai = br#"{"error":{"message":"no such model","type":"x"}}"#;
        assert_eq!(said(openai), "no such model");
        assert_eq!(said(br#"{"detail":"Not Found"}"#), "Not Found");
        assert_eq!(said(br#"{"error":"model not found"}"#), "model not found");
        assert_eq!(said(b" <html>502</html> "), "<html>502</html>");
        assert_eq!(said(&[b'x'; 9999]).len(), SAID_CHARS);
    }
}
