//! `flotilla up`: a fleet's services on this machine, supervised.
//!
//! It starts the NATS server, then the coordinator with the gateway, then agents, and stops them in
//! the opposite order.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    ffi::OsString,
    future::pending,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use bus::server::{ManagedServer, ServerOptions};
use control::{MemberRegistry, MembershipConfig, MembershipError};
use identity::{Fingerprint, MemberIdentity, MemberKind};
use rustix::process::Signal;
use store::Store;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::AgentId;

use crate::{
    args::{ROLE_NAMES, STOP_GRACE_S, UpArgs},
    discovery::FleetAnnouncement,
    fleet::{self, FleetArgs, FleetFile},
    fleet_keys::{self, FleetKeys},
    service_notify, signals,
    supervisor::{STOP_LIMIT, SupervisedProcess, die_with_parent},
    version,
};

use super::members::credentials;

/// Maximum time to wait for the coordinator before the agents start. Agents that start earlier only
/// exit and restart.
const COORDINATOR_READY_LIMIT: Duration = Duration::from_secs(20);
/// Interval between two checks of the coordinator.
const COORDINATOR_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Minimum default size limit of a new log, in GiB.
const LOG_GIB_MIN: f64 = 0.01;
/// Maximum default size limit of a new log, in GiB.
const LOG_GIB_MAX: f64 = 64.0;

/// Name of the NATS server's directory below the fleet's directory.
const NATS_DIRECTORY: &str = "nats";

/// Interval between attempts to restart the NATS server.
const SERVER_RESTART_INTERVAL: Duration = Duration::from_secs(2);

/// Runs a fleet until stopped.
///
/// Start: reserve the gateway's port, NATS server, `fleet.json`, coordinator, agents. Stop: agents,
/// coordinator, NATS server.
pub(crate) async fn run_fleet(fleet: &FleetArgs, args: &UpArgs) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let directory = prepare_directory(fleet)?;
    super::backup::refuse_unfinished_restore(&directory)?;
    let agents = parse_agents(&args.agents)?;
    let stop = signals::stop_token()?;
    // The port stays reserved until the NATS server has its ports, so that they differ.
    let held = reserve_gateway_port(args, &directory).await?;
    let gateway = held.local_address();
    let keys = prepare_keys(args, &directory, gateway)?;
    let nats = directory.join(NATS_DIRECTORY);
    let options = ServerOptions {
        binary: args.nats_server.clone(),
        port: args.port,
        listen: args.listen,
        closed_fleet: keys.as_ref().map(|keys| keys.nats_server_config(&nats)).transpose()?,
        ..ServerOptions::new(nats)
    };
    let mut server = ManagedServer::start(&options).await?;
    let file = FleetFile {
        nats: server.client_url(),
        gateway: gateway.to_string(),
        store: checked_store_url(args, &directory).await?,
        pid: std::process::id(),
        identity: keys.as_ref().map(FleetKeys::admin_identity),
    };
    file.write(&directory)?;
    let member_ttl = args.closed.member_ttl;
    let lease = Duration::from_secs_f64(args.lease);
    let local = LocalFleet {
        file: &file,
        directory: &directory,
        keys: keys.as_ref(),
        member_ttl_hours: member_ttl,
        lease,
    };
    let (working, coordinating) = (CancellationToken::new(), CancellationToken::new());
    let (workers, services) = (TaskTracker::new(), TaskTracker::new());
    let coordinator = local.coordinator_process(&server, args)?;
    drop(held);
    services.spawn(coordinator.run_until_stopped(coordinating.clone()));
    let joinable = stop.run_until_cancelled(wait_coordinator_ready(&directory)).await;
    let refused = local.admit_agents(&agents).await?;
    for member in local.agent_processes(&agents, args.threads) {
        if !refused.contains(&member.name) {
            workers.spawn(member.run_until_stopped(working.clone()));
        }
    }
    let FleetFile { nats, gateway: at, store, .. } = &file;
    tracing::info!(nats, gateway = at, store, page = file.page_url(), "the fleet is up");
    let _announced =
        if args.announce { announce_gateway(&file, &directory, gateway) } else { None };
    tokio::select! {
        () = supervise_server(&mut server, &stop) => {}
        never = report_to_systemd(&file, &directory, joinable.unwrap_or(false)) => match never {},
    }
    stop_processes(&workers, &working).await;
    stop_processes(&services, &coordinating).await;
    server.stop().await;
    tracing::info!("the fleet is down");
    Ok(ExitCode::SUCCESS)
}

