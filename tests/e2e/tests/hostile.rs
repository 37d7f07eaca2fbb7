//! The gateway under calls nobody should make. It speaks HTTP/2 itself, so that it can say
//! what no client library would.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

#[path = "hostile/wire.rs"]
mod wire;

use std::{net::SocketAddr, time::Duration};

use e2e::{Files, Fleet, until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::wire::{Client, call, number, text};

/// For one answer, on a machine busy with builds.
/// More than the 30 s that the gateway waits for the next request of an idle HTTP/1.1 connection.
const PATIENCE: Duration = Duration::from_secs(45);

/// What the gateway's process may hold beyond what it held before, whatever it is sent.
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
fn absurd_calls_are_refused_by_name_and_the_fleet_works_on() {
    let fleet = Fleet::open("trainer,evaluator");
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(4, 0));
    fleet.finish(&run, Duration::from_secs(120));
    let address: SocketAddr = fleet.file()["gateway"].as_str().unwrap().parse().unwrap();
    let memory = Memory::of(&fleet);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        names(address).await;
        numbers(address, &run).await;
        specs(address).await;
        sizes(address).await;
        garbage(address).await;
        half_open(address).await;
    });
    memory.check();
    let listed = fleet.json(&["run", "list"]).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1, "something was started: {listed:#}");
    let run = fleet.submit(&files.sft(4, 0));
    fleet.finish(&run, Duration::from_secs(120));
    fleet.audit_clean(&run);
}

/// Every call that names something, with names that are none.
async fn names(address: SocketAddr) {
    let mut client = Client::connect(address).await;
    let long = "x".repeat(60_000);
    let names = ["", ".", "..", "a.b", "*", ">", "a/b", "../x", "a b", "\0", "\n", "é", "A", &long];
    let methods = [
        ("Runs/Get", "run"),
        ("Runs/Pause", "run"),
        ("Runs/Resume", "run"),
        ("Runs/Cancel", "run"),
        ("Runs/Watch", "run"),
        ("Checkpoints/List", "run"),
        ("Checkpoints/Get", "checkpoint"),
        ("Fleet/Drain", "agent"),
    ];
    for (method, field) in methods {
        for name in names {
            let answer = client.call(method, &text(1, name)).await;
            answer.refused(&[INVALID_ARGUMENT], &[field]);
        }
        // Not UTF-8, and not protobuf either: the answer names what cannot be read.
        let answer = client.call(method, b"\x0a\x02\xff\xfe").await;
        answer.refused(&[INVALID_ARGUMENT, INTERNAL], &["UTF-8"]);
        for garbage in [&b"\xff"[..], b"\x0a\xff\xff\xff\xff\x0f", &b"\x0b".repeat(60_000)] {
            client.call(method, garbage).await.refused(&[INVALID_ARGUMENT, INTERNAL], &["decode"]);
        }
    }
    for name in &names[1..] {
        for (number, field) in [(1, "run"), (2, "suite")] {
            let filter = text(number, name);
            let answer = client.call("Evals/History", &filter).await;
            answer.refused(&[INVALID_ARGUMENT], &[field, "must be"]);
            let answer = client.call("Evals/Watch", &text(1, filter)).await;
            answer.refused(&[INVALID_ARGUMENT], &[field, "must be"]);
        }
    }
    for path in ["", "/etc/passwd", "../x", "a\0b", &long] {
        let request = [text(1, text(1, "base-1")), text(2, path)].concat();
        client.call("Checkpoints/Download", &request).await.refused(&[INVALID_ARGUMENT], &["path"]);
    }
    client.call("Checkpoints/Download", &[]).await.refused(&[INVALID_ARGUMENT], &["checkpoint"]);
    client.call("Runs/Forget", &[]).await.refused(&[UNIMPLEMENTED], &[]);
    client.call("Runs/List", &number(7, u64::MAX)).await.is(OK);
    client.call("Fleet/Agents", &text(9, &long)).await.is(OK);
}

/// Positions and numbers that cannot be.
async fn numbers(address: SocketAddr, run: &str) {
    let mut client = Client::connect(address).await;
    let after = [text(1, run), number(2, u64::MAX)].concat();
    // It has ended, and nothing comes after its end.
    client.call("Runs/Watch", &after).await.is(OK);
    client.call("Evals/Watch", &number(2, u64::MAX)).await.refused(&[OUT_OF_RANGE], &["log"]);
    for numbers in [[u64::MAX, u64::MAX], [u64::from(u32::MAX), 0], [0, u64::from(u32::MAX)]] {
        let [cycle, step] = numbers.map(|value| value);
        let request = [text(1, run), number(2, cycle), number(3, step)].concat();
        client.call("Checkpoints/Get", &request).await.refused(&[NOT_FOUND], &[run]);
    }
}

