//! A run of many cycles, as a fleet makes in a week, on a real nats-server with agents that answer
//! at once: neither the log nor the coordinator's memory grows with it.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use bus::{
    Bus, ConnectOptions, LogEvent,
    server::{ManagedServer, ServerOptions},
};
use control::{AuditDepth, FleetControl};
use coordinator::{Config, CycleRetention};
use futures::StreamExt;
use serde_json::json;
use store::{Store, TreePlace};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

const CYCLES: u32 = 400;
/// Cycle of the first measurement; by then everything that is allocated once is allocated.
const FIRST_LOOK: u32 = 100;
const PROMPTS: u32 = 4;
const SAMPLES: u32 = 4;
/// A cycle's samples take 64 KiB of the log.
const SAMPLE_BYTES: usize = 4096;

/// Growth of the log between the measurements: 300 cycles' small facts. All of their samples would
/// take 19 MiB.
const LOG_GROWTH_MAX: u64 = 3 << 20;
const MEMORY_GROWTH_MAX: u64 = 16 << 20;

const LIMIT: Duration = Duration::from_secs(600);

struct Fleet {
    bus: Bus,
    store: Store,
    stop: CancellationToken,
    run: RunId,
    _nats: ManagedServer,
    _dir: TempDir,
}

#[derive(Debug, Clone, Copy)]
struct Size {
    log: u64,
    memory: u64,
}

impl Fleet {
    async fn start(keep: CycleRetention) -> Self {
        let dir = TempDir::new().unwrap();
        let nats = match ManagedServer::start(&ServerOptions::new(dir.path().join("bus"))).await {
            Ok(nats) => nats,
            Err(error) => panic!("{error} ({error:?}); run deploy/fetch-nats-server.sh first"),
        };
        let options = ConnectOptions { urls: vec![nats.client_url()], ..Default::default() };
        let bus = Bus::connect(&options).await.unwrap();
        bus.prepare_log(1).await.unwrap();
        let store = Store::open(&format!("file://{}/store", dir.path().display())).await.unwrap();
        let stop = CancellationToken::new();
        let config = Config {
            candidate: "week".into(),
            lease: Duration::from_secs(3),
            sizing: cycle::JobSizing::default(),
            timeouts: cycle::ReissueTimeouts::default(),
            retention: keep,
            status_tx: tokio::sync::watch::Sender::default(),
            metrics_tx: tokio::sync::watch::Sender::default(),
        };
        coordinate(bus.clone(), store.clone(), config, stop.clone());
        let run = RunId::new("week-1").unwrap();
        Self { bus, store, stop, run, _nats: nats, _dir: dir }
    }

    async fn tree(&self, name: &str, about: store::TreeMetadata) -> v1::Tree {
        let source = TempDir::new().unwrap();
        std::fs::write(source.path().join("config.json"), name).unwrap();
        let place = TreePlace::new("trees", "t").unwrap();
        self.store.publish_tree(source.path(), &place, about).await.unwrap()
    }

    async fn submit(&self, cycles: u32) {
        let lines: String = (0..PROMPTS)
            .map(|n| format!("{}\n", json!({ "id": format!("p{n}"), "prompt": format!("{n}+1=") })))
            .collect();
        let raft = v1::spec::Raft {
            verifier: Some(v1::Verifier::default()),
            prompts: Some(self.store.put_blob(lines.into()).await.unwrap()),
            prompt_count: PROMPTS,
            cycles,
            samples_per_prompt: SAMPLES,
            sampling: Some(v1::Sampling { max_new_tokens: 512, ..Default::default() }),
            selection: Some(v1::Selection {
                keep_per_prompt: 1,
                min_reward: 0.5,
                ..Default::default()
            }),
            training: Some(v1::Training { lora: Some(v1::Lora::default()), ..Default::default() }),
            ..Default::default()
        };
        let base = v1::Base {
            tree: Some(self.tree("base", Default::default()).await),
            random_init: false,
            adapter: None,
        };
        let spec = v1::Spec {
            run: self.run.to_string(),
            seed: 3,
            base: Some(base),
            pool: "default".into(),
            kind: Some(v1::spec::Kind::Raft(raft)),
            ..Default::default()
        };
        self.write(FactKey::Spec, FactBody::Spec(spec)).await;
    }

