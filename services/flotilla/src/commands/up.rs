//! `flotilla up`: a fleet's services on this machine, supervised.
//!
//! Stops in the order of the arrows: agents first, then the coordinator, the bus last.

use std::{
    ffi::OsString,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use bus::server::{ManagedServer, ServerOptions};
use rustix::process::Signal;
use store::Store;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cli::{STOP_GRACE_S, UpArgs},
    fleet::{self, FleetArgs, FleetFile},
    signals,
    supervise::{Member, STOP_LIMIT, die_with_parent},
};

use super::agent::ROLES;

/// Agents that come before the coordinator could only leave again.
const COORDINATOR_LIMIT: Duration = Duration::from_secs(20);
const COORDINATOR_POLL: Duration = Duration::from_millis(50);

/// Bounds on what a new log may take when nobody says.
const LOG_GIB_MIN: f64 = 0.01;
const LOG_GIB_MAX: f64 = 64.0;

/// What the nats-server has below the fleet's directory.
const NATS: &str = "nats";

/// Between tries to bring the NATS server back.
const SERVER_PAUSE: Duration = Duration::from_secs(2);

pub(crate) async fn up(fleet: &FleetArgs, args: &UpArgs) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let directory = prepare_directory(fleet)?;
    let agents = parse_agents(&args.agents)?;
    let stop = signals::stop_token()?;
    let options = ServerOptions {
        binary: args.nats_server.clone(),
        port: args.port,
        listen: args.listen,
        ..ServerOptions::new(directory.join(NATS))
    };
    let mut server = ManagedServer::start(&options).await?;
    let file = FleetFile {
        nats: server.url(),
        gateway: gateway_address(args, &directory).await?.to_string(),
        store: store_url(args, &directory).await?,
        pid: std::process::id(),
    };
    file.write(&directory)?;
    let (working, coordinating) = (CancellationToken::new(), CancellationToken::new());
    let (workers, services) = (TaskTracker::new(), TaskTracker::new());
    let coordinator = coordinator(&file, &server, args, &directory);
    services.spawn(coordinator.supervise(coordinating.clone()));
    stop.run_until_cancelled(coordinator_ready(&file.nats)).await;
    for member in agent_members(&agents, args.threads, &file, &directory) {
        workers.spawn(member.supervise(working.clone()));
    }
    tracing::info!(nats = file.nats, gateway = file.gateway, store = file.store, "the fleet is up");
    attend(&mut server, &stop).await;
    finish(&workers, &working).await;
    finish(&services, &coordinating).await;
    server.stop().await;
    tracing::info!("the fleet is down");
    Ok(ExitCode::SUCCESS)
}

fn prepare_directory(fleet: &FleetArgs) -> anyhow::Result<PathBuf> {
    let directory =
        fleet.dir.as_ref().context("pass --dir DIR, where the fleet's files are to be")?;
    std::fs::create_dir_all(directory)
        .and_then(|()| directory.canonicalize())
        .with_context(|| format!("use {} for a fleet", directory.display()))
}

/// The address asked for, the one the fleet had, or a free one.
async fn gateway_address(args: &UpArgs, directory: &Path) -> anyhow::Result<SocketAddr> {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let before = FleetFile::read(directory)?.and_then(|file| file.gateway.parse().ok());
    if let (None, Some(listen)) = (args.gateway, before)
        && let Ok(bound) = gateway::bind(gateway::Config { listen }).await
    {
        return Ok(bound.address());
    }
    let listen = args.gateway.unwrap_or(free);
    Ok(gateway::bind(gateway::Config { listen }).await?.address())
}

/// The store asked for, or one here. Checked now: a coordinator that finds it unusable could
/// only be started again and again.
async fn store_url(args: &UpArgs, directory: &Path) -> anyhow::Result<String> {
    let here = || format!("file://{}/store", directory.display());
    let url = args.store.clone().unwrap_or_else(here);
    Store::open(&url).await?.check().await?;
    Ok(url)
}

/// Waits until the fleet can be joined; not for ever, as the coordinator may be long in coming.
async fn coordinator_ready(nats: &str) {
    let there = FleetArgs { nats: vec![nats.to_owned()], ..FleetArgs::default() };
    let joinable = async {
        let Ok(bus) = there.bus("up", "supervisor").await else { return };
        while fleet::config(&bus).await.is_err() {
            tokio::time::sleep(COORDINATOR_POLL).await;
        }
        bus.close().await;
    };
    // What is wrong then, the coordinator says.
    let _ = tokio::time::timeout(COORDINATOR_LIMIT, joinable).await;
}

