//! `flotilla data generate` with an endpoint that answers as a script says.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use e2e::{Output, program_path, run_flotilla, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A status and a body, or silence until the client leaves.
pub(super) enum ScriptedReply {
    Status(u16, Value),
    Silence,
}

type ReplyScript = dyn Fn(usize, &Value) -> ScriptedReply + Send + Sync;

/// An OpenAI-compatible server. The script gets the number of the request, from 0, and its body.
pub(super) struct ScriptedEndpoint {
    pub(super) url: String,
    /// Bodies of all requests, and whether they were answered.
    requests: Arc<Mutex<Vec<(Value, bool)>>>,
}

impl ScriptedEndpoint {
    pub(super) fn start(
        script: impl Fn(usize, &Value) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let requests: Arc<Mutex<Vec<(Value, bool)>>> = Arc::default();
        let (all, script): (_, Arc<ReplyScript>) = (Arc::clone(&requests), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (all, script) = (Arc::clone(&all), Arc::clone(&script));
                std::thread::spawn(move || serve_connection(stream, &all, &*script));
            }
        });
        Self { url, requests }
    }

    pub(super) fn bodies(&self, is_answered: bool) -> Vec<Value> {
        let requests = self.requests.lock().expect("no thread panicked");
        requests.iter().filter(|it| it.1 == is_answered).map(|it| it.0.clone()).collect()
    }
}

/// Answers the requests of a connection until it ends.
fn serve_connection(stream: TcpStream, all: &Mutex<Vec<(Value, bool)>>, script: &ReplyScript) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut writer = stream;
    while let Some((head, body)) = read_request(&mut reader) {
        assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1"), "{head}");
        let number = {
            let mut all = all.lock().expect("no thread panicked");
            all.push((body.clone(), false));
            all.len() - 1
        };
        let ScriptedReply::Status(status, reply) = script(number, &body) else {
            let _ = reader.read(&mut [0]);
            return;
        };
        let text = reply.to_string();
        all.lock().expect("no thread panicked")[number].1 = true;
        let length = text.len();
        let head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {length}\r\n\r\n");
        if writer.write_all((head + &text).as_bytes()).is_err() {
            return;
        }
    }
}

fn read_request(reader: &mut impl BufRead) -> Option<(String, Value)> {
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, serde_json::from_slice(&body).expect("JSON")))
}

