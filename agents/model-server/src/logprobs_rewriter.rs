//! Adds OpenAI's form of log-probabilities to the bytes of a completion as they arrive.

use std::collections::BTreeMap;

use bytes::Bytes;
use completion_server::add_token_lists;

/// Most bytes that are held back to change them. Gateways refuse a longer answer.
const HELD_BYTES_MAX: usize = 64 << 20;

/// Rewrites a completion of llama-server, whole or in events, which must be complete to be changed.
pub(crate) struct LogprobsRewriter {
    is_stream: bool,
    held: Vec<u8>,
    /// Numbers of characters of each choice so far.
    offsets: BTreeMap<u64, usize>,
}

impl LogprobsRewriter {
    pub(crate) fn new(is_stream: bool) -> Self {
        Self { is_stream, held: Vec::new(), offsets: BTreeMap::new() }
    }

    /// Takes the next bytes of the answer, and returns those that can be passed on by now.
    pub(crate) fn take_bytes(&mut self, bytes: &[u8]) -> Bytes {
        self.held.extend_from_slice(bytes);
        let ready = match self.held.len() {
            held if held > HELD_BYTES_MAX => held,
            _ if self.is_stream => {
                self.held.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)
            }
            _ => 0,
        };
        if ready == 0 {
            return Bytes::new();
        }
        let rest = self.held.split_off(ready);
        let ready = std::mem::replace(&mut self.held, rest);
        self.rewrite(ready)
    }

    /// Returns the rest of the answer, which has ended.
    pub(crate) fn finish(&mut self) -> Bytes {
        let rest = std::mem::take(&mut self.held);
        self.rewrite(rest)
    }

    fn rewrite(&mut self, bytes: Vec<u8>) -> Bytes {
        if !self.is_stream {
            return add_token_lists(&bytes, &mut self.offsets).unwrap_or(bytes).into();
        }
        let mut written = Vec::with_capacity(bytes.len());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let event = line.strip_prefix(b"data: ");
            match event.and_then(|event| add_token_lists(event, &mut self.offsets)) {
                Some(event) => {
                    written.extend_from_slice(b"data: ");
                    written.extend(event);
                    written.push(b'\n');
                }
                None => written.extend_from_slice(line),
            }
        }
        written.into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A streamed answer of llama-server b11669 to `logprobs: 1`.
    const STREAM: &str = r#"data: {"choices":[{"text":"2","index":0,"logprobs":{"content":[{"id":17,"token":"2","bytes":[50],"logprob":-1.6142123937606812,"top_logprobs":[{"id":17,"token":"2","bytes":[50],"logprob":-1.6142123937606812}]}]},"finish_reason":null}],"created":1795990723,"model":"flotilla-channel","system_fingerprint":"b11669-Debian","object":"text_completion","id":"chatcmpl-dN9coTSFTA41WDP7ddKGFH4B8AAncm8X"}

data: {"choices":[{"text":"2","index":0,"logprobs":{"content":[{"id":17,"token":"2","bytes":[50],"logprob":-1.7901644706726074,"top_logprobs":[{"id":17,"token":"2","bytes":[50],"logprob":-1.7901644706726074}]}]},"finish_reason":null}],"created":1795990723,"model":"flotilla-channel","system_fingerprint":"b11669-Debian","object":"text_completion","id":"chatcmpl-dN9coTSFTA41WDP7ddKGFH4B8AAncm8X"}

data: {"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"created":1795990723,"model":"flotilla-channel","system_fingerprint":"b11669-Debian","object":"text_completion","usage":{"completion_tokens":2,"prompt_tokens":4,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":3}},"id":"chatcmpl-dN9coTSFTA41WDP7ddKGFH4B8AAncm8X"}

data: [DONE]

"#;

    /// Passes an answer in pieces of a size.
    fn pass(is_stream: bool, answer: &str, size: usize) -> String {
        let mut rewriter = LogprobsRewriter::new(is_stream);
        let mut passed = Vec::new();
        for piece in answer.as_bytes().chunks(size) {
            passed.extend(rewriter.take_bytes(piece));
        }
        passed.extend(rewriter.finish());
        String::from_utf8(passed).unwrap()
    }

    #[test]
    fn each_event_of_a_stream_has_the_lists_however_it_arrives() {
        let passed = pass(true, STREAM, 1);
        for size in [7, 400, 10_000] {
            assert_eq!(pass(true, STREAM, size), passed, "in pieces of {size}");
        }
        let events: Vec<&str> =
            passed.split_terminator("\n\n").map(|it| it.strip_prefix("data: ").unwrap()).collect();
        let [first, second, end, "[DONE]"] = events[..] else { panic!("{passed}") };
        let logprobs = [first, second, end].map(|event| {
            let event: Value = serde_json::from_str(event).unwrap();
            assert_eq!(event["model"], "flotilla-channel");
            event["choices"][0]["logprobs"].clone()
        });
        for (index, logprob) in [-1.6142123937606812, -1.7901644706726074].into_iter().enumerate() {
            let found = &logprobs[index];
            assert_eq!(found["tokens"], json!(["2"]));
            assert_eq!(found["token_logprobs"], json!([logprob]));
            assert_eq!(found["top_logprobs"], json!([{ "2": logprob }]));
            assert_eq!(found["text_offset"], json!([index]));
            assert_eq!(found["content"][0]["id"], 17);
        }
        assert!(logprobs[2].is_null());
    }

    #[test]
    fn a_whole_answer_is_passed_on_at_its_end() {
        let event = STREAM.lines().next().unwrap().strip_prefix("data: ").unwrap();
        let mut rewriter = LogprobsRewriter::new(false);
        assert!(rewriter.take_bytes(event.as_bytes()).is_empty());
        let found: Value = serde_json::from_slice(&rewriter.finish()).unwrap();
        assert_eq!(found["choices"][0]["logprobs"]["tokens"], json!(["2"]));
        let other = r#"{"choices":[{"text":"2","index":0,"logprobs":null}]}"#;
        assert_eq!(pass(false, other, 5), other);
    }
}