/// Creates the fleet's directory and returns its canonical path.
fn prepare_directory(fleet: &FleetArgs) -> anyhow::Result<PathBuf> {
    let directory = fleet.dir.as_ref().context("pass --dir DIR, the fleet's directory (A103)")?;
    std::fs::create_dir_all(directory)
        .and_then(|()| directory.canonicalize())
        .with_context(|| format!("use {} for a fleet", directory.display()))
}

/// Binds the gateway's address: the requested one, the previous one, or a free port.
async fn reserve_gateway_port(
    args: &UpArgs,
    directory: &Path,
) -> anyhow::Result<gateway::BoundGateway> {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let before = FleetFile::read(directory)?.and_then(|file| file.gateway.parse().ok());
    if let (None, Some(listen)) = (args.gateway, before)
        && let Ok(bound) = gateway::bind_port(gateway::Config { listen, tls: None }).await
    {
        return Ok(bound);
    }
    let listen = args.gateway.unwrap_or(free);
    Ok(gateway::bind_port(gateway::Config { listen, tls: None }).await?)
}

/// Returns the URL of the requested store, or of one below the fleet's directory. It is checked
/// now, because a coordinator with an unusable store would only restart forever.
async fn checked_store_url(args: &UpArgs, directory: &Path) -> anyhow::Result<String> {
    let here = || format!("file://{}/store", directory.display());
    let url = args.store.clone().unwrap_or_else(here);
    Store::open(&url).await?.check_access().await?;
    Ok(url)
}

/// Reports to systemd that the fleet is ready once it can be joined, then that it is alive. Polled
/// in the same task as the supervision of the NATS server.
async fn report_to_systemd(file: &FleetFile, directory: &Path, mut joinable: bool) -> Infallible {
    let Some(every) = service_notify::status_interval() else { return pending().await };
    while !joinable {
        joinable = wait_coordinator_ready(directory).await;
    }
    service_notify::notify_ready();
    let mut tick = tokio::time::interval(every);
    let status = format!("NATS at {}, gateway at {}", file.nats, file.gateway);
    loop {
        tick.tick().await;
        service_notify::notify_alive(&status);
    }
}

/// Returns the keys of a closed fleet. A new fleet is closed unless `--open` is set; an existing
/// fleet without keys stays open.
///
/// # Errors
/// If `--open` is set for a closed fleet, or the keys of a closed fleet are missing.
fn prepare_keys(
    args: &UpArgs,
    directory: &Path,
    gateway: SocketAddr,
) -> anyhow::Result<Option<FleetKeys>> {
    let has_keys = FleetKeys::open(directory)?.is_some();
    if has_keys && args.closed.open {
        let keys = directory.join(fleet_keys::KEYS_DIRECTORY);
        bail!(
            "--open: this fleet has keys, and its agents look for a closed one; leave --open out, \
             or begin another in a directory without {} (K105)",
            keys.display()
        );
    }
    let before = FleetFile::read(directory)?;
    if !has_keys && before.as_ref().is_some_and(|file| file.identity.is_some()) {
        bail!(
            "keys of this closed fleet are missing: restore {}, for example from a backup (K105)",
            directory.join(fleet_keys::KEYS_DIRECTORY).display()
        );
    }
    let was_open = !has_keys && before.is_some();
    if args.closed.open || was_open {
        for address in [args.listen, gateway.ip()].into_iter().filter(|ip| !ip.is_loopback()) {
            tracing::warn!(
                %address,
                "this fleet is open: whoever can reach that address may do everything; \
                 `flotilla init --dir {}` closes it",
                directory.display()
            );
        }
        return Ok(None);
    }
    let mut hosts = args.closed.hosts.clone();
    if hosts.is_empty() {
        hosts.push(rustix::system::uname().nodename().to_string_lossy().into_owned());
        let listens = [args.listen, gateway.ip()].into_iter().filter(|ip| !ip.is_unspecified());
        hosts.extend(listens.map(|ip| ip.to_string()));
    }
    Ok(Some(FleetKeys::create_or_open(directory, "flotilla", &hosts)?.0))
}

