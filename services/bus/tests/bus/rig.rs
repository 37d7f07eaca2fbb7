//! One server for one test, and facts to write.

use std::time::Duration;

use bus::{
    Bus, ConnectOptions, FactProducer,
    server::{ManagedServer, ServerOptions},
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use wire::{Fact, FactBody, v1};

/// Enough for anything that a correct bus does at once, on a machine busy with builds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) server: ManagedServer,
    _dir: TempDir,
}

impl Rig {
    /// A server with a prepared log.
    pub(crate) async fn start() -> (Self, Bus) {
        let rig = Self::bare().await;
        let bus = rig.bus("test").await;
        bus.prepare_log(1).await.unwrap();
        (rig, bus)
    }

    pub(crate) async fn bare() -> Self {
        let dir = TempDir::new().unwrap();
        let options = ServerOptions::new(dir.path());
        let server = match ManagedServer::start(&options).await {
            Ok(server) => server,
            Err(error) => panic!("{error} ({error:?}); run deploy/fetch-nats-server.sh first"),
        };
        Self { server, _dir: dir }
    }

    pub(crate) fn options(&self, name: &str) -> ConnectOptions {
        ConnectOptions {
            urls: vec![self.server.client_url()],
            monitor_urls: vec![self.server.monitor_url()],
            producer: FactProducer { name: name.to_owned(), role: "tester".to_owned() },
            ..Default::default()
        }
    }

    pub(crate) async fn bus(&self, name: &str) -> Bus {
        Bus::connect(&self.options(name)).await.unwrap()
    }

    /// Bypasses the bus, for messages that it would never write.
    pub(crate) async fn raw(&self) -> async_nats::jetstream::Context {
        async_nats::jetstream::new(async_nats::connect(self.server.client_url()).await.unwrap())
    }

    pub(crate) async fn kill(&self) {
        let pid = Pid::from_raw(i32::try_from(self.server.process_id()).unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        self.server.wait().await;
    }

    pub(crate) async fn kill_and_restart(&mut self) {
        self.kill().await;
        self.server.restart().await.unwrap();
    }
}

pub(crate) fn control(number: u64, reason: &str) -> Fact {
    Fact {
        subject: format!("flotilla.r1.control.{number}").parse().unwrap(),
        body: FactBody::Control(v1::Control {
            action: 1,
            reason: reason.to_owned(),
            ..Default::default()
        }),
    }
}

pub(crate) fn order(job: u64) -> Fact {
    Fact {
        subject: format!("flotilla.r1.order.generate.default.1.j{job}.1").parse().unwrap(),
        body: FactBody::GenerateOrder(v1::GenerateOrder {
            run: "r1".into(),
            cycle: 1,
            job: format!("j{job}"),
            attempt: 1,
            ..Default::default()
        }),
    }
}

/// Waits for a condition; the panic names it.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "still not: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}
