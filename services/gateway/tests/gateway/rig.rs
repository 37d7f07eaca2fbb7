//! A gateway with its own bus and store for one test.

use std::{collections::BTreeMap, time::Duration};

use bus::{
    Bus, ConnectOptions,
    server::{ManagedServer, ServerOptions},
};
use control::FleetControl;
use gateway::{
    Config,
    rpc::{
        checkpoints_client::CheckpointsClient, evals_client::EvalsClient,
        fleet_client::FleetClient, runs_client::RunsClient,
    },
};
use store::Store;
use tempfile::TempDir;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use wire::{Fact, FactBody, v1};

/// A limit for immediate actions, on a machine that is busy with builds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const SPEC: &str = "
name: sums
base: { init: { config: config.json, tokenizer: tokenizer.json } }
evals: [{ name: held, text: held.txt, n_ctx: 64 }]
sft: { data: data.jsonl }
";

pub(crate) struct Rig {
    pub(crate) url: String,
    pub(crate) channel: Channel,
    pub(crate) bus: Bus,
    pub(crate) store: Store,
    pub(crate) nats: ManagedServer,
    pub(crate) stop: CancellationToken,
    pub(crate) serving: JoinHandle<anyhow::Result<()>>,
    pub(crate) dir: TempDir,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let nats = match ManagedServer::start(&ServerOptions::new(dir.path().join("bus"))).await {
            Ok(nats) => nats,
            Err(error) => panic!("{error} ({error:?}); run deploy/fetch-nats-server.sh first"),
        };
        let options = ConnectOptions { urls: vec![nats.client_url()], ..Default::default() };
        let bus = Bus::connect(&options).await.unwrap();
        bus.prepare_log(1).await.unwrap();
        let store = Store::open(&format!("file://{}/store", dir.path().display())).await.unwrap();
        let config = Config { listen: "127.0.0.1:0".parse().unwrap(), tls: None };
        let bound = gateway::bind_port(config).await.unwrap();
        let url = format!("http://{}", bound.local_address());
        let stop = CancellationToken::new();
        let control = FleetControl::with_store(bus.clone(), store.clone());
        let serving = tokio::spawn(bound.serve_calls(control, stop.clone()));
        let channel = Channel::from_shared(url.clone()).unwrap().connect().await.unwrap();
        Self { url, channel, bus, store, nats, stop, serving, dir }
    }

    pub(crate) fn runs(&self) -> RunsClient<Channel> {
        RunsClient::new(self.channel.clone())
    }

    pub(crate) fn evals(&self) -> EvalsClient<Channel> {
        EvalsClient::new(self.channel.clone())
    }

    pub(crate) fn checkpoints(&self) -> CheckpointsClient<Channel> {
        CheckpointsClient::new(self.channel.clone())
    }

    pub(crate) fn fleet(&self) -> FleetClient<Channel> {
        FleetClient::new(self.channel.clone())
    }

    /// Submits a run, and returns its id.
    pub(crate) async fn submit(&self) -> String {
        self.runs().submit(submission(SPEC)).await.unwrap().into_inner().run
    }

    pub(crate) async fn publish(&self, subject: &str, body: FactBody) -> u64 {
        let fact = Fact { subject: subject.parse().unwrap(), body };
        self.bus.publish_fact(&fact).await.unwrap().log_sequence()
    }

    pub(crate) async fn publish_eval(&self, run: &str, step: u32) -> u64 {
        let eval = v1::Eval {
            run: run.into(),
            cycle: 1,
            step,
            suite: "held".into(),
            perplexity: f64::from(step),
            ..Default::default()
        };
        self.publish(&format!("flotilla.{run}.eval.1.{step}.held"), FactBody::Eval(eval)).await
    }

    pub(crate) async fn finish(&self, run: &str) -> u64 {
        let done = v1::Done { status: v1::done::Status::Succeeded.into(), ..Default::default() };
        self.publish(&format!("flotilla.{run}.done"), FactBody::Done(done)).await
    }
}

/// Builds a submission with all files of `SPEC`.
pub(crate) fn submission(spec: &str) -> v1::SubmitRequest {
    let files = [
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("held.txt", "two and two are four"),
        ("data.jsonl", r#"{"prompt": "2+2=", "completion": "4"}"#),
    ];
    let files = files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
    v1::SubmitRequest { spec_yaml: spec.into(), files: BTreeMap::from(files), ..Default::default() }
}

/// Returns the next message of a stream, or its end.
pub(crate) async fn next<T>(stream: &mut tonic::Streaming<T>) -> Result<Option<T>, tonic::Status> {
    timeout(PATIENCE, stream.message()).await.expect("the stream is silent")
}
