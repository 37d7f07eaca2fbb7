//! Measures `flotilla-bench bus`: facts against plain messages of the same size on the same server.
//!
//! The server is configured as `flotilla up` configures it: it writes to disk before it
//! acknowledges. Each figure is the best of [`ROUNDS`] rounds, which alternate with the rounds of
//! the comparison.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bus::{
    Bus, ConnectOptions, FactProducer, LogEvent,
    server::{ManagedServer, ServerOptions},
};
use cli::{output, work_directory::WorkDirectory};
use cycle::{FleetMember, FleetSnapshot};
use futures::StreamExt;
use wire::{Fact, FactBody, FactKey, Subject, v1};

use super::{
    BenchFigure,
    memory_log::{MemoryLog, RaftWorkload},
    stub_agents,
};

/// Rounds of each measurement; the fastest one counts.
const ROUNDS: u32 = 3;
/// Facts of a round that are published one after the other.
const SINGLE_FACTS: usize = 300;
/// Facts of a round that are published at once.
const TOGETHER: usize = 1024;
/// Minimum number of facts that are read back.
const REPLAYED_FACTS: usize = 20_000;

/// Accepted time of a single fact, relative to a plain message.
const PUBLISH_RATIO: f64 = 1.5;
/// Accepted time of a replay, relative to a plain consumer.
const REPLAY_RATIO: f64 = 2.0;
/// Accepted time of a batch, relative to the same facts in flight without batches.
const BATCH_RATIO: f64 = 1.0;

pub(super) async fn measure_bus() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message("bus: facts beside plain messages …");
    let directory = WorkDirectory::open_or_create(None, "bench-bus")?;
    let options = ServerOptions::new(directory.as_path().join("nats"));
    let mut server = ManagedServer::start(&options).await?;
    let options = ConnectOptions {
        urls: vec![server.client_url()],
        producer: FactProducer { name: "bench".into(), role: "bench".into() },
        ..ConnectOptions::default()
    };
    let bus = Bus::connect(&options).await?;
    bus.prepare_log(1).await?;
    let outcome = measure_publishing(&bus).await;
    drop(bus);
    server.stop().await;
    outcome
}

/// Measures single facts, batches and unbatched facts in flight, then a replay of all of them.
async fn measure_publishing(bus: &Bus) -> anyhow::Result<Vec<BenchFigure>> {
    let [mut single, mut plain, mut batched, mut in_flight] = [Duration::MAX; 4];
    let mut written = 0;
    for round in 0..ROUNDS {
        let facts = make_facts(&format!("one-{round}"), SINGLE_FACTS)?;
        let payloads: Vec<Vec<u8>> = facts.iter().map(Fact::to_json).collect();
        single = single.min(time_work(async { publish_each(bus, &facts).await }).await?);
        let took = time_work(async { publish_plain_messages(bus, &payloads).await });
        plain = plain.min(took.await?);
        let many = self::make_facts(&format!("all-{round}"), TOGETHER)?;
        let took = time_work(async { bus.publish_all(&many).await.map(drop).map_err(Into::into) });
        batched = batched.min(took.await?);
        let many = self::make_facts(&format!("fly-{round}"), TOGETHER)?;
        let took =
            time_work(async { bus.publish_unbatched(&many).await.map(drop).map_err(Into::into) });
        in_flight = in_flight.min(took.await?);
        written += facts.len() + 2 * TOGETHER;
    }
    let micros = |took: Duration, count: usize| {
        1e6 * took.as_secs_f64() / f64::from(u32::try_from(count).unwrap_or(u32::MAX))
    };
    let (single, plain) = (micros(single, SINGLE_FACTS), micros(plain, SINGLE_FACTS));
    let (batched, in_flight) = (micros(batched, TOGETHER), micros(in_flight, TOGETHER));
    let mut figures = vec![
        BenchFigure {
            name: "bus: a fact acknowledged",
            measured: single,
            unit: "µs",
            limit: Some(PUBLISH_RATIO * plain),
            how: format!(
                "nats-server {}, sequential: {:.0} facts/s; plain messages of the same size \
                 {plain:.0} µs: {:.2} ×",
                bus.server_version(),
                1e6 / single,
                single / plain
            ),
        },
        BenchFigure {
            name: "bus: a fact of a batch",
            measured: batched,
            unit: "µs",
            limit: Some(BATCH_RATIO * in_flight),
            how: format!(
                "{TOGETHER} at once: {:.0} facts/s; without batches {in_flight:.0} µs; {:.1} × the \
                 sequential rate",
                1e6 / batched,
                single / batched
            ),
        },
    ];
    figures.push(measure_replay(bus, written).await?);
    Ok(figures)
}