/// Run specs with numbers that mean nothing, and too much of everything.
async fn specs(address: SocketAddr) {
    let mut client = Client::connect(address).await;
    let sft = |field: &str, value: &str| {
        format!("{RUN}sft: {{ data: data.jsonl, training: {{ {field}: {value} }} }}\n")
    };
    let reals = ["learning_rate", "warmup_ratio", "weight_decay", "beta1", "max_grad_norm"];
    for field in reals {
        for value in [".nan", ".inf", "-.inf", "1e308", "-1"] {
            let answer = client.submit(&sft(field, value)).await;
            answer.refused(&[INVALID_ARGUMENT], &[field]);
        }
    }
    for field in ["epochs", "max_steps", "batch_size", "max_tokens"] {
        for value in ["-1", "4294967295", "4294967296", "1e308", ".nan"] {
            client.submit(&sft(field, value)).await.refused(&[INVALID_ARGUMENT], &[field]);
        }
    }
    let suites = |count: usize| {
        let suites = (0..count).map(|n| format!("- {{ name: s{n}, text: t }}\n"));
        format!("{RUN}sft: {{ data: d }}\nevals:\n{}", suites.collect::<String>())
    };
    client.submit(&suites(10_000)).await.refused(&[INVALID_ARGUMENT], &["evals"]);
    let many: String = (0..100_000).map(|n| format!("k{n}: {n}\n")).collect();
    client.submit(&many).await.refused(&[INVALID_ARGUMENT], &["spec"]);
    let raft = |pattern: &str| {
        let verifier = format!("verifier: {{ regex: {{ pattern: '{pattern}' }} }}");
        format!("base: {{ checkpoint: base-1 }}\nraft: {{ prompts: p, {verifier} }}\n")
    };
    for pattern in ["(", &"a".repeat(500_000), "((x{900}){900}){900}", &"(".repeat(5000)] {
        client.submit(&raft(pattern)).await.refused(&[INVALID_ARGUMENT], &["raft.verifier"]);
    }
    let nested = format!("name: {}", "[".repeat(100_000));
    client.submit(&nested).await.refused(&[INVALID_ARGUMENT], &["spec"]);
    for name in ["a.b", "*", ">", "../x", &"x".repeat(49), "\"\\0\""] {
        let spec = format!("name: {name}\n{}", sft("epochs", "1"));
        client.submit(&spec).await.refused(&[INVALID_ARGUMENT], &[]);
    }
    client.submit("").await.refused(&[INVALID_ARGUMENT], &["spec_yaml"]);
    // An attached file is found by its name, not by its path.
    let elsewhere = sft("epochs", "1").replace("data.jsonl", "/etc/passwd");
    client.submit(&elsewhere).await.refused(&[INVALID_ARGUMENT], &["/etc/passwd", "not attached"]);
}

/// Messages of megabytes, and lengths that are not there.
async fn sizes(address: SocketAddr) {
    let too_much = [RESOURCE_EXHAUSTED, OUT_OF_RANGE];
    let mut client = Client::connect(address).await;
    let large = "x".repeat(40 << 20);
    client.submit(&large).await.refused(&[INVALID_ARGUMENT], &["spec", "bytes"]);
    client.call("Runs/Get", &text(1, &large)).await.refused(&too_much, &["limit"]);
    client.call("Evals/History", &text(1, &large[..1 << 20])).await.refused(&too_much, &["limit"]);
    let attached = text(2, [text(1, "data.jsonl"), text(2, &large)].concat());
    let spec = text(1, format!("{RUN}sft: {{ data: data.jsonl }}\n"));
    let answer = client.call("Runs/Submit", &[spec, attached].concat()).await;
    answer.refused(&[INVALID_ARGUMENT], &["data.jsonl", "line 1"]);
    drop(large);
    // 4 GiB are announced, and none come.
    for method in ["Runs/Submit", "Runs/Get", "Evals/Watch", "Fleet/Drain"] {
        let answer = client.raw(method, b"\0\xff\xff\xff\xff").await;
        answer.refused(&too_much, &["limit"]);
    }
    // Compressed, it says, and does not say how.
    client.raw("Runs/Get", b"\x01\0\0\0\x01x").await.refused(&[INTERNAL, UNIMPLEMENTED], &[]);
}

/// Whatever is no HTTP/2 is shown the door.
async fn garbage(address: SocketAddr) {
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
        // It may be closed while we write.
        let _ = socket.write_all(start).await;
        let ended = timeout(PATIENCE, async {
            let mut buffer = [0; 4096];
            while socket.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        });
        assert!(ended.await.is_ok(), "still open after {:?}", &start[..start.len().min(24)]);
    }
    Client::connect(address).await.call("Fleet/Agents", &[]).await.is(OK);
}

/// Calls that begin and never go on, and connections that say nothing at all.
async fn half_open(address: SocketAddr) {
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(address).await;
        for _ in 0..150 {
            // As large as a submission may be, of which one byte comes.
            held.push(client.begin("Runs/Submit", b"\0\x04\0\0\0x").await);
        }
        held.push(client.begin("Evals/Watch", b"\0").await);
    }
    call(address, "Fleet/Agents", &[]).await.is(OK);
    call(address, "Runs/List", &[]).await.is(OK);
    let silent = (0..600).map(|_| TcpStream::connect(address));
    let silent: Vec<_> = futures::future::join_all(silent).await;
    // The silent are shown the door, then there is room again.
    call(address, "Fleet/Agents", &[]).await.is(OK);
    drop((held, silent));
}

/// The process that serves the gateway.
struct Memory {
    process: i32,
    before: u64,
}

impl Memory {
    fn of(fleet: &Fleet) -> Self {
        let process = fleet.pid("coordinator").as_raw_nonzero().get();
        Self { process, before: resident(process, "VmRSS:") }
    }

    fn check(&self) {
        let peak = resident(self.process, "VmHWM:");
        println!("resident: {} MiB before, at most {} MiB", self.before >> 20, peak >> 20);
        let grown = peak.saturating_sub(self.before);
        assert!(grown < GROWTH_BYTES_MAX, "{} MiB were taken", grown >> 20);
        until("what was taken is given back", PATIENCE, || {
            (resident(self.process, "VmRSS:") < self.before + GROWTH_BYTES_MAX / 4).then_some(())
        });
    }
}

fn resident(process: i32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("kilobytes") * 1024
}
