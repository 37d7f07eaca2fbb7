//! A thousand boxes and a million samples: the real coordinator as a process of its own, a real
//! nats-server, and agents that draw nothing but take as long as if they did.
//!
//! Agents share connections; all else is as agents do it: they pull, keep their lease, write,
//! acknowledge, and say every second how they are.

use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use bus::{
    Bus, ConnectOptions, Delivery, Producer, WorkQueue,
    server::{ManagedServer, ServerOptions},
};
use futures::{StreamExt, TryStreamExt, stream};
use rustix::process::{Pid, Signal, kill_process};
use store::Store;
use tokio::{
    process::{Child, Command},
    sync::mpsc,
    task::JoinSet,
};
use wire::{Body, Fact, Place, Pool, RunId, Subject, WorkKind, v1};

use crate::{
    bench::{
        Figure, agents,
        log::{self, Workload},
        processes,
    },
    directory::Directory,
    output,
    supervise::open_log,
};

const BOXES: u32 = 1000;
const VERIFIERS: u32 = 64;
const CONNECTIONS: usize = 50;

const WORKLOAD: Workload = Workload {
    seed: 1,
    cycles: 1,
    prompts: 125_000,
    samples_per_prompt: 8,
    heldout: 0,
    heldout_samples_per_prompt: 0,
    max_new_tokens: 32,
};

/// Samples a second of the slowest boxes; others are two, four and eight times as fast.
const SAMPLES_PER_S: f64 = 1.5;
const TOKENS_A_SAMPLE: f64 = 24.0;
const SLOTS: u32 = 8;

/// What is set against it.
const RSS_MAX_BYTES: f64 = 1e9;
const CORES_MAX: f64 = 1.0;
/// A box between two jobs has to ask for the next one.
const IDLE_MAX_PERCENT: f64 = 1.0;

const LEASE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_secs(20);
const PAUSE_ON_ERROR: Duration = Duration::from_millis(500);
const JOIN_AT_ONCE: usize = 16;
const SAY_EVERY: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(500);
const RUN_LIMIT: Duration = Duration::from_secs(1800);
const RUN: &str = "crowd";

/// What the boxes had to do.
struct Ledger {
    began: Instant,
    /// Stretches in which a box had nothing in hand: when they began, and for how long.
    waits: Mutex<Vec<(f64, f64)>>,
    /// When the last job was taken, in milliseconds.
    last_taken_ms: AtomicU64,
    samples: AtomicU64,
    jobs: AtomicU64,
    over: AtomicBool,
}

impl Ledger {
    fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say(&format!("fleet: {BOXES} boxes on a real bus …"));
    let directory = Directory::choose(None, "bench-fleet")?;
    let at = directory.path();
    let mut server = ManagedServer::start(&ServerOptions::new(at.join("nats"))).await?;
    let store = Store::open(&format!("file://{}/store", at.display())).await?;
    let options = ConnectOptions {
        urls: vec![server.url()],
        producer: Producer { name: "bench".into(), role: "bench".into() },
        ..ConnectOptions::default()
    };
    let bus = Bus::connect(&options).await?;
    let mut coordinator = coordinator(at, &server.url(), store.url())?;
    let pid = coordinator.id().context("the coordinator ended at once")?;
    let outcome = drive(&bus, &store, &options, pid).await;
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::TERM);
    }
    let _ = coordinator.wait().await;
    drop(bus);
    server.stop().await;
    outcome
}