/// Waits until the fleet can be joined, at most `COORDINATOR_READY_LIMIT`. Returns false if it
/// still cannot.
async fn wait_coordinator_ready(directory: &Path) -> bool {
    let there = FleetArgs { dir: Some(directory.to_owned()), ..FleetArgs::default() };
    let joinable = async {
        let bus = loop {
            match there.connect_bus("up", "supervisor").await {
                Ok(bus) => break bus,
                Err(_) => tokio::time::sleep(COORDINATOR_POLL_INTERVAL).await,
            }
        };
        while fleet::read_fleet_config(&bus).await.is_err() {
            tokio::time::sleep(COORDINATOR_POLL_INTERVAL).await;
        }
        bus.close().await;
    };
    // The coordinator logs the reason.
    tokio::time::timeout(COORDINATOR_READY_LIMIT, joinable).await.is_ok()
}

/// Announces the fleet on this network. A failure is only logged: the fleet works without it.
fn announce_gateway(
    file: &FleetFile,
    directory: &Path,
    gateway: SocketAddr,
) -> Option<FleetAnnouncement> {
    let announced = || {
        let identity = file.identity.as_ref().map(|identity| identity.resolve_in(directory));
        let authority = identity.map(|identity| identity.read_ca()).transpose()?;
        let authority = authority.map(|pem| Fingerprint::from_pem(&pem)).transpose()?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        FleetAnnouncement::announce_fleet(&name, gateway, authority.as_ref())
    };
    announced()
        .inspect_err(|error| tracing::warn!(error = format!("{error:#}"), "not announced"))
        .ok()
}

/// Restarts the NATS server whenever it ends or is unhealthy, until stopped.
async fn supervise_server(server: &mut ManagedServer, stop: &CancellationToken) {
    loop {
        tokio::select! {
            status = server.wait() => {
                tracing::error!(%status, "nats-server exited; restarting it");
            }
            said = server.wait_unhealthy() => {
                tracing::error!(said, "nats-server is unhealthy; restarting it");
            }
            () = stop.cancelled() => return,
        }
        while let Err(error) = server.restart().await {
            tracing::error!(error = format!("{:#}", anyhow::Error::from(error)));
            if stop.run_until_cancelled(tokio::time::sleep(SERVER_RESTART_INTERVAL)).await.is_none()
            {
                return;
            }
        }
    }
}

/// Stops supervised processes and waits for their end.
async fn stop_processes(members: &TaskTracker, stop: &CancellationToken) {
    stop.cancel();
    members.close();
    members.wait().await;
}

/// The processes of a fleet on this machine, and what they need to join it.
struct LocalFleet<'a> {
    file: &'a FleetFile,
    directory: &'a Path,
    keys: Option<&'a FleetKeys>,
    /// Lifetime of agent credentials, in hours.
    member_ttl_hours: f64,
    lease: Duration,
}