pub(super) fn chat_reply(text: &str, finish: &str) -> ScriptedReply {
    let message = json!({ "role": "assistant", "content": text });
    let choice = json!({ "index": 0, "message": message, "finish_reason": finish });
    let usage = json!({ "prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10 });
    ScriptedReply::Status(200, json!({ "choices": [choice], "usage": usage }))
}

pub(super) fn last_message(body: &Value) -> &str {
    let messages = body["messages"].as_array().expect("messages");
    messages.last().expect("one message")["content"].as_str().expect("a text")
}

/// Returns the number of prompts that a request asks for; `None` if it asks for an answer.
fn wanted_prompts(body: &Value) -> Option<usize> {
    let rest = last_message(body).strip_prefix("Write ")?;
    rest.split_once(" different prompts")?.0.parse().ok()
}

/// A prompt that is similar to no other.
fn unusual_prompt(number: u64) -> String {
    let mut random = e2e::Random::new(number);
    let mut word = || (0..7).map(|_| char::from(b'a' + (random.next_u64() % 26) as u8)).collect();
    let words: Vec<String> = (0..6).map(|_| word()).collect();
    format!("What is {}?", words.join(" "))
}

/// Answers a request for prompts with new ones, and others with `text`.
fn good_reply(number: usize, body: &Value, text: &str) -> ScriptedReply {
    let Some(wanted) = wanted_prompts(body) else { return chat_reply(text, "stop") };
    let prompts = (0..wanted).map(|place| unusual_prompt((number * 1000 + place) as u64));
    chat_reply(&json!(prompts.collect::<Vec<String>>()).to_string(), "stop")
}

/// A spec in a directory of its own, and the output directory beside it.
struct GenerationFiles {
    directory: TempDir,
}

impl GenerationFiles {
    fn new(spec: &str) -> Self {
        let files = Self { directory: tempfile::tempdir().expect("a directory") };
        files.write_spec(spec);
        files
    }

    fn write_spec(&self, spec: &str) {
        fs::write(self.directory.path().join("spec.yaml"), spec).expect("a file");
    }

    fn out(&self, name: &str) -> PathBuf {
        self.directory.path().join("out").join(name)
    }

    fn arguments(&self, url: &str) -> Vec<String> {
        let (spec, out) = (self.directory.path().join("spec.yaml"), self.out(""));
        let (spec, out) = (spec.display().to_string(), out.display().to_string());
        let words = ["data", "generate", &spec, "--out", &out, "--endpoint", url, "--model", "m"];
        words.map(str::to_owned).to_vec()
    }

    fn generate(&self, endpoint: &ScriptedEndpoint) -> Output {
        let arguments = self.arguments(&endpoint.url);
        run_flotilla(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), [])
    }

    fn read_lines(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.out(name)).expect(name);
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    fn read_report(&self) -> Value {
        serde_json::from_slice(&fs::read(self.out("report.json")).expect("a report")).expect("JSON")
    }
}

const SMALL: &str = "
count: 12
prompts: { per_request: 4 }
limits: { concurrency: 3, backoff_s: 0.01 }
categories:
  - { name: a, seeds: [{ prompt: an example }] }
  - { name: b }
";

#[test]
fn the_example_makes_1500_samples_in_24_categories() {
    let text = r##"{"service": "x y z", "severity": "low", "action": "#!/bin/true"}"##;
    let endpoint = ScriptedEndpoint::start(move |number, body| good_reply(number, body, text));
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let spec = fs::read_to_string(example.join("homelab-assistant.yaml")).expect("the example");
    let files = GenerationFiles::new(&spec);
    let output = files.generate(&endpoint);
    output.assert_success();
    assert!(output.stdout.contains("alerts-to-json"), "{}", output.stdout);
    let (train, heldout) = (files.read_lines("train.jsonl"), files.read_lines("heldout.jsonl"));
    assert_eq!(train.len() + heldout.len(), 1500);
    let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for (side, lines) in [&train, &heldout].into_iter().enumerate() {
        for line in lines {
            counts.entry(line["category"].as_str().expect("a text")).or_default()[side] += 1;
        }
    }
    assert_eq!(counts.len(), 24);
    for (category, [train, heldout]) in counts {
        let share = heldout as f64 / (train + heldout) as f64;
        assert!((0.09..0.11).contains(&share), "{category}: {heldout} of {}", train + heldout);
    }
    let all = train.iter().chain(&heldout);
    let ids: BTreeSet<&str> = all.map(|line| line["id"].as_str().expect("a text")).collect();
    assert_eq!(ids.len(), 1500);
    let train_file = files.out("train.jsonl").display().to_string();
    let stats = run_flotilla(&["data", "stats", &train_file], []);
    let expected = format!("{} examples", train.len());
    assert!(stats.stdout.contains(&expected), "{}", stats.stdout);
    let report = files.read_report();
    assert_eq!((&report["model"], &report["stopped"]), (&json!("m"), &Value::Null));
    let requests = report["requests"].as_u64().expect("a number");
    assert_eq!(requests as usize, endpoint.bodies(true).len());
    assert_eq!(report["tokens"], 10 * requests);
    let table = fs::read_to_string(files.out("report.txt")).expect("a report");
    assert!(table.contains("duplicate") && table.lines().count() > 25, "{table}");

    files.generate(&endpoint).assert_success();
    assert_eq!(endpoint.bodies(true).len() as u64, requests, "nothing is missing");
    assert_eq!(files.read_lines("train.jsonl"), train);
}

#[test]
fn errors_are_retried_and_what_cannot_be_used_is_counted_and_replaced() {
    let endpoint = ScriptedEndpoint::start(|number, body| match number {
        0 => ScriptedReply::Status(429, json!({ "error": { "message": "slow down" } })),
        1 | 2 => ScriptedReply::Status(500, json!("oops")),
        _ => match (wanted_prompts(body), number % 7) {
            (Some(_), 3) => chat_reply("I would rather talk about the weather.", "stop"),
            (Some(_), 4) => chat_reply("```\n1. An  Example\n2. an example.\n```", "length"),
            (None, 1) => chat_reply("I'm sorry, but no.", "stop"),
            (None, 2) => chat_reply("It begins with", "length"),
            (None, 5) => chat_reply("<think>hm", "stop"),
            (None, 6) => ScriptedReply::Status(200, json!({ "choices": 3 })),
            (None, 0) => ScriptedReply::Status(400, json!({ "error": "too long" })),
            _ => good_reply(number, body, "Fine."),
        },
    });
    let files = GenerationFiles::new(&SMALL.replace("backoff_s", "attempts: 100, backoff_s"));
    files.generate(&endpoint).assert_success();
    let lines = [files.read_lines("train.jsonl"), files.read_lines("heldout.jsonl")].concat();
    assert_eq!(lines.len(), 12);
    assert!(lines.iter().all(|line| line["completion"] == "Fine." && line["answer"] == "Fine."));
    let report = files.read_report();
    let sum = |name: &str| -> u64 {
        let categories = report["categories"].as_array().expect("a list");
        categories.iter().map(|it| it[name].as_u64().expect("a number")).sum()
    };
    assert!(sum("unusable") > 3, "{report:#}");
    assert_eq!(sum("written"), sum("duplicates") + sum("unusable") + sum("kept"), "{report:#}");
    let requests = report["requests"].as_u64().expect("a number") as usize;
    assert_eq!(requests + 3, endpoint.bodies(true).len(), "three were made again");
}

#[test]
fn a_killed_command_continues_and_asks_for_nothing_that_it_has() {
    const ANSWERED: usize = 9;
    let is_silent = Arc::new(Mutex::new(true));
    let silent = Arc::clone(&is_silent);
    let endpoint = ScriptedEndpoint::start(move |number, body| {
        if number >= ANSWERED && *silent.lock().expect("no thread panicked") {
            return ScriptedReply::Silence;
        }
        good_reply(number, body, "Fine.")
    });
    let files = GenerationFiles::new(SMALL);
    let mut child = Command::new(program_path())
        .args(files.arguments(&endpoint.url))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("flotilla starts");
    wait_until("all answers are kept", LIMIT, || {
        let text = fs::read_to_string(files.out("progress.jsonl")).ok()?;
        // The first line is the plan.
        (text.lines().count() == 1 + ANSWERED).then_some(())
    });
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    // A line that a crash of the machine cut off.
    let mut progress = fs::OpenOptions::new().append(true).open(files.out("progress.jsonl"));
    progress.as_mut().expect("the log").write_all(b"{\"answer\":{\"cat").expect("written");
    let answered = endpoint.bodies(true);
    assert_eq!(answered.len(), ANSWERED);

    *is_silent.lock().expect("no thread panicked") = false;
    files.generate(&endpoint).assert_success();
    let lines = [files.read_lines("train.jsonl"), files.read_lines("heldout.jsonl")].concat();
    assert_eq!(lines.len(), 12);
    let all = endpoint.bodies(true);
    let once: BTreeSet<String> = all.iter().map(Value::to_string).collect();
    assert_eq!(once.len(), all.len(), "no request was answered twice");
    assert_eq!(files.read_report()["requests"], all.len());
}

#[test]
fn a_directory_has_samples_of_one_plan() {
    let endpoint = ScriptedEndpoint::start(|number, body| good_reply(number, body, "Fine."));
    let files = GenerationFiles::new(SMALL);
    files.generate(&endpoint).assert_success();
    let asked = endpoint.bodies(true).len();
    for (from, to, changed) in [
        ("an example", "another", "changed category a;"),
        ("count: 12", "count: 12\nseed: 2", "changed seed;"),
        (
            "count: 12",
            "count: 12\nverify: { regex: { pattern: x } }",
            "changed verify of category a",
        ),
    ] {
        files.write_spec(&SMALL.replace(from, to));
        files.generate(&endpoint).assert_refused(&["D120", changed, "another --out"]);
    }
    assert_eq!(endpoint.bodies(true).len(), asked);
    files.write_spec(&SMALL.replace("count: 12", "count: 20\nheldout: { share: 0 }"));
    files.generate(&endpoint).assert_success();
    assert_eq!(files.read_lines("train.jsonl").len(), 20, "more samples of the same plan");
    assert!(endpoint.bodies(true).len() < 2 * asked);
}

#[test]
fn every_limit_ends_a_command_with_what_it_has() {
    let generate = |limit: &str, script: fn(usize, &Value) -> ScriptedReply| {
        let endpoint = ScriptedEndpoint::start(script);
        let spec = SMALL.replace("concurrency: 3", &format!("concurrency: 3, {limit}"));
        let files = GenerationFiles::new(&spec);
        let output = files.generate(&endpoint);
        (output, endpoint.bodies(true).len(), files)
    };
    let good: fn(usize, &Value) -> ScriptedReply = |number, body| good_reply(number, body, "Fine.");
    let (output, requests, files) = generate("requests: 7", good);
    output.assert_refused(&["D121", "limits.requests (7) is reached"]);
    assert_eq!(requests, 7);
    assert!(!files.read_lines("train.jsonl").is_empty(), "what it has is written");
    let (output, requests, _) = generate("tokens: 45", good);
    output.assert_refused(&["D121", "limits.tokens (45) is reached"]);
    assert!((5..=7).contains(&requests), "{requests}: three are open at a time");
    let (output, _, _) = generate("attempts: 2", |_, body| match wanted_prompts(body) {
        Some(_) => chat_reply("[\"AN EXAMPLE\"]", "stop"),
        None => chat_reply("Fine.", "stop"),
    });
    output.assert_refused(&["D121", "limits.attempts (2) is reached in a, b"]);
    let (output, _, _) = generate("time_s: 0.5", |_, _| ScriptedReply::Silence);
    output.assert_refused(&["D121", "0 of 12 samples", "limits.time_s (0.5) is reached"]);
    let (output, requests, _) =
        generate("retries: 2", |_, _| ScriptedReply::Status(503, json!({ "message": "no agent" })));
    output.assert_refused(&["E109", "attempt 3", "503: no agent"]);
    assert!(requests >= 3, "{requests}");
    let (output, _, _) =
        generate("request_timeout_s: 0.2, retries: 1", |_, _| ScriptedReply::Silence);
    output.assert_refused(&["E109", "attempt 2", "does not answer"]);
    let (output, requests, _) = generate("retries: 2", |_, _| {
        ScriptedReply::Status(401, json!({ "error": { "message": "no such key" } }))
    });
    output.assert_refused(&["E109", "401: no such key"]);
    assert!(requests <= 3, "{requests}: it is not repeated");
    let (output, requests, _) = generate("attempts: 1000", |_, _| {
        ScriptedReply::Status(400, json!({ "error": { "message": "unknown field seed" } }))
    });
    output.assert_refused(&["E109", "refuses each request", "unknown field seed"]);
    assert!(requests <= 10, "{requests}");
}

#[test]
fn samples_that_a_verifier_fails_are_dropped_and_replaced() {
    let endpoint = ScriptedEndpoint::start(|number, body| {
        // Requests of two categories may alternate: not a number that divides their period.
        let text = if number % 5 < 3 { "#### 4" } else { "four" };
        good_reply(number, body, text)
    });
    let verify =
        "verify: { regex: { pattern: '####' } }\nanswers: { extract: '(?:#### )?(\\w+)$' }";
    let spec = SMALL.replace("backoff_s", "attempts: 100, backoff_s");
    let files = GenerationFiles::new(&format!("{spec}{verify}"));
    files.generate(&endpoint).assert_success();
    let lines = [files.read_lines("train.jsonl"), files.read_lines("heldout.jsonl")].concat();
    assert_eq!(lines.len(), 12);
    assert!(lines.iter().all(|line| line["completion"] == "#### 4" && line["answer"] == "4"));
    let failed: u64 = files.read_report()["categories"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["failed"].as_u64().expect("a number"))
        .sum();
    assert!(failed > 0);
}

#[test]
fn mistakes_in_the_file_and_the_options_are_refused_before_a_request() {
    let endpoint = ScriptedEndpoint::start(|number, body| good_reply(number, body, "Fine."));
    let files = GenerationFiles::new(&SMALL.replace("seeds:", "seed:"));
    files.generate(&endpoint).assert_refused(&["spec.yaml", "did you mean seeds?", "R102"]);
    files.write_spec(&format!("{SMALL}verify: {{ numeric: {{}} }}\n"));
    files.generate(&endpoint).assert_refused(&["verify", "answer", "R103"]);
    files.write_spec(SMALL);
    let spec = files.directory.path().join("spec.yaml").display().to_string();
    let out = files.out("").display().to_string();
    let generate = |more: &[&str]| {
        let arguments = ["data", "generate", &spec, "--out", &out, "--model", "m"];
        run_flotilla(&[&arguments[..], more].concat(), [])
    };
    generate(&[]).assert_refused(&["--endpoint", "A103"]);
    generate(&["--endpoint", "localhost:1"]).assert_refused(&["--endpoint", "A101"]);
    assert!(endpoint.bodies(true).is_empty() && !files.out("").exists());
}
