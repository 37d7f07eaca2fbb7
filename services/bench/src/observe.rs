//! Measures `flotilla-bench look`: the cost of observing a fleet.
//!
//! It measures how soon a watcher receives a new fact, how much a browser loads before it can draw
//! the page, and how fast a coordinator with a hundred agents answers Prometheus.

use std::{
    net::{SocketAddr, TcpListener},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use bus::Bus;
use cli::{output, supervisor::open_log};
use tokio::process::{Child, Command};
use tokio_util::task::AbortOnDropHandle;
use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use super::{BenchFigure, fixture::FleetFixture};
use crate::flotilla_program::find_flotilla;

/// Accepted time from writing a fact to a view that contains it, in milliseconds. A browser draws
/// it with its next frame.
const HEARD_LIMIT_MS: f64 = 300.0;
/// Accepted time of a metrics request, in milliseconds.
const SCRAPE_LIMIT_MS: f64 = 10.0;
/// Accepted kilobytes that a browser loads before it can draw the page.
const PAINT_LIMIT_KB: f64 = 100.0;

/// Agents that announce their status.
const AGENTS: usize = 100;
const RUNS: usize = 20;
/// Facts whose delivery is measured.
const FACTS: u64 = 60;
/// Metrics requests.
const SCRAPES: usize = 60;
/// Interval between two status messages of an agent.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Longest wait for the gateway, and for the agents in the metrics.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) async fn measure_observers() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message(&format!(
        "look: {AGENTS} agents, {RUNS} runs, {FACTS} facts, {SCRAPES} scrapes …"
    ));
    let rig = FleetFixture::start().await?;
    let coordinator = CoordinatorProcess::start(&rig).await?;
    let announcing = AbortOnDropHandle::new(tokio::spawn(announce_agents(rig.bus.clone())));
    for number in 0..RUNS {
        rig.bus.publish_fact(&make_watched_spec(&numbered_run_id(number)?)).await?;
    }
    let (latency, paint) =
        (coordinator.measure_fact_latency(&rig.bus).await?, coordinator.first_paint_kb().await?);
    let scraped = coordinator.measure_scrapes().await?;
    drop(announcing);
    coordinator.stop().await;
    rig.stop().await;
    Ok(vec![
        BenchFigure {
            name: "look: a fact is heard of",
            measured: percentile_95(latency),
            unit: "ms",
            limit: Some(HEARD_LIMIT_MS),
            how: format!("until Runs.Board has it, 95th of 100, of {FACTS} at odd moments"),
        },
        BenchFigure {
            name: "look: a scrape",
            measured: percentile_95(scraped),
            unit: "ms",
            limit: Some(SCRAPE_LIMIT_MS),
            how: format!("GET /metrics, 95th of 100, with {AGENTS} agents and {RUNS} runs"),
        },
        BenchFigure {
            name: "look: first paint",
            measured: paint,
            unit: "kB",
            limit: Some(PAINT_LIMIT_KB),
            how: "the page, its style and the scripts that it names".into(),
        },
    ])
}

struct CoordinatorProcess {
    process: Child,
    gateway: SocketAddr,
    metrics: SocketAddr,
    client: reqwest::Client,
}

