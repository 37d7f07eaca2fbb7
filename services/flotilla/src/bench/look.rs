//! `flotilla bench look`: until whoever looks hears of a fact, what a page is drawn from first, and what
//! Prometheus asks of a coordinator with a hundred agents.

use std::{
    net::{SocketAddr, TcpListener},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use bus::Bus;
use tokio::process::{Child, Command};
use tokio_util::task::AbortOnDropHandle;
use wire::{Body, Fact, Place, RunId, Subject, v1};

use super::{Figure, rig::Rig};
use crate::{output, supervise::open_log};

/// From a fact that is written to a picture that has it. A browser draws it with its next frame.
const HEARD_LIMIT_MS: f64 = 300.0;
const SCRAPE_LIMIT_MS: f64 = 10.0;
/// Kilobytes that a browser has to have before it draws anything.
const PAINT_LIMIT_KB: f64 = 100.0;

const AGENTS: usize = 100;
const RUNS: usize = 20;
const FACTS: u64 = 60;
const SCRAPES: usize = 60;
/// How often agents say how they are.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(2);
const READY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say(&format!("look: {AGENTS} agents, {RUNS} runs, {FACTS} facts, {SCRAPES} scrapes …"));
    let rig = Rig::start().await?;
    let desk = Desk::start(&rig).await?;
    let announcing = AbortOnDropHandle::new(tokio::spawn(announce(rig.bus.clone())));
    for number in 0..RUNS {
        rig.bus.publish(&begun(&run(number)?)).await?;
    }
    let (heard, paint) = (desk.hear(&rig.bus).await?, desk.first_paint().await?);
    let scraped = desk.scrape().await?;
    drop(announcing);
    desk.stop().await;
    rig.stop().await;
    Ok(vec![
        Figure {
            name: "look: a fact is heard of",
            measured: late(heard),
            unit: "ms",
            limit: Some(HEARD_LIMIT_MS),
            how: format!("until Runs.Board has it, 95th of 100, of {FACTS} at odd moments"),
        },
        Figure {
            name: "look: a scrape",
            measured: late(scraped),
            unit: "ms",
            limit: Some(SCRAPE_LIMIT_MS),
            how: format!("GET /metrics, 95th of 100, with {AGENTS} agents and {RUNS} runs"),
        },
        Figure {
            name: "look: first paint",
            measured: paint,
            unit: "kB",
            limit: Some(PAINT_LIMIT_KB),
            how: "the page, its style and the scripts that it names".into(),
        },
    ])
}

/// A coordinator and its gateway, as a process.
struct Desk {
    process: Child,
    gateway: SocketAddr,
    metrics: SocketAddr,
    client: reqwest::Client,
}

impl Desk {
    async fn start(rig: &Rig) -> anyhow::Result<Self> {
        let (gateway, metrics) = (free()?, free()?);
        let process = Command::new(std::env::current_exe().context("find this program")?)
            .args(["coordinator", "--nats", &rig.url(), "--store", rig.store.url()])
            .args(["--gateway", &gateway.to_string(), "--metrics", &metrics.to_string()])
            .arg("--die-with-parent")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(open_log(&rig.path().join("coordinator.log"))?)
            .kill_on_drop(true)
            .spawn()
            .context("start a coordinator")?;
        let desk = Self { process, gateway, metrics, client: reqwest::Client::new() };
        let began = Instant::now();
        while !desk.get(&format!("http://{gateway}/")).await.is_ok_and(|page| !page.is_empty()) {
            ensure!(
                began.elapsed() < READY_LIMIT,
                "the gateway did not answer within {READY_LIMIT:?}"
            );
            tokio::time::sleep(POLL).await;
        }
        Ok(desk)
    }

    async fn get(&self, url: &str) -> anyhow::Result<String> {
        let answer = self.client.get(url).send().await?.error_for_status()?;
        Ok(answer.text().await?)
    }

    /// Milliseconds from writing a fact to hearing of it.
    async fn hear(&self, bus: &Bus) -> anyhow::Result<Vec<f64>> {
        let run = run(0)?;
        let url = format!("http://{}/flotilla.v1.Runs/Board", self.gateway);
        let asked = serde_json::json!({ "runs": [run.as_str()] }).to_string();
        let request = self.client.post(url).header("content-type", "application/json").body(asked);
        let mut stream =
            Lines { answer: request.send().await?.error_for_status()?, text: Vec::new() };
        stream.until(0).await?;
        let mut heard = Vec::new();
        for number in 0..FACTS {
            // Between two pictures as well as right behind one.
            tokio::time::sleep(Duration::from_millis(number * 37 % 250)).await;
            let began = Instant::now();
            let written = bus.publish(&checkpoint(&run, u32::try_from(number)? + 1)).await?;
            stream.until(written.sequence()).await?;
            heard.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(heard)
    }

    async fn scrape(&self) -> anyhow::Result<Vec<f64>> {
        let url = format!("http://{}/metrics", self.metrics);
        let ready = format!("flotilla_agents{{state=\"ready\"}} {AGENTS}");
        let began = Instant::now();
        while !self.get(&url).await?.contains(&ready) {
            ensure!(began.elapsed() < READY_LIMIT, "the agents were not counted");
            tokio::time::sleep(POLL).await;
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

    /// Kilobytes.
    async fn first_paint(&self) -> anyhow::Result<f64> {
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
        // It has nothing to lose.
        let _ = self.process.kill().await;
    }
}

/// A stream of a message a line.
struct Lines {
    answer: reqwest::Response,
    text: Vec<u8>,
}

impl Lines {
    /// Until the picture has what stands at a place in the log.
    async fn until(&mut self, sequence: u64) -> anyhow::Result<()> {
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

fn free() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
    Ok(listener.local_addr()?)
}

/// The slowest of all but one in twenty.
fn late(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let place = figures.len() * 95 / 100;
    figures.get(place.min(figures.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn run(number: usize) -> anyhow::Result<RunId> {
    Ok(RunId::new(format!("look-{number}"))?)
}

/// Of a training that is somebody else's: a coordinator orders nothing.
fn begun(run: &RunId) -> Fact {
    let watched = v1::spec::Watched { source: "bench".into(), host: "bench".into() };
    let spec = v1::Spec {
        run: run.to_string(),
        name: "look".into(),
        kind: Some(v1::spec::Kind::Watched(watched)),
        ..v1::Spec::default()
    };
    Fact { subject: Subject::new(run, Place::Spec), body: Body::Spec(spec) }
}

fn checkpoint(run: &RunId, step: u32) -> Fact {
    let checkpoint = v1::Checkpoint {
        run: run.to_string(),
        step,
        steps: step + 1,
        loss: 1.0 / f64::from(step),
        agent: "box-0".into(),
        ..v1::Checkpoint::default()
    };
    let place = Place::Checkpoint { cycle: 0, step };
    Fact { subject: Subject::new(run, place), body: Body::Checkpoint(checkpoint) }
}

/// What agents say, for as long as it is polled.
async fn announce(bus: Bus) {
    let mut tick = tokio::time::interval(ANNOUNCE_EVERY);
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
            // The next round says it again.
            let _ = bus.announce(&status).await;
        }
    }
}
