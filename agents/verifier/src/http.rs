//! A server as a verifier: it answers the request of the plug-in protocol with a verdict. Every
//! failure of the server is an `error`, never a failed sample.

use wire::v1::verifier::Http;

use crate::{
    calls::VerifyItem,
    endpoint_client::{Endpoint, EndpointError},
    host_process::OUTPUT_BYTES_MAX,
    judge_result::JudgeResult,
    plugin_answer,
};

/// The server that answers verdicts.
#[derive(Debug)]
pub(crate) struct HttpVerifier(Endpoint);

impl From<&Http> for HttpVerifier {
    fn from(settings: &Http) -> Self {
        let Http { url, key_env, timeout_s, .. } = settings;
        Self(Endpoint::new(url.clone(), key_env, *timeout_s, OUTPUT_BYTES_MAX))
    }
}

impl HttpVerifier {
    pub(crate) fn judge_item(&self, item: &VerifyItem) -> JudgeResult {
        let body = match serde_json::to_string(item) {
            Ok(body) => body,
            Err(error) => return JudgeResult::input_error(error.to_string()),
        };
        let judged = self.0.post_json(&body).and_then(|answer| {
            let verdict = plugin_answer::parse_verdict(&answer);
            verdict.map_err(|problem| format!("it answered no verdict: {problem}").into())
        });
        judged.unwrap_or_else(|error: EndpointError| {
            error.into_result(&format!("the verifier at {}", self.0.url()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{SocketAddr, TcpListener, TcpStream},
        thread::JoinHandle,
        time::{Duration, Instant},
    };

    use wire::v1::verdicts::Outcome;

    use super::*;

    fn read_request(stream: &mut TcpStream) -> String {
        let (mut request, mut part) = (Vec::new(), [0; 4096]);
        while !request.ends_with(b"\"last\":\"END\"}") {
            let length = stream.read(&mut part).unwrap();
            assert!(length > 0, "{}", String::from_utf8_lossy(&request));
            request.extend_from_slice(&part[..length]);
        }
        String::from_utf8_lossy(&request).into_owned()
    }

    fn answer(status: &str, body: &str) -> String {
        let length = body.len();
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    /// Starts a server that answers one connection after another, and returns the requests.
    fn serve(answers: Vec<String>) -> (SocketAddr, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve_one = move |answer: String| {
            let (mut stream, _) = listener.accept().unwrap();
            let request = read_request(&mut stream);
            // The client may have read enough.
            let _ = stream.write_all(answer.as_bytes());
            request
        };
        (address, std::thread::spawn(move || answers.into_iter().map(serve_one).collect()))
    }

    fn judge(address: SocketAddr, timeout_s: f64) -> JudgeResult {
        verifier(address, timeout_s).judge_item(&item())
    }

    fn verifier(address: SocketAddr, timeout_s: f64) -> HttpVerifier {
        let url = format!("http://{address}/verify");
        HttpVerifier::from(&Http { url, timeout_s, ..Http::default() })
    }

    fn item() -> VerifyItem {
        let mut item = VerifyItem { completion: "4".into(), ..VerifyItem::example_item() };
        item.fields.insert("last".into(), "END".into());
        item
    }

    #[test]
    fn a_server_reads_the_completion_and_answers_the_verdict() {
        let (address, served) =
            serve(vec![answer("200 OK", r#"{"outcome": "pass", "reward": 3}"#)]);
        let result = judge(address, 20.0);
        assert_eq!((result.outcome, result.reward), (Outcome::Pass, 3.0), "{result:?}");
        let request = served.join().unwrap().remove(0);
        assert!(request.starts_with("POST /verify ") && request.contains(r#""completion":"4""#));
    }

    #[test]
    fn a_busy_server_is_asked_again_until_the_time_is_over() {
        let busy = ["503 Service Unavailable", "429 Too Many Requests"].map(|it| answer(it, ""));
        let last = answer("200 OK", r#"{"outcome": "fail"}"#);
        let (address, served) = serve([&busy[..], &[last]].concat());
        assert_eq!(judge(address, 20.0).outcome, Outcome::Fail);
        assert_eq!(served.join().unwrap().len(), 3);
        let (address, _served) = serve(vec![answer("503 Service Unavailable", "later"); 9]);
        let began = Instant::now();
        let result = judge(address, 3.0);
        assert!(result.outcome == Outcome::Error && result.is_unreachable, "{result:?}");
        assert!(result.detail.contains("503") && result.detail.contains("requests"), "{result:?}");
        assert!(began.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn the_reason_of_a_busy_server_is_kept_if_it_then_stops_answering() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let busy = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_request(&mut stream);
            let answer = answer("503 Service Unavailable", "the model is loading");
            stream.write_all(answer.as_bytes()).unwrap();
            // Later connections are open, but nothing answers.
            listener
        });
        let result = judge(address, 3.0);
        assert!(result.detail.contains("the model is loading, after 2 requests"), "{result:?}");
        busy.join().unwrap();
    }

    #[test]
    fn a_server_that_starts_late_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(500));
            let listener = TcpListener::bind(address).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            read_request(&mut stream);
            stream.write_all(answer("200 OK", r#"{"outcome": "pass"}"#).as_bytes()).unwrap();
        });
        assert_eq!(judge(address, 20.0).outcome, Outcome::Pass);
        late.join().unwrap();
    }

    #[test]
    fn a_server_that_is_gone_is_waited_for_once_until_it_is_there_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let verifier = verifier(address, 3.0);
        let result = verifier.judge_item(&item());
        assert!(result.is_unreachable && result.detail.contains("requests"), "{result:?}");
        let began = Instant::now();
        for _ in 0..9 {
            let result = verifier.judge_item(&item());
            assert!(result.is_unreachable && !result.detail.contains("requests"), "{result:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        let listener = TcpListener::bind(address).unwrap();
        let back = std::thread::spawn(move || {
            for said in [answer("503 Busy", ""), answer("200 OK", r#"{"outcome": "pass"}"#)] {
                let (mut stream, _) = listener.accept().unwrap();
                read_request(&mut stream);
                stream.write_all(said.as_bytes()).unwrap();
            }
        });
        assert_eq!(verifier.judge_item(&item()).outcome, Outcome::Pass, "it was busy once");
        back.join().unwrap();
        let result = verifier.judge_item(&item());
        assert!(result.detail.contains("requests"), "it is waited for again: {result:?}");
    }

    #[test]
    fn a_server_that_stays_busy_is_waited_for_once() {
        let (address, served) = serve(vec![answer("503 Service Unavailable", "later"); 9]);
        let verifier = verifier(address, 3.0);
        let result = verifier.judge_item(&item());
        assert!(result.is_unreachable && result.detail.contains("requests"), "{result:?}");
        let began = Instant::now();
        let result = verifier.judge_item(&item());
        assert!(result.is_unreachable && !result.detail.contains("requests"), "{result:?}");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        drop(served);
    }

    #[test]
    fn a_server_that_is_silent_to_some_completions_is_not_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let verifier = verifier(listener.local_addr().unwrap(), 0.3);
        for completion in ["a", "b"] {
            let item = VerifyItem { completion: completion.into(), ..item() };
            let result = verifier.judge_item(&item);
            assert!(result.outcome == Outcome::Error && result.retry_elsewhere, "{result:?}");
            assert!(!result.is_unreachable, "their job would wait for ever: {result:?}");
        }
    }

    #[test]
    fn whatever_a_server_does_wrong_is_an_error_that_another_try_may_not_make() {
        let flood = "x".repeat(OUTPUT_BYTES_MAX + 1);
        for (answer, expected) in [
            (answer("404 Not Found", "no such page"), "404 Not Found: no such page"),
            (answer("302 Found", ""), "302"),
            (answer("200 OK", "hello"), "it answered no verdict"),
            (answer("200 OK", r#"{"outcome":"pass","reward":1e999}"#), "it answered no verdict"),
            (answer("200 OK", &flood), "it answered more than 65536 bytes"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{".to_owned(), "the verifier at"),
            ("\0\u{1}\r\n\r\n".to_owned(), "the verifier at"),
        ] {
            let (address, _served) = serve(vec![answer]);
            let result = judge(address, 20.0);
            assert!(result.outcome == Outcome::Error && result.retry_elsewhere, "{result:?}");
            assert!(!result.is_unreachable, "it answers: {result:?}");
            assert!(result.detail.contains(expected), "{expected}: {}", result.detail);
        }
        // A server that never answers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let began = Instant::now();
        let result = judge(listener.local_addr().unwrap(), 0.3);
        assert!(result.outcome == Outcome::Error && result.retry_elsewhere, "{result:?}");
        assert!(began.elapsed() < Duration::from_secs(15));
    }
}
