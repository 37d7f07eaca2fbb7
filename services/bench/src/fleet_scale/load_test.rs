//! Measures a coordinator with a thousand boxes and a million samples.
//!
//! The coordinator is a real process and the nats-server is real. The agents sample nothing but
//! wait as long as real ones would work. They share connections. Otherwise they behave as real
//! agents: they pull, renew their leases, write, acknowledge, and announce their status every
//! second.

use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use agent_core::OrderDecline;
use anyhow::{Context, anyhow, ensure};
use bus::{
    Bus, ConnectOptions, Delivery, FactProducer, PublishOutcome, WorkQueue,
    server::{ManagedServer, ServerOptions},
};
use cli::{output, supervisor::open_log, work_directory::WorkDirectory};
use futures::{StreamExt, TryStreamExt, stream};
use rustix::process::{Pid, Signal, kill_process};
use store::Store;
use tokio::{
    process::{Child, Command},
    sync::mpsc,
    task::JoinSet,
};
use wire::{AgentId, Fact, FactBody, FactKey, Pool, RunId, Subject, WorkKind, v1};

use crate::{
    BenchFigure,
    flotilla_program::find_flotilla,
    memory_log::{self, RaftWorkload},
    procfs, stub_agents,
};

/// Simulated boxes with a generator.
const BOXES: u32 = 1000;
/// Simulated verifiers, which answer at once.
const VERIFIERS: u32 = 64;
/// Connections that all agents share.
const CONNECTIONS: usize = 50;

/// One cycle of a million samples.
const WORKLOAD: RaftWorkload = RaftWorkload {
    seed: 1,
    cycles: 1,
    prompts: 125_000,
    samples_per_prompt: 8,
    heldout: 0,
    heldout_samples_per_prompt: 0,
    max_new_tokens: 32,
};

/// Samples per second of the slowest boxes; the others are two, four and eight times as fast.
const SAMPLES_PER_S: f64 = 1.5;
const TOKENS_PER_SAMPLE: f64 = 24.0;
/// Sequences that a box samples at once.
const SLOTS: u32 = 8;

/// Accepted peak memory of the coordinator.
const RSS_MAX_BYTES: f64 = 1e9;
/// Accepted CPU use of the coordinator, in cores.
const CORES_MAX: f64 = 1.0;
/// Accepted idle time of the boxes. It is above zero because a box pulls its next job between two
/// jobs.
const IDLE_MAX_PERCENT: f64 = 1.0;

/// Lease of a job; it is renewed after a third of it.
const LEASE: Duration = Duration::from_secs(30);
/// Longest wait of one pull.
const PULL_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause after a pull that failed.
const PAUSE_ON_ERROR: Duration = Duration::from_millis(500);
/// Agents that join a queue at the same time.
const JOIN_AT_ONCE: usize = 16;
/// Interval between two status messages of an agent.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two checks whether the run has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Longest accepted duration of the run.
const RUN_LIMIT: Duration = Duration::from_secs(1800);
/// Name of the run.
const RUN: &str = "crowd";

struct LoadTotals {
    began: Instant,
    /// Idle periods of boxes: start and duration, in seconds since `began`.
    waits: Mutex<Vec<(f64, f64)>>,
    /// Time of the last job that a box started, in milliseconds since `began`.
    last_taken_ms: AtomicU64,
    samples: AtomicU64,
    jobs: AtomicU64,
    is_over: AtomicBool,
}

impl LoadTotals {
    /// Returns the seconds since the start.
    fn elapsed_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

pub(super) async fn measure_load() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message(&format!("fleet: {BOXES} boxes on a real bus …"));
    let directory = WorkDirectory::open_or_create(None, "bench-fleet")?;
    let at = directory.as_path();
    let mut server = ManagedServer::start(&ServerOptions::new(at.join("nats"))).await?;
    let store = Store::open(&format!("file://{}/store", at.display())).await?;
    let options = ConnectOptions {
        urls: vec![server.client_url()],
        producer: FactProducer { name: "bench".into(), role: "bench".into() },
        ..ConnectOptions::default()
    };
    let bus = Bus::connect(&options).await?;
    let mut coordinator = spawn_coordinator(at, &server.client_url(), store.url())?;
    let pid = coordinator.id().context("the coordinator ended at once")?;
    let outcome = run_load_test(&bus, &store, &options, pid).await;
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // The process may already have ended.
        let _ = kill_process(pid, Signal::TERM);
    }
    let _ = coordinator.wait().await;
    drop(bus);
    server.stop().await;
    outcome
}