impl LocalFleet<'_> {
    /// Returns the coordinator's process, and writes its credentials.
    fn coordinator_process(
        &self,
        server: &ManagedServer,
        args: &UpArgs,
    ) -> anyhow::Result<SupervisedProcess> {
        let (log_limit, gib) = match args.log_max_gib {
            Some(gib) => ("--log-max-gib", gib),
            None => ("--new-log-max-gib", default_log_gib(&self.directory.join(NATS_DIRECTORY))),
        };
        let fixed = [
            "coordinator",
            "--nats",
            &self.file.nats,
            "--monitor",
            &server.monitor_url(),
            "--store",
            &self.file.store,
            "--gateway",
            &self.file.gateway,
            "--lease",
            &args.lease.to_string(),
            "--keep-cycles",
            &args.keep_cycles.to_string(),
            log_limit,
            &gib.to_string(),
            "--die-with-parent",
        ];
        let mut arguments = fixed.map(OsString::from).to_vec();
        if let Some(address) = args.metrics {
            arguments.extend(["--metrics".into(), address.to_string().into()]);
        }
        if let Some(keys) = self.keys {
            let kit = keys.coordinator_directory();
            let identity = Some(MemberIdentity::with_default_files("coordinator"));
            FleetFile { identity, pid: 0, ..self.file.clone() }.write(&kit)?;
            arguments.extend(["--dir".into(), kit.into()]);
            arguments.extend(["--keys".into(), keys.keys_directory().into()]);
            arguments.extend(["--member-ttl".into(), self.member_ttl_hours.to_string().into()]);
            if !args.closed.hosts.is_empty() {
                arguments.extend(["--host".into(), args.closed.hosts.join(",").into()]);
            }
        }
        Ok(SupervisedProcess {
            name: "coordinator".into(),
            arguments,
            log: self.directory.join("logs/coordinator.log"),
            may_exit: false,
            stop_limit: STOP_LIMIT,
        })
    }

    /// Makes the agents members and writes their credentials, which they renew themselves. Returns
    /// the names of revoked agents, which must not start.
    async fn admit_agents(&self, agents: &[(String, u32)]) -> anyhow::Result<BTreeSet<String>> {
        let Some(keys) = self.keys else { return Ok(BTreeSet::new()) };
        let here = FleetArgs { dir: Some(self.directory.to_owned()), ..FleetArgs::default() };
        let bus = here.connect_bus("up", "supervisor").await?;
        bus.prepare_members(1).await?;
        let terms = MembershipConfig {
            keys_dir: keys.keys_directory(),
            nats_servers: vec![self.file.nats.clone()],
            advertised_nats: vec![self.file.nats.clone()],
            advertised_gateways: vec![self.file.gateway.clone()],
            store: self.file.store.clone(),
            member_ttl: duration_from_hours(self.member_ttl_hours),
            lease: self.lease,
        };
        let members = MemberRegistry::new(bus.clone(), terms);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut refused = BTreeSet::new();
        for (role, number) in each_agent(agents) {
            let name = format_agent_name(role, number);
            let pool = wire::Pool::new("default")?;
            let standing = MemberKind::Agent { roles: [role.parse()?].into(), pool };
            let member = identity::Member { name: AgentId::new(name.as_str())?, standing };
            let at = self.credentials_directory(&name);
            let key =
                MemberIdentity::with_default_files(&name).resolve_in(&at).ensure_public_key()?;
            match members.admit_local_agent(&member, &key, (&host, version::VERSION)).await {
                Ok(membership) => {
                    credentials::write_credentials(&at, &membership, &self.file.gateway)?;
                }
                Err(error @ MembershipError::Refused(_)) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(name, error, "agent not started");
                    refused.insert(name);
                }
                Err(error) => return Err(error).context("add the agents as members"),
            }
        }
        bus.close().await;
        Ok(refused)
    }

    /// Returns the credentials directory of an agent.
    fn credentials_directory(&self, agent: &str) -> PathBuf {
        self.directory.join("agents").join(agent).join("kit")
    }

    /// Returns the processes of all agents, which share the machine's cores and one cache.
    fn agent_processes(
        &self,
        agents: &[(String, u32)],
        threads: Option<u32>,
    ) -> Vec<SupervisedProcess> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let count = |role: &str| {
            agents.iter().filter(|(of, _)| of == role).map(|(_, count)| *count as usize).sum()
        };
        let members = each_agent(agents).map(|(role, number)| {
            let threads = match (threads, role) {
                (Some(threads), _) => threads as usize,
                // Generators all work at once; an evaluation must not slow down a training beside
                // it.
                (None, "generator") => cores.div_ceil(count(role)),
                (None, "evaluator") => 1,
                (None, _) => cores,
            };
            self.agent_process(role, number, threads)
        });
        members.collect()
    }

    /// Returns the process of one agent.
    fn agent_process(&self, role: &str, number: u32, threads: usize) -> SupervisedProcess {
        let name = format_agent_name(role, number);
        let home = self.directory.join("agents").join(&name);
        let fixed = ["agent", "--nats", &self.file.nats, "--roles", role, "--name", &name];
        let mut arguments = fixed.map(OsString::from).to_vec();
        if self.keys.is_some() {
            arguments.extend(["--dir".into(), self.credentials_directory(&name).into()]);
        }
        arguments.extend(["--agent-dir".into(), home.clone().into()]);
        arguments.extend(["--cache-dir".into(), self.directory.join("cache").into()]);
        arguments.extend(["--threads".into(), threads.to_string().into()]);
        arguments.push("--die-with-parent".into());
        let stop_limit =
            if role == "trainer" { STOP_LIMIT + trainer_stop_grace() } else { STOP_LIMIT };
        SupervisedProcess {
            name,
            arguments,
            log: home.join("agent.log"),
            may_exit: true,
            stop_limit,
        }
    }
}

