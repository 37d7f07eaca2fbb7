//! Hostile requests to the gateway. The test speaks HTTP/2 itself, because client libraries cannot
//! send such requests.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod wire;

use std::{net::SocketAddr, time::Duration};

use e2e::{Fleet, SpecFiles, wait_until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use wire::{Client, call, number_field, text_field};

/// More than the 30 s that the gateway waits for the next request of an idle HTTP/1.1 connection.
const CLOSE_LIMIT: Duration = Duration::from_secs(45);

/// The limit of additional memory in the gateway process, for any requests.
const GROWTH_BYTES_MAX: u64 = 512 << 20;

const OK: u32 = 0;
const INVALID_ARGUMENT: u32 = 3;
const NOT_FOUND: u32 = 5;
const RESOURCE_EXHAUSTED: u32 = 8;
const OUT_OF_RANGE: u32 = 11;
const UNIMPLEMENTED: u32 = 12;
const INTERNAL: u32 = 13;

const RUN: &str = "
base: { init: { config: config.json, tokenizer: tokenizer.json } }
";

#[test]
fn hostile_calls_are_refused_by_name_and_the_fleet_still_works() {
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(4, 0));
    fleet.await_success(&run, Duration::from_secs(120));
    let address: SocketAddr = fleet.read_fleet_file()["gateway"].as_str().unwrap().parse().unwrap();
    let memory = Memory::measure(&fleet);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        send_bad_names(address).await;
        send_bad_numbers(address, &run).await;
        send_bad_specs(address).await;
        send_bad_sizes(address).await;
        send_garbage(address).await;
        open_silent_calls(address).await;
    });
    memory.assert_bounded();
    let listed = fleet.run_json(&["run", "list"]).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1, "something was started: {listed:#}");
    let run = fleet.submit(&files.write_sft_spec(4, 0));
    fleet.await_success(&run, Duration::from_secs(120));
    fleet.assert_clean_audit(&run);
}

/// Calls every method that takes a name with invalid names.
async fn send_bad_names(address: SocketAddr) {
    let mut client = Client::connect(address).await;
    let long = "x".repeat(60_000);
    let names = ["", ".", "..", "a.b", "*", ">", "a/b", "../x", "a b", "\0", "\n", "é", "A", &long];
    let methods = [
        ("Runs/Get", "run"),
        ("Runs/Pause", "run"),
        ("Runs/Resume", "run"),
        ("Runs/Cancel", "run"),
        ("Runs/Fork", "run"),
        ("Runs/Watch", "run"),
        ("Checkpoints/List", "run"),
        ("Checkpoints/Get", "checkpoint"),
        ("Fleet/Drain", "agent"),
    ];
    for (method, field) in methods {
        for name in names {
            let answer = client.call(method, &text_field(1, name)).await;
            answer.assert_refused(&[INVALID_ARGUMENT], &[field]);
        }
        // Neither UTF-8 nor a valid protobuf message. The error says what cannot be decoded.
        let answer = client.call(method, b"\x0a\x02\xff\xfe").await;
        answer.assert_refused(&[INVALID_ARGUMENT, INTERNAL], &["UTF-8"]);
        for garbage in [&b"\xff"[..], b"\x0a\xff\xff\xff\xff\x0f", &b"\x0b".repeat(60_000)] {
            client
                .call(method, garbage)
                .await
                .assert_refused(&[INVALID_ARGUMENT, INTERNAL], &["decode"]);
        }
    }
    for name in &names[1..] {
        for (number, field) in [(1, "run"), (2, "suite")] {
            let filter = text_field(number, name);
            let answer = client.call("Evals/History", &filter).await;
            answer.assert_refused(&[INVALID_ARGUMENT], &[field, "must be"]);
            let answer = client.call("Evals/Watch", &text_field(1, filter)).await;
            answer.assert_refused(&[INVALID_ARGUMENT], &[field, "must be"]);
        }
    }
    for path in ["", "/etc/passwd", "../x", "a\0b", &long] {
        let request = [text_field(1, text_field(1, "base-1")), text_field(2, path)].concat();
        client
            .call("Checkpoints/Download", &request)
            .await
            .assert_refused(&[INVALID_ARGUMENT], &["path"]);
    }
    client
        .call("Checkpoints/Download", &[])
        .await
        .assert_refused(&[INVALID_ARGUMENT], &["checkpoint"]);
    client.call("Runs/Forget", &[]).await.assert_refused(&[UNIMPLEMENTED], &[]);
    client.call("Runs/List", &number_field(7, u64::MAX)).await.assert_code(OK);
    client.call("Fleet/Agents", &text_field(9, &long)).await.assert_code(OK);
}