/// Brings the NATS server back whenever it ends or ails, until stopped.
async fn attend(server: &mut ManagedServer, stop: &CancellationToken) {
    loop {
        tokio::select! {
            status = server.wait() => {
                tracing::error!(%status, "the nats-server ended; starting it again");
            }
            said = server.ailing() => {
                tracing::error!(said, "the nats-server cannot go on; starting it anew");
            }
            () = stop.cancelled() => return,
        }
        while let Err(error) = server.restart().await {
            tracing::error!(error = format!("{:#}", anyhow::Error::from(error)));
            if stop.run_until_cancelled(tokio::time::sleep(SERVER_PAUSE)).await.is_none() {
                return;
            }
        }
    }
}

async fn finish(members: &TaskTracker, stop: &CancellationToken) {
    stop.cancel();
    members.close();
    members.wait().await;
}

fn coordinator(
    file: &FleetFile,
    server: &ManagedServer,
    args: &UpArgs,
    directory: &Path,
) -> Member {
    let (log_limit, gib) = match args.log_max_gib {
        Some(gib) => ("--log-max-gib", gib),
        None => ("--new-log-max-gib", new_log_gib(&directory.join(NATS))),
    };
    let arguments = [
        "coordinator",
        "--nats",
        &file.nats,
        "--monitor",
        &server.monitor_url(),
        "--store",
        &file.store,
        "--gateway",
        &file.gateway,
        "--lease",
        &args.lease.to_string(),
        "--keep-cycles",
        &args.keep_cycles.to_string(),
        log_limit,
        &gib.to_string(),
        "--die-with-parent",
    ];
    Member {
        name: "coordinator".into(),
        arguments: arguments.map(OsString::from).to_vec(),
        log: directory.join("logs/coordinator.log"),
        may_leave: false,
        stop_limit: STOP_LIMIT,
    }
}

/// What a new log may take: it leaves half of what is free to everything else.
#[expect(clippy::cast_precision_loss, reason = "sizes of disks, in GiB")]
fn new_log_gib(directory: &Path) -> f64 {
    // A disk that cannot be asked has room, or the log will say that it has none.
    let free =
        rustix::fs::statvfs(directory).map_or(u64::MAX, |disk| disk.f_bavail * disk.f_frsize);
    (free as f64 / (1_u64 << 30) as f64 / 2.0).clamp(LOG_GIB_MIN, LOG_GIB_MAX)
}

/// Roles and how many agents of each.
fn parse_agents(wanted: &[String]) -> anyhow::Result<Vec<(String, u32)>> {
    let parse = |text: &String| {
        let (role, count) = text.split_once('=').unwrap_or((text, "1"));
        if !ROLES.contains(&role) {
            bail!("--agents {text}: the roles are {}", ROLES.join(", "));
        }
        let count = count.parse().ok().filter(|count| (1..=64).contains(count));
        let count =
            count.with_context(|| format!("--agents {text}: write {role}=N, N from 1 to 64"))?;
        Ok((role.to_owned(), count))
    };
    wanted.iter().map(parse).collect()
}

/// What a trainer that is told to end may take to hand its training over, as it reads it too.
fn stop_grace() -> Duration {
    let said = std::env::var("FLOTILLA_STOP_GRACE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(said.unwrap_or(STOP_GRACE_S))
}

/// Agents of one machine share its cores and its cache.
fn agent_members(
    agents: &[(String, u32)],
    threads: Option<u32>,
    file: &FleetFile,
    directory: &Path,
) -> Vec<Member> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let member = |role: &str, number: u32, threads: usize| {
        let name = format!("{role}-{number}");
        let home = directory.join("agents").join(&name);
        let mut arguments: Vec<OsString> = Vec::new();
        let fixed = ["agent", "--nats", &file.nats, "--roles", role, "--name", &name];
        arguments.extend(fixed.map(OsString::from));
        arguments.extend(["--agent-dir".into(), home.clone().into()]);
        arguments.extend(["--cache-dir".into(), directory.join("cache").into()]);
        arguments.extend(["--threads".into(), threads.to_string().into()]);
        arguments.push("--die-with-parent".into());
        let stop_limit = if role == "trainer" { STOP_LIMIT + stop_grace() } else { STOP_LIMIT };
        Member { name, arguments, log: home.join("agent.log"), may_leave: true, stop_limit }
    };
    let mut members = Vec::new();
    for (role, count) in agents {
        let threads = match (threads, role.as_str()) {
            (Some(threads), _) => threads as usize,
            // Generators work all at once; an eval must not slow the training beside it.
            (None, "generator") => cores.div_ceil(*count as usize),
            (None, "evaluator") => 1,
            (None, _) => cores,
        };
        members.extend((1..=*count).map(|number| member(role, number, threads)));
    }
    members
}