/// Converts hours to a duration.
fn duration_from_hours(hours: f64) -> Duration {
    Duration::from_secs_f64(hours * 3600.0)
}

/// Returns the name of an agent: `generator-2`.
fn format_agent_name(role: &str, number: u32) -> String {
    format!("{role}-{number}")
}

/// Returns role and number of each agent, counted from 1.
fn each_agent(agents: &[(String, u32)]) -> impl Iterator<Item = (&str, u32)> {
    agents.iter().flat_map(|(role, count)| (1..=*count).map(|number| (role.as_str(), number)))
}

/// Returns the default size limit of a new log in GiB: half of the free disk space, within bounds.
#[expect(clippy::cast_precision_loss, reason = "sizes of disks, in GiB")]
fn default_log_gib(directory: &Path) -> f64 {
    // If the disk cannot be queried, its space is taken as unlimited; a full disk shows in the log.
    let free =
        rustix::fs::statvfs(directory).map_or(u64::MAX, |disk| disk.f_bavail * disk.f_frsize);
    (free as f64 / (1_u64 << 30) as f64 / 2.0).clamp(LOG_GIB_MIN, LOG_GIB_MAX)
}

/// Parses `ROLE[=N]`, with N from 1 to 64, to roles and agent counts.
fn parse_agents(wanted: &[String]) -> anyhow::Result<Vec<(String, u32)>> {
    let parse = |text: &String| {
        let (role, count) = text.split_once('=').unwrap_or((text, "1"));
        if !ROLE_NAMES.contains(&role) {
            bail!("--agents {text}: the roles are {} (A101)", ROLE_NAMES.join(", "));
        }
        let count = count.parse().ok().filter(|count| (1..=64).contains(count));
        let count =
            count.with_context(|| format!("--agents {text}: write {role}=N, N from 1 to 64"))?;
        Ok((role.to_owned(), count))
    };
    wanted.iter().map(parse).collect()
}

/// Returns the time that a stopped trainer has to hand over its training, from the same variable
/// that the trainer reads.
fn trainer_stop_grace() -> Duration {
    let said = std::env::var("FLOTILLA_STOP_GRACE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(said.unwrap_or(STOP_GRACE_S))
}