/// Sends impossible positions and numbers.
async fn send_bad_numbers(address: SocketAddr, run: &str) {
    let mut client = Client::connect(address).await;
    let after = [text_field(1, run), number_field(2, u64::MAX)].concat();
    // The run has ended, so no fact follows.
    client.call("Runs/Watch", &after).await.assert_code(OK);
    client
        .call("Evals/Watch", &number_field(2, u64::MAX))
        .await
        .assert_refused(&[OUT_OF_RANGE], &["log"]);
    for numbers in [[u64::MAX, u64::MAX], [u64::from(u32::MAX), 0], [0, u64::from(u32::MAX)]] {
        let [cycle, step] = numbers.map(|value| value);
        let request = [text_field(1, run), number_field(2, cycle), number_field(3, step)].concat();
        client.call("Checkpoints/Get", &request).await.assert_refused(&[NOT_FOUND], &[run]);
    }
}

/// Submits run specs with invalid numbers, and with too much of everything.
async fn send_bad_specs(address: SocketAddr) {
    let mut client = Client::connect(address).await;
    let sft = |field: &str, value: &str| {
        format!("{RUN}sft: {{ data: data.jsonl, training: {{ {field}: {value} }} }}\n")
    };
    let reals = ["learning_rate", "warmup_ratio", "weight_decay", "beta1", "max_grad_norm"];
    for field in reals {
        for value in [".nan", ".inf", "-.inf", "1e308", "-1"] {
            let answer = client.submit(&sft(field, value)).await;
            answer.assert_refused(&[INVALID_ARGUMENT], &[field]);
        }
    }
    for field in ["epochs", "max_steps", "batch_size", "max_tokens"] {
        for value in ["-1", "4294967295", "4294967296", "1e308", ".nan"] {
            client.submit(&sft(field, value)).await.assert_refused(&[INVALID_ARGUMENT], &[field]);
        }
    }
    let suites = |count: usize| {
        let suites = (0..count).map(|n| format!("- {{ name: s{n}, text: t }}\n"));
        format!("{RUN}sft: {{ data: d }}\nevals:\n{}", suites.collect::<String>())
    };
    client.submit(&suites(10_000)).await.assert_refused(&[INVALID_ARGUMENT], &["evals"]);
    let many: String = (0..100_000).map(|n| format!("k{n}: {n}\n")).collect();
    client.submit(&many).await.assert_refused(&[INVALID_ARGUMENT], &["spec"]);
    let raft = |pattern: &str| {
        let verifier = format!("verifier: {{ regex: {{ pattern: '{pattern}' }} }}");
        format!("base: {{ checkpoint: base-1 }}\nraft: {{ prompts: p, {verifier} }}\n")
    };
    for pattern in ["(", &"a".repeat(500_000), "((x{900}){900}){900}", &"(".repeat(5000)] {
        client.submit(&raft(pattern)).await.assert_refused(&[INVALID_ARGUMENT], &["raft.verifier"]);
    }
    let nested = format!("name: {}", "[".repeat(100_000));
    client.submit(&nested).await.assert_refused(&[INVALID_ARGUMENT], &["name: must be one value"]);
    for name in ["a.b", "*", ">", "../x", &"x".repeat(49), "\"\\0\""] {
        let spec = format!("name: {name}\n{}", sft("epochs", "1"));
        client.submit(&spec).await.assert_refused(&[INVALID_ARGUMENT], &[]);
    }
    client.submit("").await.assert_refused(&[INVALID_ARGUMENT], &["spec_yaml"]);
    // An attached file is found by its name, not by its path.
    let elsewhere = sft("epochs", "1").replace("data.jsonl", "/etc/passwd");
    client
        .submit(&elsewhere)
        .await
        .assert_refused(&[INVALID_ARGUMENT], &["/etc/passwd", "there is no file"]);
}

