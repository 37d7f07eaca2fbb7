//! `flotilla bench bus`: facts, beside plain messages of the same size on the same server.
//!
//! The server is one that `flotilla up` would start: it writes to disk before it acknowledges. Each
//! figure is the best of a few rounds, taken in turns with what it is compared with.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bus::{
    Bus, ConnectOptions, Followed, Producer,
    server::{ManagedServer, ServerOptions},
};
use cycle::{Fleet, Member};
use futures::StreamExt;
use wire::{Body, Fact, Place, Subject, v1};

use super::{
    Figure, agents,
    log::{Log, Workload},
};
use crate::{directory::Directory, output};

const ROUNDS: u32 = 3;
/// Facts of a round, written each by itself and all together.
const ONE_BY_ONE: usize = 300;
const TOGETHER: usize = 1024;
/// Facts that are read back.
const REPLAYED: usize = 20_000;

/// Beside plain messages.
const PUBLISH_RATIO: f64 = 1.5;
const REPLAY_RATIO: f64 = 2.0;
/// A batch beside the same facts in flight together.
const BATCH_RATIO: f64 = 1.0;

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say("bus: facts beside plain messages …");
    let directory = Directory::choose(None, "bench-bus")?;
    let options = ServerOptions::new(directory.path().join("nats"));
    let mut server = ManagedServer::start(&options).await?;
    let options = ConnectOptions {
        urls: vec![server.url()],
        producer: Producer { name: "bench".into(), role: "bench".into() },
        ..ConnectOptions::default()
    };
    let bus = Bus::connect(&options).await?;
    bus.prepare(1).await?;
    let outcome = figures(&bus).await;
    drop(bus);
    server.stop().await;
    outcome
}

async fn figures(bus: &Bus) -> anyhow::Result<Vec<Figure>> {
    let [mut single, mut plain, mut batched, mut in_flight] = [Duration::MAX; 4];
    let mut written = 0;
    for round in 0..ROUNDS {
        let facts = facts(&format!("one-{round}"), ONE_BY_ONE)?;
        let payloads: Vec<Vec<u8>> = facts.iter().map(Fact::encode).collect();
        single = single.min(timed(async { each(bus, &facts).await }).await?);
        let took = timed(async { plainly(bus, &payloads, false).await });
        plain = plain.min(took.await?);
        let many = self::facts(&format!("all-{round}"), TOGETHER)?;
        let took = timed(async { bus.publish_all(&many).await.map(drop).map_err(Into::into) });
        batched = batched.min(took.await?);
        let many = self::facts(&format!("fly-{round}"), TOGETHER)?;
        let took =
            timed(async { bus.publish_in_flight(&many).await.map(drop).map_err(Into::into) });
        in_flight = in_flight.min(took.await?);
        written += facts.len() + 2 * TOGETHER;
    }
    let micros = |took: Duration, count: usize| {
        1e6 * took.as_secs_f64() / f64::from(u32::try_from(count).unwrap_or(u32::MAX))
    };
    let (single, plain) = (micros(single, ONE_BY_ONE), micros(plain, ONE_BY_ONE));
    let (batched, in_flight) = (micros(batched, TOGETHER), micros(in_flight, TOGETHER));
    let mut figures = vec![
        Figure {
            name: "bus: a fact acknowledged",
            measured: single,
            unit: "µs",
            limit: Some(PUBLISH_RATIO * plain),
            how: format!(
                "one after the other: {:.0} facts/s; plain messages of the same size {plain:.0} µs, \
                 {:.2} times",
                1e6 / single,
                single / plain
            ),
        },
        Figure {
            name: "bus: a fact of a batch",
            measured: batched,
            unit: "µs",
            limit: Some(BATCH_RATIO * in_flight),
            how: format!(
                "{TOGETHER} at once: {:.0} facts/s; without batches {in_flight:.0} µs; {:.1} times \
                 the facts one after the other",
                1e6 / batched,
                single / batched
            ),
        },
    ];
    figures.push(replay(bus, written).await?);
    Ok(figures)
}

async fn replay(bus: &Bus, written: usize) -> anyhow::Result<Figure> {
    let more = facts("replay", REPLAYED.saturating_sub(written))?;
    for facts in more.chunks(TOGETHER) {
        bus.publish_all(facts).await?;
    }
    let [mut ours, mut plain] = [Duration::MAX; 2];
    let (mut count, mut bytes) = (0, 0);
    for _ in 0..ROUNDS {
        let took = timed(async {
            count = follow(bus).await?;
            Ok(())
        });
        ours = ours.min(took.await?);
        let took = timed(async {
            bytes = bus.read_plain(count).await.map_err(|error| anyhow::anyhow!("{error}"))?;
            Ok(())
        });
        plain = plain.min(took.await?);
    }
    ensure!(count >= REPLAYED.min(written), "only {count} facts came back");
    let per_s =
        |took: Duration| f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / took.as_secs_f64();
    Ok(Figure {
        name: "bus: replay",
        measured: ours.as_secs_f64(),
        unit: "s",
        limit: Some(REPLAY_RATIO * plain.as_secs_f64()),
        how: format!(
            "{count} facts, {}: {:.0} facts/s, read and decoded; a plain consumer {:.0}/s, {:.2} \
             times as fast",
            output::bytes(bytes),
            per_s(ours),
            per_s(plain),
            ours.as_secs_f64() / plain.as_secs_f64()
        ),
    })
}

/// All facts there are, in order.
async fn follow(bus: &Bus) -> anyhow::Result<usize> {
    let mut facts = bus.follow(Vec::new(), 0);
    let mut count = 0;
    while let Some(followed) = facts.next().await {
        match followed? {
            Followed::Record(record) => count += usize::from(record.sequence > 0),
            Followed::CaughtUp => break,
            Followed::Unreadable { subject, .. } => anyhow::bail!("{subject} is no fact"),
        }
    }
    Ok(count)
}

async fn timed(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Duration> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}

async fn each(bus: &Bus, facts: &[Fact]) -> anyhow::Result<()> {
    for fact in facts {
        bus.publish(fact).await?;
    }
    Ok(())
}

async fn plainly(bus: &Bus, payloads: &[Vec<u8>], at_once: bool) -> anyhow::Result<()> {
    bus.publish_plain(payloads, at_once).await.map_err(|error| anyhow::anyhow!("{error}"))
}

/// Orders as a coordinator writes them, of a run of their own.
fn facts(run: &str, count: usize) -> anyhow::Result<Vec<Fact>> {
    let workload = Workload {
        seed: 1,
        cycles: 1,
        prompts: 64,
        samples_per_prompt: 8,
        heldout: 0,
        heldout_samples_per_prompt: 0,
        max_new_tokens: 32,
    };
    let member = Member { tokens_per_s: 500.0, ..Member::default() };
    let fleet = Fleet { generators: vec![member; 4], ..Fleet::default() };
    let mut log = Log::submit(run, 0, workload, fleet)?;
    log.coordinate();
    let order = log.take().into_iter().find_map(|record| match record.fact.body {
        Body::GenerateOrder(order) => Some(order),
        _ => None,
    });
    let order = order.context("the run orders something")?;
    let id = run.parse()?;
    let fact = |number: usize| {
        let job = format!("b{number:06}");
        let place = Place::Samples { cycle: 1, job: job.parse()? };
        let samples = v1::Samples { job, ..agents::samples(&order) };
        Ok(Fact { subject: Subject::new(&id, place), body: Body::Samples(samples) })
    };
    (0..count).map(fact).collect()
}