async fn measure_replay(bus: &Bus, written: usize) -> anyhow::Result<BenchFigure> {
    let more = make_facts("replay", REPLAYED_FACTS.saturating_sub(written))?;
    for facts in more.chunks(TOGETHER) {
        bus.publish_all(facts).await?;
    }
    let [mut ours, mut plain] = [Duration::MAX; 2];
    let (mut count, mut bytes) = (0, 0);
    for _ in 0..ROUNDS {
        let took = time_work(async {
            count = count_facts(bus).await?;
            Ok(())
        });
        ours = ours.min(took.await?);
        let took = time_work(async {
            bytes = bus.read_plain(count).await.map_err(|error| anyhow::anyhow!("{error}"))?;
            Ok(())
        });
        plain = plain.min(took.await?);
    }
    ensure!(count >= REPLAYED_FACTS.min(written), "only {count} facts came back");
    let per_s =
        |took: Duration| f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / took.as_secs_f64();
    Ok(BenchFigure {
        name: "bus: replay",
        measured: ours.as_secs_f64(),
        unit: "s",
        limit: Some(REPLAY_RATIO * plain.as_secs_f64()),
        how: format!(
            "{count} facts, {}: {:.0} facts/s, decoded; plain consumer {:.0}/s: {:.2} × as fast",
            output::format_bytes(bytes),
            per_s(ours),
            per_s(plain),
            ours.as_secs_f64() / plain.as_secs_f64()
        ),
    })
}

async fn count_facts(bus: &Bus) -> anyhow::Result<usize> {
    let mut facts = bus.follow_facts(Vec::new(), 0);
    let mut count = 0;
    while let Some(followed) = facts.next().await {
        match followed? {
            LogEvent::Record(record) => count += usize::from(record.sequence > 0),
            LogEvent::CaughtUp => break,
            LogEvent::Unreadable { subject, .. } => anyhow::bail!("{subject} is no fact"),
        }
    }
    Ok(count)
}

async fn time_work(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Duration> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}

async fn publish_each(bus: &Bus, facts: &[Fact]) -> anyhow::Result<()> {
    for fact in facts {
        bus.publish_fact(fact).await?;
    }
    Ok(())
}

/// Publishes payloads as plain messages, one after the other.
async fn publish_plain_messages(bus: &Bus, payloads: &[Vec<u8>]) -> anyhow::Result<()> {
    bus.publish_plain(payloads).await.map_err(|error| anyhow::anyhow!("{error}"))
}

fn make_facts(run: &str, count: usize) -> anyhow::Result<Vec<Fact>> {
    let workload = RaftWorkload {
        seed: 1,
        cycles: 1,
        prompts: 64,
        samples_per_prompt: 8,
        heldout: 0,
        heldout_samples_per_prompt: 0,
        max_new_tokens: 32,
    };
    let member = FleetMember { tokens_per_s: 500.0, ..FleetMember::default() };
    let fleet = FleetSnapshot { generators: vec![member; 4], ..FleetSnapshot::default() };
    let mut log = MemoryLog::submit_run(run, 0, workload, fleet)?;
    log.coordinate_now();
    let order = log.take_records().into_iter().find_map(|record| match record.fact.body {
        FactBody::GenerateOrder(order) => Some(order),
        _ => None,
    });
    let order = order.context("the run orders something")?;
    let id = run.parse()?;
    let fact = |number: usize| {
        let job = format!("b{number:06}");
        let place = FactKey::Samples { cycle: 1, job: job.parse()? };
        let samples = v1::Samples { job, ..stub_agents::make_samples(&order) };
        Ok(Fact { subject: Subject::new(&id, place), body: FactBody::Samples(samples) })
    };
    (0..count).map(fact).collect()
}