impl CoordinatorProcess {
    async fn start(rig: &FleetFixture) -> anyhow::Result<Self> {
        let (gateway, metrics) = (free_address()?, free_address()?);
        let process = Command::new(find_flotilla()?)
            .args(["coordinator", "--nats", &rig.server_url(), "--store", rig.store.url()])
            .args(["--gateway", &gateway.to_string(), "--metrics", &metrics.to_string()])
            .arg("--die-with-parent")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(open_log(&rig.directory_path().join("coordinator.log"))?)
            .kill_on_drop(true)
            .spawn()
            .context("start a coordinator")?;
        bounded_http::install_crypto_provider();
        let coordinator = Self { process, gateway, metrics, client: reqwest::Client::new() };
        let began = Instant::now();
        while !coordinator
            .get(&format!("http://{gateway}/"))
            .await
            .is_ok_and(|page| !page.is_empty())
        {
            ensure!(
                began.elapsed() < READY_LIMIT,
                "the gateway did not answer within {READY_LIMIT:?}"
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(coordinator)
    }

    async fn get(&self, url: &str) -> anyhow::Result<String> {
        let answer = self.client.get(url).send().await?.error_for_status()?;
        Ok(answer.text().await?)
    }

    /// Returns the milliseconds from writing each fact to a view that contains it.
    async fn measure_fact_latency(&self, bus: &Bus) -> anyhow::Result<Vec<f64>> {
        let run = numbered_run_id(0)?;
        let url = format!("http://{}/flotilla.v1.Runs/Board", self.gateway);
        let asked = serde_json::json!({ "runs": [run.as_str()] }).to_string();
        let request = self.client.post(url).header("content-type", "application/json").body(asked);
        let mut stream =
            JsonLineStream { answer: request.send().await?.error_for_status()?, text: Vec::new() };
        stream.wait_for_sequence(0).await?;
        let mut latencies = Vec::new();
        for number in 0..FACTS {
            // The varying delay covers facts that arrive between two views and right after one.
            tokio::time::sleep(Duration::from_millis(number * 37 % 250)).await;
            let began = Instant::now();
            let written =
                bus.publish_fact(&make_checkpoint(&run, u32::try_from(number)? + 1)).await?;
            stream.wait_for_sequence(written.log_sequence()).await?;
            latencies.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(latencies)
    }

    /// Returns the milliseconds of each metrics request, after all agents are counted.
    async fn measure_scrapes(&self) -> anyhow::Result<Vec<f64>> {
        let url = format!("http://{}/metrics", self.metrics);
        let ready = format!("flotilla_agents{{state=\"ready\"}} {AGENTS}");
        let began = Instant::now();
        while !self.get(&url).await?.contains(&ready) {
            ensure!(began.elapsed() < READY_LIMIT, "the agents were not counted");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let mut scraped = Vec::new();
        for _ in 0..SCRAPES {
            let began = Instant::now();
            let page = self.get(&url).await?;
            scraped.push(began.elapsed().as_secs_f64() * 1e3);
            ensure!(page.matches("flotilla_run_info").count() > RUNS, "a run is not told of");
        }
        Ok(scraped)
    }

    async fn first_paint_kb(&self) -> anyhow::Result<f64> {
        let at = format!("http://{}/", self.gateway);
        let page = self.get(&at).await?;
        let named =
            |mark: &'static str| page.split(mark).skip(1).filter_map(|rest| rest.split('"').next());
        let mut bytes = page.len();
        for file in named("href=\"").chain(named("src=\"")).filter(|file| file.contains('.')) {
            bytes += self.get(&format!("{at}{file}")).await?.len();
        }
        #[expect(clippy::cast_precision_loss, reason = "a page's size")]
        Ok(bytes as f64 / 1e3)
    }

    async fn stop(mut self) {
        // The process holds no state worth saving.
        let _ = self.process.kill().await;
    }
}

struct JsonLineStream {
    answer: reqwest::Response,
    text: Vec<u8>,
}

impl JsonLineStream {
    async fn wait_for_sequence(&mut self, sequence: u64) -> anyhow::Result<()> {
        loop {
            let line = self.next().await?;
            let board: serde_json::Value = serde_json::from_slice(&line)?;
            let cursor = board["cursor"].as_str().and_then(|cursor| cursor.parse::<u64>().ok());
            if cursor.context("a picture without a cursor")? >= sequence {
                return Ok(());
            }
        }
    }

    async fn next(&mut self) -> anyhow::Result<Vec<u8>> {
        loop {
            if let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let rest = self.text.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.text, rest));
            }
            let piece = self.answer.chunk().await?.context("the stream ended")?;
            self.text.extend_from_slice(&piece);
        }
    }
}

fn free_address() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
    Ok(listener.local_addr()?)
}

/// Returns the 95th percentile, or NaN without values.
fn percentile_95(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let place = figures.len() * 95 / 100;
    figures.get(place.min(figures.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn numbered_run_id(number: usize) -> anyhow::Result<RunId> {
    Ok(RunId::new(format!("look-{number}"))?)
}

fn make_watched_spec(run: &RunId) -> Fact {
    let watched = v1::spec::Watched { source: "bench".into(), host: "bench".into() };
    let spec = v1::Spec {
        run: run.to_string(),
        name: "look".into(),
        kind: Some(v1::spec::Kind::Watched(watched)),
        ..v1::Spec::default()
    };
    Fact { subject: Subject::new(run, FactKey::WatchedSpec), body: FactBody::Spec(spec) }
}

fn make_checkpoint(run: &RunId, step: u32) -> Fact {
    let checkpoint = v1::Checkpoint {
        run: run.to_string(),
        step,
        steps: step + 1,
        loss: 1.0 / f64::from(step),
        agent: "box-0".into(),
        ..v1::Checkpoint::default()
    };
    let place = FactKey::WatchedCheckpoint { step };
    Fact { subject: Subject::new(run, place), body: FactBody::Checkpoint(checkpoint) }
}

async fn announce_agents(bus: Bus) {
    let mut tick = tokio::time::interval(STATUS_INTERVAL);
    loop {
        tick.tick().await;
        for number in 0..AGENTS {
            let status = v1::AgentStatus {
                agent: format!("box-{number}"),
                roles: vec!["generator".into(), "verifier".into()],
                pool: "default".into(),
                state: v1::agent_status::State::Ready.into(),
                tokens_per_s: 100.0,
                telemetry: Some(v1::Telemetry { cpu_busy: Some(0.5), ..Default::default() }),
                ..v1::AgentStatus::default()
            };
            // An error needs no handling: the next round repeats the message.
            let _ = bus.announce_status(&status).await;
        }
    }
}
