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
    time::Duration,
};

use anyhow::{Context, bail};
use bus::server::{ManagedServer, ServerOptions};
use control::{MemberRegistry, MembershipConfig, MembershipError};
use gateway::{ReservedPort, discovery::FleetAnnouncement};
use identity::{Fingerprint, MemberIdentity, MemberKind};
use rustix::process::Signal;
use store::Store;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::AgentId;

use crate::{
    args::{ROLE_NAMES, STOP_GRACE_S, UpArgs},
    fleet::{self, FleetArgs, FleetFile},
    fleet_keys::FleetKeys,
    output, service_notify, signals,
    supervisor::{STOP_LIMIT, SupervisedProcess},
    this_machine::{self, SECONDS_PER_HOUR},
    version,
};

use super::{members::credentials, open};

/// Maximum time to wait for the coordinator before the agents start. Agents that start earlier only
/// exit and restart.
const COORDINATOR_READY_LIMIT: Duration = Duration::from_secs(20);
const COORDINATOR_POLL_INTERVAL: Duration = Duration::from_millis(50);

const LOG_GIB_MIN: f64 = 0.01;
const LOG_GIB_MAX: f64 = 64.0;

const NATS_DIRECTORY: &str = "nats";

const SERVER_RESTART_INTERVAL: Duration = Duration::from_secs(2);

/// Start: reserve the gateway's port, NATS server, `fleet.json`, coordinator, agents. Stop: agents,
/// coordinator, NATS server.
pub(crate) async fn run_fleet(fleet: &FleetArgs, args: &UpArgs) -> anyhow::Result<()> {
    if args.die_with_parent {
        process::die_with_parent(Signal::TERM);
    }
    let directory = prepare_directory(fleet)?;
    super::backup::refuse_unfinished_restore(&directory)?;
    let wanted = choose_agents(&args.agents, FleetFile::read(&directory)?.as_ref());
    let agents = parse_agents(&wanted)?;
    let stop = signals::stop_token()?;
    // Reserved until the end, so that no other program has it when the coordinator (re)starts.
    let reserved = reserve_gateway_port(args, &directory)?;
    let gateway = reserved.address();
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
        agents: wanted,
        identity: keys.as_ref().map(FleetKeys::admin_identity),
    };
    file.write(&directory)?;
    let local = LocalFleet { args, file: &file, directory: &directory, keys: keys.as_ref() };
    let (working, coordinating) = (CancellationToken::new(), CancellationToken::new());
    let (workers, services) = (TaskTracker::new(), TaskTracker::new());
    let coordinator = local.coordinator_process(&server)?;
    services.spawn(coordinator.run_until_stopped(coordinating.clone()));
    let joinable = stop.run_until_cancelled(wait_coordinator_ready(&directory)).await;
    let refused = local.admit_agents(&agents).await?;
    for member in local.agent_processes(&agents) {
        if !refused.contains(&member.name) {
            workers.spawn(member.run_until_stopped(working.clone()));
        }
    }
    let page = stop.run_until_cancelled(open::describe_page(&directory, &file)).await;
    report_started(&file, &directory, &agents, &page.unwrap_or_default());
    let _announced = if args.announce { announce_gateway(&directory, gateway) } else { None };
    tokio::select! {
        () = supervise_server(&mut server, &stop) => {}
        never = report_to_systemd(&file, &directory, joinable.unwrap_or(false)) => match never {},
    }
    stop_processes(&workers, &working).await;
    stop_processes(&services, &coordinating).await;
    server.stop().await;
    tracing::info!("the fleet is down");
    Ok(())
}

fn report_started(file: &FleetFile, directory: &Path, agents: &[LocalAgent], page: &str) {
    let FleetFile { nats, gateway, store, .. } = file;
    if output::stderr_is_terminal() {
        output::print_status_text(&next_steps(file, directory, agents, page));
        return;
    }
    let page = file.page_url();
    tracing::info!(nats, gateway, store, page, agents = list_agents(agents), "the fleet is up");
}