fn coordinator(at: &Path, nats: &str, store: &str) -> anyhow::Result<Child> {
    Command::new(std::env::current_exe().context("find this program")?)
        .args(["coordinator", "--nats", nats, "--store", store, "--gateway", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(open_log(&at.join("coordinator.log"))?)
        .env("RUST_LOG", "warn")
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .context("start the coordinator")
}

async fn drive(
    bus: &Bus,
    store: &Store,
    options: &ConnectOptions,
    pid: u32,
) -> anyhow::Result<Vec<Figure>> {
    bus.prepare(1).await?;
    let ledger = Arc::new(Ledger {
        began: Instant::now(),
        waits: Mutex::default(),
        last_taken_ms: AtomicU64::new(0),
        samples: AtomicU64::new(0),
        jobs: AtomicU64::new(0),
        over: AtomicBool::new(false),
    });
    let mut buses = Vec::new();
    for _ in 0..CONNECTIONS {
        buses.push(Bus::connect(options).await?);
    }
    let mut tasks = JoinSet::new();
    for (bus, queue) in queues(WorkKind::Generate, BOXES, &buses).await? {
        let number = u32::try_from(tasks.len())?;
        tasks.spawn(generator(number, bus, queue, ledger.clone()));
    }
    for (kind, count) in [(WorkKind::Verify, VERIFIERS), (WorkKind::Train, 1)] {
        for (bus, queue) in queues(kind, count, &buses).await? {
            tasks.spawn(other(bus, queue, ledger.clone()));
        }
    }
    // Until each was heard once.
    tokio::time::sleep(2 * SAY_EVERY).await;
    let spec = spec(store).await?;
    let before = processes::cpu_seconds(pid)?;
    let submitted = ledger.now_s();
    bus.publish(&spec).await?;
    let done = format!("flotilla.{RUN}.done");
    let began = Instant::now();
    let record = loop {
        while let Some(ended) = tasks.try_join_next() {
            ended??;
        }
        ensure!(began.elapsed() < RUN_LIMIT, "the run does not end");
        // On a machine that is busy an answer may be late.
        if let Ok(Some(record)) = bus.get(&done).await {
            break record;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    ledger.over.store(true, Ordering::Relaxed);
    tasks.abort_all();
    let Body::Done(ended) = &record.fact.body else { anyhow::bail!("no end of a run") };
    ensure!(ended.status() == v1::done::Status::Succeeded, "the run failed: {}", ended.message);
    let cpu_s = processes::cpu_seconds(pid)? - before;
    let rss = processes::status_bytes(pid, "VmHWM")?;
    Ok(figures(&ledger, submitted, began.elapsed(), cpu_s, rss))
}

/// Agents that share connections have joined the queue of a kind of work.
async fn queues(
    kind: WorkKind,
    count: u32,
    buses: &[Bus],
) -> anyhow::Result<Vec<(Bus, WorkQueue)>> {
    let joining = (0..count).zip(buses.iter().cycle()).map(|(_, bus)| async move {
        let queue = bus.work(kind, &Pool::new("default")?, LEASE).await?;
        anyhow::Ok((bus.clone(), queue))
    });
    stream::iter(joining).buffer_unordered(JOIN_AT_ONCE).try_collect().await
}

/// As agents do: a bus that does not answer is asked again.
async fn next(queue: &mut WorkQueue) -> Delivery {
    loop {
        match queue.next(POLL).await {
            Ok(Some(delivery)) => return delivery,
            Ok(None) => {}
            Err(_) => tokio::time::sleep(PAUSE_ON_ERROR).await,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn figures(ledger: &Ledger, submitted: f64, wall: Duration, cpu_s: f64, rss: u64) -> Vec<Figure> {
    let taken = ledger.last_taken_ms.load(Ordering::Relaxed) as f64 / 1000.0;
    let span = taken - submitted;
    let waits = ledger.waits.lock().map(|waits| waits.clone()).unwrap_or_default();
    let within = |(from, for_s): &(f64, f64)| (from + for_s).min(taken) - from.max(submitted);
    let idle: f64 = waits.iter().map(within).filter(|s| *s > 0.0).sum();
    let samples = ledger.samples.load(Ordering::Relaxed);
    let jobs = ledger.jobs.load(Ordering::Relaxed);
    let wall_s = wall.as_secs_f64();
    let planned = u64::from(WORKLOAD.prompts * WORKLOAD.samples_per_prompt);
    let twice = 100.0 * samples.saturating_sub(planned) as f64 / planned as f64;
    let what = format!(
        "{BOXES} boxes, {planned} samples ({twice:.1} % drawn twice), {jobs} jobs, {wall_s:.0} s"
    );
    vec![
        Figure {
            name: "fleet: coordinator's memory",
            measured: rss as f64 / 1e6,
            unit: "MB",
            limit: Some(RSS_MAX_BYTES / 1e6),
            how: format!("most it had; {what}"),
        },
        Figure {
            name: "fleet: coordinator's share of a core",
            measured: cpu_s / wall_s,
            unit: "cores",
            limit: Some(CORES_MAX),
            how: format!(
                "{cpu_s:.1} s of processor time, {:.0} µs a sample",
                1e6 * cpu_s / samples as f64
            ),
        },
        Figure {
            name: "fleet: boxes idle while there is work",
            measured: 100.0 * idle / (f64::from(BOXES) * span),
            unit: "%",
            limit: Some(IDLE_MAX_PERCENT),
            how: format!("from the spec to the last order taken, {span:.0} s"),
        },
    ]
}

async fn spec(store: &Store) -> anyhow::Result<Fact> {
    let prompts = store.put_blob(log::lines("p", WORKLOAD.prompts)?.into()).await?;
    let mut spec = log::spec(RUN, WORKLOAD);
    if let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind {
        raft.prompts = Some(prompts);
    }
    let subject = Subject::new(&RunId::new(RUN)?, Place::Spec);
    Ok(Fact { subject, body: Body::Spec(spec) })
}

/// A box that generates: one job at work, and one more in hand.
async fn generator(
    number: u32,
    bus: Bus,
    queue: WorkQueue,
    ledger: Arc<Ledger>,
) -> anyhow::Result<()> {
    let samples_per_s = SAMPLES_PER_S * f64::from(1 << (number % 4));
    let held = Mutex::new(Vec::new());
    let (hand, mut in_hand) = mpsc::channel(1);
    let pace = conduct::Pace {
        tokens_per_s: samples_per_s * TOKENS_A_SAMPLE,
        tokens_a_sample: TOKENS_A_SAMPLE,
        slots: SLOTS,
    };
    let pulling = pull(queue, hand, &held, pace);
    let status = v1::AgentStatus {
        agent: format!("g{number:04}"),
        roles: vec!["generator".into()],
        pool: "default".into(),
        state: v1::agent_status::State::Ready.into(),
        tokens_per_s: pace.tokens_per_s,
        sample_s: pace.sample_s(),
        ..Default::default()
    };
    let saying = say(&bus, status, &held);
    let working = async {
        while !ledger.over.load(Ordering::Relaxed) {
            let waits = ledger.now_s();
            let Some(delivery): Option<Arc<Delivery>> = in_hand.recv().await else { break };
            let for_s = ledger.now_s() - waits;
            if let Ok(mut all) = ledger.waits.lock() {
                all.push((waits, for_s));
            }
            generate(&bus, &delivery, samples_per_s, &held, &ledger).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        outcome = working => outcome,
        outcome = pulling => outcome,
        outcome = saying => outcome,
    }
}

async fn pull(
    mut queue: WorkQueue,
    hand: mpsc::Sender<Arc<Delivery>>,
    held: &Mutex<Vec<v1::ActiveJob>>,
    pace: conduct::Pace,
) -> anyhow::Result<()> {
    let mut waiting: Option<Arc<Delivery>> = None;
    loop {
        // Asked for only when there is room for it; what waits till then is kept.
        let Ok(room) = tokio::time::timeout(LEASE / 3, hand.reserve()).await else {
            if let Some(delivery) = &waiting {
                delivery.progress().await?;
            }
            continue;
        };
        let Ok(room) = room else { return Ok(()) };
        let delivery = Arc::new(next(&mut queue).await);
        let order = order(&delivery)?;
        if let Some(rest) = conduct::leaves(order, delivery.delivered, pace) {
            delivery.nak(Duration::ZERO).await?;
            tokio::time::sleep(rest).await;
            continue;
        }
        let job = v1::ActiveJob {
            role: "generator".into(),
            run: order.run.clone(),
            cycle: order.cycle,
            job: order.job.clone(),
            total: samples_of(order),
            ..Default::default()
        };
        if let Ok(mut held) = held.lock() {
            held.push(job);
        }
        waiting = Some(delivery.clone());
        room.send(delivery);
    }
}

fn order(delivery: &Delivery) -> anyhow::Result<&v1::GenerateOrder> {
    let record = delivery.record.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
    match &record.fact.body {
        Body::GenerateOrder(order) => Ok(order),
        _ => anyhow::bail!("{} is no order to generate", delivery.subject),
    }
}

fn samples_of(order: &v1::GenerateOrder) -> u32 {
    order.requests.iter().map(|request| request.count).sum()
}

async fn generate(
    bus: &Bus,
    delivery: &Delivery,
    samples_per_s: f64,
    held: &Mutex<Vec<v1::ActiveJob>>,
    ledger: &Ledger,
) -> anyhow::Result<()> {
    let order = order(delivery)?;
    let now_ms = u64::try_from(ledger.began.elapsed().as_millis())?;
    ledger.last_taken_ms.fetch_max(now_ms, Ordering::Relaxed);
    let count = samples_of(order);
    let wall_s = f64::from(count) / samples_per_s;
    let work = tokio::time::sleep(Duration::from_secs_f64(wall_s));
    tokio::pin!(work);
    while tokio::time::timeout(LEASE / 3, &mut work).await.is_err() {
        delivery.progress().await?;
    }
    let samples = v1::Samples { wall_s, ..agents::samples(order) };
    let place = Place::Samples { cycle: order.cycle, job: order.job.parse()? };
    let subject = Subject::new(&RunId::new(RUN)?, place);
    bus.publish(&Fact { subject, body: Body::Samples(samples) }).await?;
    if let Ok(mut held) = held.lock() {
        held.retain(|job| job.job != order.job);
    }
    ledger.samples.fetch_add(u64::from(count), Ordering::Relaxed);
    ledger.jobs.fetch_add(1, Ordering::Relaxed);
    delivery.ack().await?;
    Ok(())
}

async fn say(
    bus: &Bus,
    status: v1::AgentStatus,
    held: &Mutex<Vec<v1::ActiveJob>>,
) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(SAY_EVERY);
    loop {
        tick.tick().await;
        let jobs = held.lock().map(|held| held.clone()).unwrap_or_default();
        bus.announce(&v1::AgentStatus { jobs, ..status.clone() }).await?;
    }
}

/// One that answers at once.
async fn other(bus: Bus, mut queue: WorkQueue, ledger: Arc<Ledger>) -> anyhow::Result<()> {
    while !ledger.over.load(Ordering::Relaxed) {
        let delivery = next(&mut queue).await;
        let record = delivery.record.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
        if let Some((place, body)) = agents::answer(None, record)? {
            let subject = Subject::new(&record.fact.subject.run, place);
            bus.publish(&Fact { subject, body }).await?;
        }
        delivery.ack().await?;
    }
    Ok(())
}