    async fn write(&self, place: FactKey, body: FactBody) {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        self.bus.publish_fact(&fact).await.unwrap();
    }

    /// Does all agents' work until the run is over; measures the sizes meanwhile.
    async fn work(&self) -> Vec<Size> {
        let mut facts = self.bus.follow_facts(Vec::new(), 0);
        let mut sizes = Vec::new();
        while let Some(followed) = facts.next().await {
            let LogEvent::Record(record) = followed.unwrap() else { continue };
            if let Some((place, body)) = self.answer(&record).await {
                self.write(place, body).await;
            }
            match record.fact.subject.key {
                FactKey::CycleDone { cycle } if cycle == FIRST_LOOK => {
                    sizes.push(self.size().await);
                }
                FactKey::Done => break,
                _ => {}
            }
        }
        sizes
    }

    async fn answer(&self, record: &Record) -> Option<(FactKey, FactBody)> {
        match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) => {
                let place = FactKey::Samples { cycle: *cycle, job: job.clone() };
                Some((place, FactBody::Samples(samples(order))))
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let place = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
                Some((place, FactBody::Verdicts(verdicts(record.sequence, samples))))
            }
            (FactKey::TrainOrder { cycle, .. }, FactBody::TrainOrder(order)) => {
                let place = FactKey::Checkpoint { cycle: *cycle, step: 1 };
                Some((place, FactBody::Checkpoint(self.checkpoint(order).await)))
            }
            _ => None,
        }
    }

    async fn checkpoint(&self, order: &v1::TrainOrder) -> v1::Checkpoint {
        let base = order.base.as_ref().unwrap().tree.clone();
        let parent = order.adapter.clone().or_else(|| base.clone());
        let manifest = |tree: &Option<v1::Tree>| tree.as_ref().unwrap().manifest.clone();
        let about = [
            ("content", json!("adapter")),
            ("base", json!(manifest(&base))),
            ("parent", json!(manifest(&parent))),
            ("dataset", json!(order.dataset.as_ref().unwrap().digest)),
            ("cycle", json!(order.cycle)),
            ("step", json!(1)),
            ("steps", json!(1)),
        ];
        let about = about.map(|(key, value)| (key.to_owned(), value)).into();
        let tree = self.tree(&format!("adapter {}", order.cycle), about).await;
        v1::Checkpoint {
            run: order.run.clone(),
            cycle: order.cycle,
            step: 1,
            steps: 1,
            r#final: true,
            content: v1::checkpoint::Content::Adapter.into(),
            tree: Some(tree),
            base,
            parent,
            ..Default::default()
        }
    }

    async fn size(&self) -> Size {
        Size { log: self.bus.log_usage().await.unwrap().bytes, memory: resident() }
    }

    /// Waits until the log holds samples of only the newest cycles.
    async fn let_go(&self, cycles: u32) {
        let settled = async {
            loop {
                let oldest = format!("flotilla.{}.samples.{}.*", self.run, cycles);
                let last = format!("flotilla.{}.cycle.{}.archived", self.run, cycles + 2);
                let archived = self.bus.get_fact(&last).await.unwrap().is_some();
                if archived && self.bus.get_fact(&oldest).await.unwrap().is_none() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, settled).await.expect("the archive keeps up");
    }
}

/// Runs on a thread of its own, because the coordinator's loop is not for a pool of threads.
fn coordinate(bus: Bus, store: Store, config: Config, stop: CancellationToken) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(coordinator::run(bus, store, config, stop)).unwrap();
    });
}

/// Includes the coordinator and the agents, which run in this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn samples(order: &v1::GenerateOrder) -> v1::Samples {
    let sample = |id: &str, index: u32| v1::samples::Sample {
        prompt_id: id.into(),
        index,
        text: format!("{id} {index} {}", "x".repeat(SAMPLE_BYTES)),
        tokens: 7,
        finish: v1::samples::Finish::Stop.into(),
        ..Default::default()
    };
    let requests = order.requests.iter();
    let drawn = requests.flat_map(|r| (0..r.count).map(|n| sample(&r.prompt_id, r.first + n)));
    v1::Samples {
        run: order.run.clone(),
        cycle: order.cycle,
        job: order.job.clone(),
        attempt: order.attempt,
        purpose: order.purpose,
        agent: "g1".into(),
        base: order.base.as_ref().unwrap().manifest.clone(),
        adapter: order.adapter.as_ref().map_or(String::new(), |tree| tree.manifest.clone()),
        samples: drawn.collect(),
        ..Default::default()
    }
}

