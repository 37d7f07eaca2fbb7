//! Measures what the gateway adds to a `llama-server` that answers through it.
//!
//! The peer is the same process, asked directly at its socket, in turn with requests through
//! gateway, bus and agent.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use cli::output;
use control::{FleetControl, SpecFiles, build_serving};
use engine::{Device, LanguageModel, ScratchShape, write_scratch_model};
use gateway::bind_port;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wire::v1;

use super::{BenchFigure, fixture::FleetFixture};

const CHANNEL: &str = "bench";
const AGENT: &str = "bench-server";
/// Longest wait until the model is served.
const READY_LIMIT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Requests whose first token is timed, on each side.
const FIRST_TOKENS: usize = 60;
/// Rounds of concurrent requests, on each side in turn.
const ROUNDS: usize = 5;
/// Requests of a round, and those open at a time.
const ROUND_REQUESTS: usize = 32;
const CONCURRENT: usize = 8;
const TOKENS: u32 = 96;

/// Accepted delay of the first token, in milliseconds, and loss of throughput, in percent.
const DELAY_MAX_MS: f64 = 5.0;
const LOSS_MAX: f64 = 3.0;

/// A place where the model answers.
#[derive(Debug, Clone)]
struct Endpoint {
    client: reqwest::Client,
    url: String,
    key: String,
}

pub(super) async fn measure_serving() -> anyhow::Result<[BenchFigure; 2]> {
    output::print_message("serve: a model through the gateway, and asked directly …");
    let rig = FleetFixture::start().await?;
    let stop = CancellationToken::new();
    let config = gateway::Config { listen: ([127, 0, 0, 1], 0).into(), tls: None };
    let bound = bind_port(config).await?;
    let url = format!("http://{}/v1/completions", bound.local_address());
    let control = rig.control_client();
    let serving = tokio::spawn(bound.serve_calls(control.clone(), stop.clone()));
    let agent = rig.start_agent(AGENT, "server").await?;
    serve_model(&rig, &control).await?;
    await_served(&control).await?;
    let through =
        Endpoint { client: bounded_http::client_builder().build()?, url, key: String::new() };
    let direct = find_server(&rig.directory_path().join(AGENT).join("serve"))?;
    let delay = measure_first_tokens(&direct, &through).await?;
    let loss = measure_throughput(&direct, &through).await?;
    agent.stop().await;
    stop.cancel();
    serving.await??;
    rig.stop().await;
    Ok([delay, loss])
}

async fn serve_model(rig: &FleetFixture, control: &FleetControl) -> anyhow::Result<()> {
    let model = rig.directory_path().join("model");
    let shape = ScratchShape {
        hidden_size: 512,
        intermediate_size: 1408,
        layers: 8,
        heads: 8,
        kv_heads: 4,
        ..ScratchShape::default()
    };
    let config = write_scratch_model(&model, &shape)?;
    LanguageModel::init_random(config, 1, &Device::Cpu)?.save_directory(&model)?;
    let request = v1::MoveChannelRequest {
        channel: CHANNEL.into(),
        base: model.display().to_string(),
        serving: Some(build_serving("default", 0)?),
        ..Default::default()
    };
    let files = SpecFiles::Local(PathBuf::from("/"));
    let watch: control::TransferCallback = Arc::new(|_| ());
    control.move_channel(request, String::new(), &files, &watch).await?;
    Ok(())
}

async fn await_served(control: &FleetControl) -> anyhow::Result<()> {
    let began = Instant::now();
    while control.list_channels().await?.iter().all(|channel| channel.agents.is_empty()) {
        if began.elapsed() > READY_LIMIT {
            bail!("the model was not served within {READY_LIMIT:?}; is llama.cpp there?");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Finds the socket and the key of the server that the agent started.
fn find_server(directory: &Path) -> anyhow::Result<Endpoint> {
    for entry in std::fs::read_dir(directory).context("find llama-server")? {
        let place = entry?.path();
        let socket = place.join("server.sock");
        if socket.exists() {
            let key = std::fs::read_to_string(place.join("key"))?.trim().to_owned();
            // As the agent asks it.
            let client = bounded_http::client_builder().pool_max_idle_per_host(0);
            let client = client.unix_socket(socket).build()?;
            return Ok(Endpoint { client, url: "http://localhost/v1/completions".into(), key });
        }
    }
    bail!("no llama-server listens below {}", directory.display())
}

impl Endpoint {
    /// Streams an answer; returns the time to its first bytes.
    async fn ask(&self, number: usize, tokens: u32) -> anyhow::Result<Duration> {
        let body = json!({
            "model": CHANNEL, "prompt": format!("{number}+{}=", number * 7), "max_tokens": tokens,
            "stream": true, "temperature": 0, "ignore_eos": true, "seed": number,
        });
        let began = Instant::now();
        let request = self.client.post(&self.url).bearer_auth(&self.key);
        let request = request.header("content-type", "application/json").body(body.to_string());
        let mut answer = request.send().await?.error_for_status()?;
        answer.chunk().await?.context("an empty answer")?;
        let first = began.elapsed();
        while answer.chunk().await?.is_some() {}
        Ok(first)
    }

    /// Returns the tokens a second of a round of concurrent requests.
    async fn run_round(&self) -> anyhow::Result<f64> {
        let began = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for first in 0..CONCURRENT {
            let endpoint = self.clone();
            tasks.spawn(async move {
                for number in (first..ROUND_REQUESTS).step_by(CONCURRENT) {
                    endpoint.ask(number, TOKENS).await?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        let tokens = ROUND_REQUESTS as f64 * f64::from(TOKENS);
        Ok(tokens / began.elapsed().as_secs_f64())
    }
}

async fn measure_first_tokens(
    direct: &Endpoint,
    through: &Endpoint,
) -> anyhow::Result<BenchFigure> {
    let (mut of_direct, mut of_through) = (Vec::new(), Vec::new());
    for number in 0..=FIRST_TOKENS {
        let pair = (direct.ask(number, 4).await?, through.ask(number, 4).await?);
        // The first pair opens connections.
        if number > 0 {
            of_direct.push(pair.0.as_secs_f64() * 1000.0);
            of_through.push(pair.1.as_secs_f64() * 1000.0);
        }
    }
    let (direct, through) = (median(of_direct), median(of_through));
    Ok(BenchFigure {
        name: "serve: first token",
        measured: through - direct,
        unit: "ms",
        limit: Some(DELAY_MAX_MS),
        how: format!(
            "added by gateway, bus and agent: {through:.2} ms instead of {direct:.2}, medians of \
             {FIRST_TOKENS}"
        ),
    })
}

async fn measure_throughput(direct: &Endpoint, through: &Endpoint) -> anyhow::Result<BenchFigure> {
    let (mut of_direct, mut of_through) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        of_direct.push(direct.run_round().await?);
        of_through.push(through.run_round().await?);
    }
    let (direct, through) = (median(of_direct), median(of_through));
    Ok(BenchFigure {
        name: "serve: throughput",
        measured: (direct / through - 1.0) * 100.0,
        unit: "%",
        limit: Some(LOSS_MAX),
        how: format!(
            "lost by streaming through them: {through:.0} instead of {direct:.0} tokens/s, \
             {CONCURRENT} requests at a time"
        ),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