/// Sends messages of many megabytes, and wrong lengths.
async fn send_bad_sizes(address: SocketAddr) {
    let too_much = [RESOURCE_EXHAUSTED, OUT_OF_RANGE];
    let mut client = Client::connect(address).await;
    let large = "x".repeat(40 << 20);
    client.submit(&large).await.assert_refused(&[INVALID_ARGUMENT], &["spec", "bytes"]);
    client.call("Runs/Get", &text_field(1, &large)).await.assert_refused(&too_much, &["limit"]);
    client
        .call("Evals/History", &text_field(1, &large[..1 << 20]))
        .await
        .assert_refused(&too_much, &["limit"]);
    let attached = text_field(2, [text_field(1, "data.jsonl"), text_field(2, &large)].concat());
    let spec = text_field(1, format!("{RUN}sft: {{ data: data.jsonl }}\n"));
    let answer = client.call("Runs/Submit", &[spec, attached].concat()).await;
    answer.assert_refused(&[INVALID_ARGUMENT], &["data.jsonl", "line 1"]);
    drop(large);
    // Announces 4 GiB and sends nothing.
    for method in ["Runs/Submit", "Runs/Get", "Evals/Watch", "Fleet/Drain"] {
        let answer = client.call_raw(method, b"\0\xff\xff\xff\xff").await;
        answer.assert_refused(&too_much, &["limit"]);
    }
    // Marked as compressed, without a compression algorithm.
    client
        .call_raw("Runs/Get", b"\x01\0\0\0\x01x")
        .await
        .assert_refused(&[INTERNAL, UNIMPLEMENTED], &[]);
}

/// Sends data that is not HTTP/2. The gateway closes these connections.
async fn send_garbage(address: SocketAddr) {
    let noise: Vec<u8> =
        (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let huge_frame = [&preface[..], b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"].concat();
    let window = [&preface[..], b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff"].concat();
    let starts: [&[u8]; 6] = [
        &noise,
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &huge_frame,
        &window,
        &preface[..10],
    ];
    for start in starts {
        let mut socket = TcpStream::connect(address).await.unwrap();
        // The gateway may close it during the write.
        let _ = socket.write_all(start).await;
        let ended = timeout(CLOSE_LIMIT, async {
            let mut buffer = [0; 4096];
            while socket.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        });
        assert!(ended.await.is_ok(), "still open after {:?}", &start[..start.len().min(24)]);
    }
    Client::connect(address).await.call("Fleet/Agents", &[]).await.assert_code(OK);
}

/// Opens calls that never send their message, and connections that send nothing.
async fn open_silent_calls(address: SocketAddr) {
    let mut open_calls = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(address).await;
        for _ in 0..150 {
            // Announces the largest allowed submission and sends one byte of it.
            open_calls.push(client.begin_call("Runs/Submit", b"\0\x04\0\0\0x").await);
        }
        open_calls.push(client.begin_call("Evals/Watch", b"\0").await);
    }
    call(address, "Fleet/Agents", &[]).await.assert_code(OK);
    call(address, "Runs/List", &[]).await.assert_code(OK);
    let silent = (0..600).map(|_| TcpStream::connect(address));
    let silent: Vec<_> = futures::future::join_all(silent).await;
    // The gateway closes silent connections, and then accepts new ones.
    call(address, "Fleet/Agents", &[]).await.assert_code(OK);
    drop((open_calls, silent));
}

/// Memory use of the process that serves the gateway.
struct Memory {
    process: i32,
    before: u64,
}

impl Memory {
    fn measure(fleet: &Fleet) -> Self {
        let process = fleet.pid("coordinator").as_raw_nonzero().get();
        Self { process, before: resident(process, "VmRSS:") }
    }

    fn assert_bounded(&self) {
        let peak = resident(self.process, "VmHWM:");
        println!("resident: {} MiB before, at most {} MiB", self.before >> 20, peak >> 20);
        let grown = peak.saturating_sub(self.before);
        assert!(grown < GROWTH_BYTES_MAX, "{} MiB were taken", grown >> 20);
        wait_until("what was taken is given back", CLOSE_LIMIT, || {
            (resident(self.process, "VmRSS:") < self.before + GROWTH_BYTES_MAX / 4).then_some(())
        });
    }
}

fn resident(process: i32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("kilobytes") * 1024
}