fn verdicts(samples_sequence: u64, samples: &v1::Samples) -> v1::Verdicts {
    let judge = |sample: &v1::samples::Sample| v1::verdicts::Verdict {
        prompt_id: sample.prompt_id.clone(),
        index: sample.index,
        outcome: v1::verdicts::Outcome::Pass.into(),
        reward: 1.0,
        detail: String::new(),
    };
    v1::Verdicts {
        run: samples.run.clone(),
        cycle: samples.cycle,
        job: samples.job.clone(),
        purpose: samples.purpose,
        samples_sequence,
        verdicts: samples.samples.iter().map(judge).collect(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_the_log_nor_memory_grows_with_the_cycles_and_the_audit_is_clean() {
    let fleet = Fleet::start(CycleRetention::Cycles(2)).await;
    fleet.submit(CYCLES).await;
    let worked = tokio::time::timeout(LIMIT, fleet.work()).await;
    let first = worked.expect("the run ends")[0];
    fleet.let_go(CYCLES - 2).await;
    let last = fleet.size().await;
    println!("after {FIRST_LOOK} cycles {first:?}, after {CYCLES} {last:?}");
    assert!(last.log < first.log + LOG_GROWTH_MAX, "{first:?} {last:?}");
    assert!(last.memory < first.memory + MEMORY_GROWTH_MAX, "{first:?} {last:?}");

    let control = FleetControl::with_store(fleet.bus.clone(), fleet.store.clone());
    let report = control.audit_run(&fleet.run, AuditDepth::Files, &|_| ()).await.unwrap();
    assert_eq!((report.findings, report.not_checked), (Vec::new(), Vec::new()));
    let samples = u64::from(CYCLES * PROMPTS * SAMPLES);
    assert_eq!(report.tally.planned_samples, samples);
    assert_eq!(report.tally.accepted_samples, samples);
    assert_eq!(report.tally.judged_samples, samples);
    fleet.stop.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_zombie_writes_into_an_archived_cycle_counts_for_nothing() {
    let fleet = Fleet::start(CycleRetention::Cycles(0)).await;
    fleet.submit(3).await;
    tokio::time::timeout(LIMIT, fleet.work()).await.expect("the run ends");
    fleet.let_go(1).await;
    let control = FleetControl::with_store(fleet.bus.clone(), fleet.store.clone());
    let audit = async || control.audit_run(&fleet.run, AuditDepth::Files, &|_| ()).await.unwrap();
    let before = audit().await;
    assert_eq!(before.findings, []);
    let late = v1::Samples {
        run: fleet.run.to_string(),
        cycle: 1,
        job: "t00000".into(),
        ..Default::default()
    };
    let place = FactKey::Samples { cycle: 1, job: "t00000".parse().unwrap() };
    fleet.write(place, FactBody::Samples(late)).await;
    let after = audit().await;
    assert_eq!(after.findings, []);
    assert_eq!(after.tally.accepted_samples, before.tally.accepted_samples);
    let run = control.get_run(&fleet.run).await.unwrap();
    assert_eq!(run.anomalies, [], "a coordinator that replays the log finds nothing wrong");

    let archive = run.cycles[&2].archived.as_ref().unwrap().tree.clone().unwrap();
    let file = fleet._dir.path().join("store").join(archive.path).join("facts.jsonl.gz");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let report = control.audit_run(&fleet.run, AuditDepth::Bytes, &|_| ()).await.unwrap();
    assert_eq!(report.findings.len(), 1, "{:#?}", report.findings);
    assert!(report.findings[0].url.as_ref().unwrap().ends_with("/facts.jsonl.gz"));
    assert!(report.not_checked[0].contains("cycle 2"), "{:?}", report.not_checked);
    fleet.stop.cancel();
}
