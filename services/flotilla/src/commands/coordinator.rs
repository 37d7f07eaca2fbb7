//! `flotilla coordinator`: the coordinator and the gRPC gateway in one process.

mod closed;
mod figures;

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use authority::Authority;
use bus::{Bus, Durability, LogLimit};
use control::{Control, Members};
use coordinator::{Figures, Turn};
use metrics::Endpoint;
use rustix::process::Signal;
use store::Store;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use wire::v1;

use self::figures::Source;
use crate::{cli::CoordinatorArgs, fleet::FleetArgs, notify, signals, supervise::die_with_parent};

/// How long a silent leader is waited for: one server answers quickly, a cluster's own
/// failover takes up to 8 s.
const LEADER_LEASE: Duration = Duration::from_secs(3);
const LEADER_LEASE_CLUSTER: Duration = Duration::from_secs(15);

/// A turn of the loop may wait for the store as long as that is asked (10 minutes).
const TURN_LIMIT: Duration = Duration::from_secs(900);

pub(crate) async fn coordinator(
    fleet: &FleetArgs,
    args: &CoordinatorArgs,
) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let stop = signals::stop_token()?;
    let keys = args.keys.as_deref().map(Authority::open).transpose().context("open the keys")?;
    let tls = keys.as_ref().map(closed::tls).transpose()?;
    let mut bound = gateway::bind(gateway::Config { listen: args.gateway, tls }).await?;
    let mut options = fleet.options("coordinator", "coordinator")?;
    options.monitor_urls.clone_from(&args.monitor);
    let bus = Bus::connect(&options).await?;
    let limit =
        LogLimit { set: args.log_max_gib.map(bytes), at_creation: args.new_log_max_gib.map(bytes) };
    let prepared = bus.prepare_within(args.replicas as usize, limit).await?;
    warn_of(prepared.durability);
    let store = open_store(&bus, args).await?;
    let config = v1::FleetConfig {
        store: store.url().to_owned(),
        gateway: bound.address().to_string(),
        lease_s: args.lease,
    };
    if args.keys.is_some() {
        bus.prepare_members(args.replicas as usize).await?;
    }
    bus.set_fleet_config(&config).await?;
    let metrics = Endpoint::bind_if_any(args.metrics).await.context("--metrics")?;
    let (turns, turned) = watch::channel(Turn::default());
    let (figures, figured) = watch::channel(Figures::default());
    if let Some(keys) = &args.keys {
        let terms = closed::terms(args, keys, bound.address(), &options.urls, store.url());
        bound = bound.closed(Members::new(bus.clone(), terms));
    }
    let coordinating = coordinator::Config {
        holder: format!("coordinator-{}", std::process::id()),
        lease: if prepared.replicas > 1 { LEADER_LEASE_CLUSTER } else { LEADER_LEASE },
        sizing: cycle::Sizing::default(),
        waiting: waiting(args.lease),
        keep: args.keep_cycles,
        turns,
        figures,
    };
    let source =
        Source { turns: turned.clone(), figures: figured, bus: bus.clone(), calls: bound.counts() };
    let exposing = async {
        if let Some(metrics) = metrics {
            stop.run_until_cancelled(metrics.serve(source)).await;
        }
    };
    let control = Control::with_store(bus.clone(), store.clone());
    let reporting = report(turned, bus.clone(), stop.clone());
    let (coordinated, served, (), ()) = tokio::join!(
        async {
            let outcome = coordinator::run(bus, store, coordinating, stop.clone()).await;
            stop.cancel();
            outcome
        },
        async {
            let outcome = bound.serve(control, stop.clone()).await;
            stop.cancel();
            outcome
        },
        reporting,
        exposing,
    );
    coordinated.context("coordinate")?;
    served.context("serve the gRPC API")?;
    Ok(ExitCode::SUCCESS)
}

/// Tells the service manager that the coordinator goes on: its loop turns, or waits for a bus
/// that is away. Polled in one task with the loop and the gateway.
async fn report(mut turns: watch::Receiver<Turn>, bus: Bus, stop: CancellationToken) {
    let Some(every) = notify::every() else { return };
    let replayed = turns.wait_for(|turn| turn.caught_up);
    if !matches!(stop.run_until_cancelled(replayed).await, Some(Ok(_))) {
        return;
    }
    notify::ready();
    let (mut tick, mut turned) = (tokio::time::interval(every), Instant::now());
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        if turns.has_changed().unwrap_or(false) || !bus.is_connected() {
            turned = Instant::now();
        }
        let Turn { leads, open_runs, facts, .. } = *turns.borrow_and_update();
        if turned.elapsed() < TURN_LIMIT && bus.is_open() {
            let part = if leads { "leads" } else { "stands by" };
            notify::alive(&format!("{part}, {open_runs} open runs, {facts} facts"));
        }
    }
}

/// What an agent that died held comes back within a lease and what it takes to notice.
fn waiting(lease_s: f64) -> cycle::Waiting {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clap bounds it")]
    let lease_ms = (1000.0 * lease_s) as u64;
    cycle::Waiting { unheld_ms: 2 * lease_ms + 10_000, ..cycle::Waiting::default() }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "checked: a positive number of at most 2^50 bytes"
)]
fn bytes(gib: f64) -> u64 {
    (gib * (1_u64 << 30) as f64) as u64
}

async fn open_store(bus: &Bus, args: &CoordinatorArgs) -> anyhow::Result<Store> {
    let url = match (&args.store, bus.fleet_config().await?) {
        (Some(url), _) => url.clone(),
        (None, Some(config)) => config.store,
        (None, None) => anyhow::bail!(
            "where do files live? pass --store file:///DIR or s3://BUCKET/PREFIX the first time (S101)"
        ),
    };
    let store = Store::open(&url).await?;
    store.check().await?;
    Ok(store)
}

fn warn_of(durability: Durability) {
    match durability {
        Durability::Always => {}
        Durability::Lazy => tracing::warn!(
            "the NATS server acknowledges before it has written to disk: a power loss can lose \
             what was acknowledged; set `jetstream {{ sync_interval: always }}`"
        ),
        Durability::Unknown => tracing::warn!(
            "cannot see whether the NATS server writes to disk before it acknowledges; \
             pass --monitor http://HOST:8222 to check"
        ),
    }
}
