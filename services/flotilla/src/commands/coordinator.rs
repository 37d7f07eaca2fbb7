//! `flotilla coordinator`: the coordinator and the gRPC gateway in one process.

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use bus::{Bus, Durability, LogLimit};
use control::Control;
use rustix::process::Signal;
use store::Store;
use wire::v1;

use crate::{cli::CoordinatorArgs, fleet::FleetArgs, signals, supervise::die_with_parent};

/// How long a silent leader is waited for: one server answers quickly, a cluster's own
/// failover takes up to 8 s.
const LEADER_LEASE: Duration = Duration::from_secs(3);
const LEADER_LEASE_CLUSTER: Duration = Duration::from_secs(15);

pub(crate) async fn coordinator(
    fleet: &FleetArgs,
    args: &CoordinatorArgs,
) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let stop = signals::stop_token()?;
    let bound = gateway::bind(gateway::Config { listen: args.gateway }).await?;
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
    bus.set_fleet_config(&config).await?;
    let coordinating = coordinator::Config {
        holder: format!("coordinator-{}", std::process::id()),
        lease: if prepared.replicas > 1 { LEADER_LEASE_CLUSTER } else { LEADER_LEASE },
        sizing: cycle::Sizing::default(),
        waiting: waiting(args.lease),
        keep: args.keep_cycles,
    };
    let control = Control::with_store(bus.clone(), store.clone());
    let (coordinated, served) = tokio::join!(
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
    );
    coordinated.context("coordinate")?;
    served.context("serve the gRPC API")?;
    Ok(ExitCode::SUCCESS)
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
            "where do files live? pass --store file:///DIR or s3://BUCKET/PREFIX the first time"
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