fn spawn_coordinator(at: &Path, nats: &str, store: &str) -> anyhow::Result<Child> {
    Command::new(find_flotilla()?)
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

async fn run_load_test(
    bus: &Bus,
    store: &Store,
    options: &ConnectOptions,
    pid: u32,
) -> anyhow::Result<Vec<BenchFigure>> {
    bus.prepare_log(1).await?;
    let totals = Arc::new(LoadTotals {
        began: Instant::now(),
        waits: Mutex::default(),
        last_taken_ms: AtomicU64::new(0),
        samples: AtomicU64::new(0),
        jobs: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    });
    let mut buses = Vec::new();
    for _ in 0..CONNECTIONS {
        buses.push(Bus::connect(options).await?);
    }
    let mut tasks = JoinSet::new();
    for (bus, queue) in join_queues(WorkKind::Generate, BOXES, &buses).await? {
        let number = u32::try_from(tasks.len())?;
        tasks.spawn(run_generator(number, bus, queue, totals.clone()));
    }
    for (kind, count) in [(WorkKind::Verify, VERIFIERS), (WorkKind::Train, 1)] {
        for (bus, queue) in join_queues(kind, count, &buses).await? {
            tasks.spawn(run_instant_agent(bus, queue, totals.clone()));
        }
    }
    // Wait until every agent has announced its status.
    tokio::time::sleep(2 * STATUS_INTERVAL).await;
    let spec = make_spec(store).await?;
    let before = procfs::read_cpu_seconds(pid)?;
    let submitted = totals.elapsed_s();
    bus.publish_fact(&spec).await?;
    let done = format!("flotilla.{RUN}.done");
    let began = Instant::now();
    let record = loop {
        while let Some(ended) = tasks.try_join_next() {
            ended??;
        }
        ensure!(began.elapsed() < RUN_LIMIT, "the run does not end");
        // On a busy machine an answer may be late: ignore errors and retry.
        if let Ok(Some(record)) = bus.get_fact(&done).await {
            break record;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    totals.is_over.store(true, Ordering::Relaxed);
    tasks.abort_all();
    let FactBody::Done(ended) = &record.fact.body else { anyhow::bail!("no end of a run") };
    ensure!(ended.status() == v1::done::Status::Succeeded, "the run failed: {}", ended.message);
    let cpu_s = procfs::read_cpu_seconds(pid)? - before;
    let rss = procfs::read_status_bytes(pid, "VmHWM")?;
    Ok(load_figures(&totals, submitted, began.elapsed(), cpu_s, rss))
}

async fn join_queues(
    kind: WorkKind,
    count: u32,
    buses: &[Bus],
) -> anyhow::Result<Vec<(Bus, WorkQueue)>> {
    let joining = (0..count).zip(buses.iter().cycle()).map(|(_, bus)| async move {
        let queue = bus.join_work_queue(kind, &Pool::new("default")?, LEASE).await?;
        anyhow::Ok((bus.clone(), queue))
    });
    stream::iter(joining).buffer_unordered(JOIN_AT_ONCE).try_collect().await
}

async fn next_delivery(queue: &mut WorkQueue) -> Delivery {
    loop {
        match queue.next(PULL_TIMEOUT).await {
            Ok(Some(delivery)) => return delivery,
            Ok(None) => {}
            Err(_) => tokio::time::sleep(PAUSE_ON_ERROR).await,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn load_figures(
    totals: &LoadTotals,
    submitted: f64,
    wall: Duration,
    cpu_s: f64,
    rss: u64,
) -> Vec<BenchFigure> {
    let taken = totals.last_taken_ms.load(Ordering::Relaxed) as f64 / 1000.0;
    let span = taken - submitted;
    let waits = totals.waits.lock().map(|waits| waits.clone()).unwrap_or_default();
    let within = |(from, for_s): &(f64, f64)| (from + for_s).min(taken) - from.max(submitted);
    let idle: f64 = waits.iter().map(within).filter(|s| *s > 0.0).sum();
    let samples = totals.samples.load(Ordering::Relaxed);
    let jobs = totals.jobs.load(Ordering::Relaxed);
    let wall_s = wall.as_secs_f64();
    let planned = u64::from(WORKLOAD.prompts * WORKLOAD.samples_per_prompt);
    let twice = 100.0 * samples.saturating_sub(planned) as f64 / planned as f64;
    let what = format!(
        "{BOXES} boxes, {planned} samples ({twice:.1} % drawn twice), {jobs} jobs, {wall_s:.0} s"
    );
    vec![
        BenchFigure {
            name: "fleet: coordinator's memory",
            measured: rss as f64 / 1e6,
            unit: "MB",
            limit: Some(RSS_MAX_BYTES / 1e6),
            how: format!("peak; {what}"),
        },
        BenchFigure {
            name: "fleet: coordinator's share of a core",
            measured: cpu_s / wall_s,
            unit: "cores",
            limit: Some(CORES_MAX),
            how: format!("{cpu_s:.1} CPU s, {:.0} µs per sample", 1e6 * cpu_s / samples as f64),
        },
        BenchFigure {
            name: "fleet: boxes idle while there is work",
            measured: 100.0 * idle / (f64::from(BOXES) * span),
            unit: "%",
            limit: Some(IDLE_MAX_PERCENT),
            how: format!("from the spec to the last order taken, {span:.0} s"),
        },
    ]
}

async fn make_spec(store: &Store) -> anyhow::Result<Fact> {
    let prompts = store.put_blob(memory_log::prompt_lines("p", WORKLOAD.prompts)?.into()).await?;
    let mut spec = memory_log::make_raft_spec(RUN, WORKLOAD);
    if let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind {
        raft.prompts = Some(prompts);
    }
    let subject = Subject::new(&RunId::new(RUN)?, FactKey::Spec);
    Ok(Fact { subject, body: FactBody::Spec(spec) })
}

async fn run_generator(
    number: u32,
    bus: Bus,
    queue: WorkQueue,
    totals: Arc<LoadTotals>,
) -> anyhow::Result<()> {
    let samples_per_s = SAMPLES_PER_S * f64::from(1 << (number % 4));
    let held = Mutex::new(Vec::new());
    let (hand, mut in_hand) = mpsc::channel(1);
    let pace = agent_core::SamplingThroughput {
        tokens_per_s: samples_per_s * TOKENS_PER_SAMPLE,
        tokens_per_sample: TOKENS_PER_SAMPLE,
        slots: SLOTS,
    };
    let agent = AgentId::new(format!("g{number:04}"))?;
    let pulling = pull_jobs((&bus, &agent), queue, hand, &held, pace);
    let status = v1::AgentStatus {
        agent: agent.to_string(),
        roles: vec!["generator".into()],
        pool: "default".into(),
        state: v1::agent_status::State::Ready.into(),
        tokens_per_s: pace.tokens_per_s,
        sample_s: pace.seconds_per_sample(),
        ..Default::default()
    };
    let saying = announce_status(&bus, status, &held);
    let working = async {
        while !totals.is_over.load(Ordering::Relaxed) {
            let waits = totals.elapsed_s();
            let Some(delivery): Option<Arc<Delivery>> = in_hand.recv().await else { break };
            let for_s = totals.elapsed_s() - waits;
            if let Ok(mut all) = totals.waits.lock() {
                all.push((waits, for_s));
            }
            generate_samples(&bus, &delivery, samples_per_s, &held, &totals).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        outcome = working => outcome,
        outcome = pulling => outcome,
        outcome = saying => outcome,
    }
}

/// Pulls jobs into `hand`, and declines those that a faster box should take.
async fn pull_jobs(
    (bus, agent): (&Bus, &AgentId),
    mut queue: WorkQueue,
    hand: mpsc::Sender<Arc<Delivery>>,
    held: &Mutex<Vec<v1::ActiveJob>>,
    pace: agent_core::SamplingThroughput,
) -> anyhow::Result<()> {
    let mut waiting: Option<Arc<Delivery>> = None;
    loop {
        // Pull only if there is room. Meanwhile, renew the lease of the waiting job.
        let Ok(room) = tokio::time::timeout(LEASE / 3, hand.reserve()).await else {
            if let Some(delivery) = &waiting {
                delivery.renew_lease().await?;
            }
            continue;
        };
        let Ok(room) = room else { return Ok(()) };
        let delivery = Arc::new(next_delivery(&mut queue).await);
        let order = parse_order(&delivery)?;
        let declinable =
            agent_core::decide_decline(order, delivery.delivered, agent.as_str(), pace);
        if let Some(OrderDecline { fact, pause }) = declinable {
            let order = &delivery.record.as_ref().map_err(|error| anyhow!("{error}"))?.fact.subject;
            let subject = order.declined_by(agent).context("a generate order")?;
            let fact = Fact { subject, body: FactBody::Declined(fact) };
            if let PublishOutcome::New { .. } = bus.publish_fact(&fact).await? {
                delivery.nak(Duration::ZERO).await?;
                tokio::time::sleep(pause).await;
                continue;
            }
        }
        let job = v1::ActiveJob {
            role: "generator".into(),
            run: order.run.clone(),
            cycle: order.cycle,
            job: order.job.clone(),
            total: sample_count(order),
            ..Default::default()
        };
        if let Ok(mut held) = held.lock() {
            held.push(job);
        }
        waiting = Some(delivery.clone());
        room.send(delivery);
    }
}

fn parse_order(delivery: &Delivery) -> anyhow::Result<&v1::GenerateOrder> {
    let record = delivery.record.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
    match &record.fact.body {
        FactBody::GenerateOrder(order) => Ok(order),
        _ => anyhow::bail!("{} is no order to generate", delivery.subject),
    }
}

fn sample_count(order: &v1::GenerateOrder) -> u32 {
    order.requests.iter().map(|request| request.count).sum()
}

/// Waits as long as sampling would take, renews the lease meanwhile, and writes the samples.
async fn generate_samples(
    bus: &Bus,
    delivery: &Delivery,
    samples_per_s: f64,
    held: &Mutex<Vec<v1::ActiveJob>>,
    totals: &LoadTotals,
) -> anyhow::Result<()> {
    let order = parse_order(delivery)?;
    let now_ms = u64::try_from(totals.began.elapsed().as_millis())?;
    totals.last_taken_ms.fetch_max(now_ms, Ordering::Relaxed);
    let count = sample_count(order);
    let wall_s = f64::from(count) / samples_per_s;
    let work = tokio::time::sleep(Duration::from_secs_f64(wall_s));
    tokio::pin!(work);
    while tokio::time::timeout(LEASE / 3, &mut work).await.is_err() {
        delivery.renew_lease().await?;
    }
    let samples = v1::Samples { wall_s, ..stub_agents::make_samples(order) };
    let place = FactKey::Samples { cycle: order.cycle, job: order.job.parse()? };
    let subject = Subject::new(&RunId::new(RUN)?, place);
    bus.publish_fact(&Fact { subject, body: FactBody::Samples(samples) }).await?;
    if let Ok(mut held) = held.lock() {
        held.retain(|job| job.job != order.job);
    }
    totals.samples.fetch_add(u64::from(count), Ordering::Relaxed);
    totals.jobs.fetch_add(1, Ordering::Relaxed);
    delivery.ack().await?;
    Ok(())
}

async fn announce_status(
    bus: &Bus,
    status: v1::AgentStatus,
    held: &Mutex<Vec<v1::ActiveJob>>,
) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(STATUS_INTERVAL);
    loop {
        tick.tick().await;
        let jobs = held.lock().map(|held| held.clone()).unwrap_or_default();
        bus.announce_status(&v1::AgentStatus { jobs, ..status.clone() }).await?;
    }
}

/// Behaves as a verifier or trainer that answers every order at once.
async fn run_instant_agent(
    bus: Bus,
    mut queue: WorkQueue,
    totals: Arc<LoadTotals>,
) -> anyhow::Result<()> {
    while !totals.is_over.load(Ordering::Relaxed) {
        let delivery = next_delivery(&mut queue).await;
        let record = delivery.record.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
        if let Some((place, body)) = stub_agents::answer_fact(None, record)? {
            let subject = Subject::new(&record.fact.subject.run, place);
            bus.publish_fact(&Fact { subject, body }).await?;
        }
        delivery.ack().await?;
    }
    Ok(())
}
