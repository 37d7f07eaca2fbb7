//! `flotilla coordinator`: the coordinator and the gateway in one process.

mod membership;
mod metrics_source;

use std::time::Duration;

use anyhow::Context;
use bus::{AckDurability, Bus, LogLimit};
use control::{FleetControl, MemberRegistry};
use coordinator::{FleetMetrics, LoopStatus};
use identity::FleetAuthority;
use metrics::MetricsEndpoint;
use rustix::process::Signal;
use store::Store;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use wire::v1;

use self::metrics_source::CoordinatorMetrics;
use crate::{
    args::CoordinatorArgs, fleet::FleetArgs, service_notify, signals, this_machine::gib_to_bytes,
};

/// One NATS server answers quickly.
const LEADER_LEASE: Duration = Duration::from_secs(3);
/// A cluster's own failover takes up to 8 s.
const LEADER_LEASE_CLUSTER: Duration = Duration::from_secs(15);

/// Time without an iteration of the control loop after which the watchdog signal stops. An
/// iteration may wait 10 minutes for the store.
const LOOP_STALL_LIMIT: Duration = Duration::from_secs(900);

/// Runs the coordinator and the gateway until stopped. If one of them ends, the other is stopped.
pub(crate) async fn run_coordinator(
    fleet: &FleetArgs,
    args: &CoordinatorArgs,
) -> anyhow::Result<()> {
    if args.die_with_parent {
        process::die_with_parent(Signal::TERM);
    }
    let stop = signals::stop_token()?;
    let keys =
        args.keys.as_deref().map(FleetAuthority::open).transpose().context("open the keys")?;
    let tls = keys.as_ref().map(membership::read_server_tls).transpose()?;
    let mut bound = gateway::bind_port(gateway::Config { listen: args.gateway, tls }).await?;
    let mut options = fleet.connect_options("coordinator", "coordinator")?;
    options.monitor_urls.clone_from(&args.monitor);
    let bus = Bus::connect(&options).await?;
    let limit = LogLimit {
        update_to: args.log_max_gib.map(gib_to_bytes),
        at_creation: args.new_log_max_gib.map(gib_to_bytes),
    };
    let prepared = bus.prepare_log_within(args.replicas as usize, limit).await?;
    warn_durability(prepared.durability);
    bus.prepare_exchanges(prepared.replicas).await?;
    let store = open_store(&bus, args).await?;
    let config = v1::FleetConfig {
        store: store.url().to_owned(),
        gateway: bound.local_address().to_string(),
        lease_s: args.lease,
    };
    if args.keys.is_some() {
        bus.prepare_members(args.replicas as usize).await?;
    }
    bus.write_fleet_config(&config).await?;
    bound = bound.with_redaction(args.redact.clone());
    let metrics = MetricsEndpoint::bind_optional(args.metrics).await.context("--metrics")?;
    let (turns, turned) = watch::channel(LoopStatus::default());
    let (figures, figured) = watch::channel(FleetMetrics::default());
    if let Some(keys) = &args.keys {
        let address = bound.local_address();
        let membership =
            membership::membership_config(args, keys, address, &options.urls, store.url());
        bound = bound.with_members(MemberRegistry::new(bus.clone(), membership));
    }
    let coordinating = coordinator_config(args, prepared.replicas, turns, figures);
    let (calls, observed) = (bound.call_counts(), bus.clone());
    let source =
        CoordinatorMetrics { turns: turned.clone(), figures: figured, bus: observed, calls };
    let exposing = async {
        if let Some(metrics) = metrics {
            stop.run_until_cancelled(metrics.serve_source(source)).await;
        }
    };
    let control = FleetControl::with_store(bus.clone(), store.clone());
    let (leading, keeper) = (turned.clone(), control.clone());
    let keeping = async {
        let kept = keeper.keep_channels(|| leading.borrow().leads);
        stop.run_until_cancelled(kept).await;
    };
    let reporting = report_to_systemd(turned, bus.clone(), stop.clone());
    let coordinate = coordinator::run(bus, store, coordinating, stop.clone());
    let serve = bound.serve_calls(control, stop.clone());
    let (coordinated, served, (), (), ()) = tokio::join!(
        stop_after(coordinate, &stop),
        stop_after(serve, &stop),
        reporting,
        exposing,
        keeping,
    );
    coordinated.context("coordinate")?;
    served.context("serve the gRPC API")?;
    Ok(())
}