/// Returns the names of the agents, or how to start some.
fn list_agents(agents: &[LocalAgent]) -> String {
    if agents.is_empty() {
        return format!("none; --agents {} starts some here", ROLE_NAMES.join(","));
    }
    agents.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns what a user can do with a fleet that has just started.
fn next_steps(file: &FleetFile, directory: &Path, agents: &[LocalAgent], page: &str) -> String {
    let dir = output::escape_line(&directory.display().to_string());
    let agents = list_agents(agents);
    let add_box = match &file.identity {
        Some(_) => format!(
            "flotilla token create --dir {dir} --roles trainer,generator,verifier,evaluator"
        ),
        None if file.nats.contains("127.0.0.1") => {
            "start the fleet with --listen ADDRESS, then flotilla agent --nats URL there".to_owned()
        }
        None => format!("flotilla agent --nats {}    # on the other box", file.nats),
    };
    format!(
        "the fleet is up; its web page is {page}\n  \
         agents:             {agents}\n  \
         open the page:      flotilla open --dir {dir}\n  \
         is it healthy?      flotilla status --dir {dir}\n  \
         watch it:           flotilla watch --dir {dir}\n  \
         check a run spec:   flotilla run check --dir {dir} SPEC.yaml\n  \
         add another box:    {add_box}\n  \
         stop it:            Ctrl-C, or flotilla down --dir {dir}"
    )
}

fn prepare_directory(fleet: &FleetArgs) -> anyhow::Result<PathBuf> {
    let directory = fleet.require_directory()?;
    durable_files::create_directory(directory, 0o777)
        .and_then(|()| directory.canonicalize())
        .with_context(|| format!("use {} for a fleet", directory.display()))
}

/// Reserves the port that the user chose, else that of the last time, else any free one.
fn reserve_gateway_port(args: &UpArgs, directory: &Path) -> anyhow::Result<ReservedPort> {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let before = FleetFile::read(directory)?.and_then(|file| file.gateway.parse().ok());
    if let (None, Some(before)) = (args.gateway, before)
        && let Ok(reserved) = ReservedPort::reserve(before)
    {
        return Ok(reserved);
    }
    Ok(ReservedPort::reserve(args.gateway.unwrap_or(free))?)
}

/// Checked now, because a coordinator with an unusable store would only restart forever.
async fn checked_store_url(args: &UpArgs, directory: &Path) -> anyhow::Result<String> {
    let here = || format!("file://{}/store", directory.display());
    let url = args.store.clone().unwrap_or_else(here);
    Store::open(&url).await?.check_access().await?;
    Ok(url)
}

/// Polled in the same task as the supervision of the NATS server.
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

/// A new fleet is closed unless `--open` is set; an existing fleet without keys stays open.
fn prepare_keys(
    args: &UpArgs,
    directory: &Path,
    gateway: SocketAddr,
) -> anyhow::Result<Option<FleetKeys>> {
    let has_keys = FleetKeys::open(directory)?.is_some();
    if has_keys && args.closed.open {
        let keys = directory.join(fleet::KEYS_DIRECTORY);
        bail!(
            "--open: this fleet has keys, and its agents look for a closed one; leave --open out, \
             or begin another in a directory without {} (K105)",
            keys.display()
        );
    }
    let before = FleetFile::read(directory)?;
    if let Some(file) = &before {
        file.require_own(directory, "choose another directory for a fleet of your own")?;
    }
    if !has_keys && before.as_ref().is_some_and(|file| file.identity.is_some()) {
        bail!(
            "keys of this closed fleet are missing: restore {}, for example from a backup (K105)",
            directory.join(fleet::KEYS_DIRECTORY).display()
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
        hosts.push(this_machine::host_name());
        let listens = [args.listen, gateway.ip()].into_iter().filter(|ip| !ip.is_unspecified());
        hosts.extend(listens.map(|ip| ip.to_string()));
    }
    Ok(Some(FleetKeys::create_or_open(directory, "flotilla", &hosts)?.0))
}

async fn wait_coordinator_ready(directory: &Path) -> bool {
    let there = FleetArgs::in_directory(directory);
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

/// A failure is only logged: the fleet works without it.
fn announce_gateway(directory: &Path, gateway: SocketAddr) -> Option<FleetAnnouncement> {
    let announced = || {
        let member = FleetFile::read_member(directory)?;
        let authority = member.map(|(_, identity)| identity.read_ca()).transpose()?;
        let authority = authority.map(|pem| Fingerprint::from_pem(&pem)).transpose()?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let host = this_machine::host_name();
        FleetAnnouncement::announce_fleet(&name, &host, gateway, authority.as_ref())
    };
    announced()
        .inspect_err(|error| tracing::warn!(error = format!("{error:#}"), "not announced"))
        .ok()
}

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

async fn stop_processes(members: &TaskTracker, stop: &CancellationToken) {
    stop.cancel();
    members.close();
    members.wait().await;
}

struct LocalFleet<'a> {
    args: &'a UpArgs,
    file: &'a FleetFile,
    directory: &'a Path,
    keys: Option<&'a FleetKeys>,
}

struct LocalAgent {
    role: String,
    name: String,
}

impl LocalFleet<'_> {
    fn coordinator_process(&self, server: &ManagedServer) -> anyhow::Result<SupervisedProcess> {
        let args = self.args;
        let (log_limit, gib) = match args.log_max_gib {
            Some(gib) => ("--log-max-gib", gib),
            None => ("--new-log-max-gib", default_log_gib(&self.directory.join(NATS_DIRECTORY))),
        };
        let flags = [
            ("--nats", self.file.nats.clone()),
            ("--monitor", server.monitor_url()),
            ("--store", self.file.store.clone()),
            ("--gateway", self.file.gateway.clone()),
            ("--lease", args.lease.to_string()),
            ("--keep-cycles", args.keep_cycles.to_string()),
            (log_limit, gib.to_string()),
        ];
        let mut arguments: Vec<OsString> = vec!["coordinator".into(), "--die-with-parent".into()];
        arguments.extend(flags.into_iter().flat_map(|(flag, value)| [flag.into(), value.into()]));
        if let Some(address) = args.metrics {
            arguments.extend(["--metrics".into(), address.to_string().into()]);
        }
        if let Some(keys) = self.keys {
            let credentials = keys.coordinator_directory();
            let identity = Some(MemberIdentity::with_default_files("coordinator"));
            FleetFile { identity, pid: 0, ..self.file.clone() }.write(&credentials)?;
            arguments.extend(["--dir".into(), credentials.into()]);
            arguments.extend(["--keys".into(), keys.keys_directory().into()]);
            arguments.extend(["--member-ttl".into(), args.closed.member_ttl.to_string().into()]);
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

    /// Returns the names of revoked agents, which must not start.
    async fn admit_agents(&self, agents: &[LocalAgent]) -> anyhow::Result<BTreeSet<String>> {
        let Some(keys) = self.keys else { return Ok(BTreeSet::new()) };
        let here = FleetArgs::in_directory(self.directory);
        let bus = here.connect_bus("up", "supervisor").await?;
        bus.prepare_members(1).await?;
        let membership_config = MembershipConfig {
            keys_dir: keys.keys_directory(),
            nats_servers: vec![self.file.nats.clone()],
            advertised_nats: vec![self.file.nats.clone()],
            advertised_gateways: vec![self.file.gateway.clone()],
            store: self.file.store.clone(),
            member_ttl: Duration::from_secs_f64(self.args.closed.member_ttl * SECONDS_PER_HOUR),
            lease: Duration::from_secs_f64(self.args.lease),
        };
        let members = MemberRegistry::new(bus.clone(), membership_config);
        let host = this_machine::host_name();
        let mut refused = BTreeSet::new();
        for LocalAgent { role, name } in agents {
            let pool = wire::Pool::new("default")?;
            let standing = MemberKind::Agent { roles: [role.parse()?].into(), pool };
            let member = identity::Member { name: AgentId::new(name.as_str())?, standing };
            let at = self.credentials_directory(name);
            let key =
                MemberIdentity::with_default_files(name).resolve_in(&at).ensure_public_key()?;
            match members.admit_local_agent(&member, &key, (&host, version::VERSION)).await {
                Ok(membership) => {
                    credentials::write_credentials(&at, &membership, &self.file.gateway)?;
                }
                Err(error @ MembershipError::Refused(_)) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(name, error, "agent not started");
                    refused.insert(name.clone());
                }
                Err(error) => return Err(error).context("add the agents as members"),
            }
        }
        bus.close().await;
        Ok(refused)
    }

    fn credentials_directory(&self, agent: &str) -> PathBuf {
        credentials::find_below(&self.directory.join("agents").join(agent))
    }

    fn agent_processes(&self, agents: &[LocalAgent]) -> Vec<SupervisedProcess> {
        let cores = this_machine::cpu_cores();
        let generators = agents.iter().filter(|agent| agent.role == "generator").count();
        let process = |agent: &LocalAgent| {
            let threads = match (self.args.threads, agent.role.as_str()) {
                (Some(threads), _) => threads as usize,
                // Generators all work at once; an evaluation must not slow down a training beside
                // it.
                (None, "generator") => cores.div_ceil(generators),
                (None, "evaluator") => 1,
                (None, _) => cores,
            };
            self.agent_process(agent, threads)
        };
        agents.iter().map(process).collect()
    }

    fn agent_process(&self, agent: &LocalAgent, threads: usize) -> SupervisedProcess {
        let LocalAgent { role, name } = agent;
        let home = self.directory.join("agents").join(name);
        let fixed = ["agent", "--nats", &self.file.nats, "--roles", role, "--name", name];
        let mut arguments = fixed.map(OsString::from).to_vec();
        if self.keys.is_some() {
            arguments.extend(["--dir".into(), self.credentials_directory(name).into()]);
        }
        arguments.extend(["--agent-dir".into(), home.clone().into()]);
        arguments.extend(["--cache-dir".into(), self.directory.join("cache").into()]);
        arguments.extend(["--threads".into(), threads.to_string().into()]);
        arguments.push("--die-with-parent".into());
        let stop_limit =
            if role == "trainer" { STOP_LIMIT + trainer_stop_grace() } else { STOP_LIMIT };
        let log = home.join("agent.log");
        SupervisedProcess { name: name.clone(), arguments, log, may_exit: true, stop_limit }
    }
}

/// Half of the free disk space, within bounds.
#[expect(clippy::cast_precision_loss, reason = "sizes of disks, in GiB")]
fn default_log_gib(directory: &Path) -> f64 {
    // If the disk cannot be queried, its space is taken as unlimited; a full disk shows in the log.
    let free =
        rustix::fs::statvfs(directory).map_or(u64::MAX, |disk| disk.f_bavail * disk.f_frsize);
    (free as f64 / (1_u64 << 30) as f64 / 2.0).clamp(LOG_GIB_MIN, LOG_GIB_MAX)
}

/// Returns the agents of the command line, else those that the fleet had before.
fn choose_agents(wanted: &[String], before: Option<&FleetFile>) -> Vec<String> {
    match wanted {
        [] => before.map(|file| file.agents.clone()).unwrap_or_default(),
        [none] if none == "none" => Vec::new(),
        _ => wanted.to_vec(),
    }
}

fn parse_agents(wanted: &[String]) -> anyhow::Result<Vec<LocalAgent>> {
    let mut agents = Vec::new();
    for text in wanted {
        let (role, count) = text.split_once('=').unwrap_or((text, "1"));
        if !ROLE_NAMES.contains(&role) {
            bail!("--agents {text}: the roles are {} (A101)", ROLE_NAMES.join(", "));
        }
        let count: Option<u32> = count.parse().ok().filter(|count| (1..=64).contains(count));
        let count = count
            .with_context(|| format!("--agents {text}: write {role}=N, N from 1 to 64 (A101)"))?;
        let agent = |number| LocalAgent { role: role.to_owned(), name: format!("{role}-{number}") };
        agents.extend((1..=count).map(agent));
    }
    Ok(agents)
}

/// From the same variable that the trainer reads.
fn trainer_stop_grace() -> Duration {
    let said = std::env::var("FLOTILLA_STOP_GRACE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(said.unwrap_or(STOP_GRACE_S))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_starts_the_agents_that_it_had_unless_others_are_named() {
        let list = |text: &str| text.split_terminator(',').map(str::to_owned).collect::<Vec<_>>();
        let text = r#"{"nats": "nats://a:1", "gateway": "a:2", "store": "file:///c",
            "agents": ["trainer", "generator=2"]}"#;
        let before: FleetFile = serde_json::from_str(text).unwrap();
        let wrong = parse_agents(&list("generator=x")).map(drop).unwrap_err().to_string();
        assert!(wrong.ends_with("write generator=N, N from 1 to 64 (A101)"), "{wrong}");
        for (wanted, before, chosen) in [
            ("", Some(&before), "trainer-1, generator-1, generator-2"),
            ("verifier", Some(&before), "verifier-1"),
            ("none", Some(&before), "none; --agents trainer,generator,verifier,"),
            ("", None, "none; --agents trainer,generator,verifier,"),
        ] {
            let agents = parse_agents(&choose_agents(&list(wanted), before)).unwrap();
            let listed = list_agents(&agents);
            assert!(listed.starts_with(chosen), "{wanted:?}: {listed}");
        }
    }
}