fn coordinator_config(
    args: &CoordinatorArgs,
    replicas: usize,
    status_tx: watch::Sender<LoopStatus>,
    metrics_tx: watch::Sender<FleetMetrics>,
) -> coordinator::Config {
    coordinator::Config {
        candidate: format!("coordinator-{}", std::process::id()),
        lease: if replicas > 1 { LEADER_LEASE_CLUSTER } else { LEADER_LEASE },
        sizing: cycle::JobSizing::default(),
        timeouts: reissue_timeouts(args.lease),
        retention: args.keep_cycles,
        status_tx,
        metrics_tx,
    }
}

async fn stop_after<T>(future: impl Future<Output = T>, stop: &CancellationToken) -> T {
    let outcome = future.await;
    stop.cancel();
    outcome
}

/// Reports to systemd that the coordinator is alive while its loop iterates or the bus is
/// disconnected. Polled in the same task as the loop and the gateway.
async fn report_to_systemd(
    mut turns: watch::Receiver<LoopStatus>,
    bus: Bus,
    stop: CancellationToken,
) {
    let Some(every) = service_notify::status_interval() else { return };
    let replayed = turns.wait_for(|turn| turn.caught_up);
    if !matches!(stop.run_until_cancelled(replayed).await, Some(Ok(_))) {
        return;
    }
    service_notify::notify_ready();
    let (mut tick, mut turned) = (tokio::time::interval(every), Instant::now());
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        if turns.has_changed().unwrap_or(false) || !bus.is_connected() {
            turned = Instant::now();
        }
        let LoopStatus { leads, open_runs, last_sequence: facts, .. } = *turns.borrow_and_update();
        if turned.elapsed() < LOOP_STALL_LIMIT && bus.is_open() {
            let part = if leads { "leads" } else { "stands by" };
            service_notify::notify_alive(&format!("{part}, {open_runs} open runs, {facts} facts"));
        }
    }
}

/// The jobs of a dead agent are free after one lease plus the time to notice.
fn reissue_timeouts(lease_s: f64) -> cycle::ReissueTimeouts {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clap bounds it")]
    let lease_ms = (1000.0 * lease_s) as u64;
    cycle::ReissueTimeouts {
        unclaimed_ms: 2 * lease_ms + 10_000,
        ..cycle::ReissueTimeouts::default()
    }
}

async fn open_store(bus: &Bus, args: &CoordinatorArgs) -> anyhow::Result<Store> {
    let url = match (&args.store, bus.read_fleet_config().await?) {
        (Some(url), _) => url.clone(),
        (None, Some(config)) => config.store,
        (None, None) => anyhow::bail!(
            "no object store configured; pass --store file:///DIR or s3://BUCKET/PREFIX on the first start (S101)"
        ),
    };
    let store = Store::open(&url).await?;
    store.check_access().await?;
    Ok(store)
}

fn warn_durability(durability: AckDurability) {
    match durability {
        AckDurability::Always => {}
        AckDurability::Lazy => tracing::warn!(
            "the NATS server acknowledges before it has written to disk: a power loss can lose \
             what was acknowledged; set `jetstream {{ sync_interval: always }}`"
        ),
        AckDurability::Unknown => tracing::warn!(
            "cannot see whether the NATS server writes to disk before it acknowledges; \
             pass --monitor http://HOST:8222 to check"
        ),
    }
}
