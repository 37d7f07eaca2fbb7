//! `flotilla up`: a fleet's services on this machine, supervised.
//!
//! Stops in the order of the arrows: agents first, then the coordinator, the bus last.

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
use authority::{Fingerprint, Identity, Standing};
use bus::server::{ManagedServer, ServerOptions};
use control::{Members, MembersError, Terms};
use rustix::process::Signal;
use store::Store;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::AgentId;

use crate::{
    cli::{STOP_GRACE_S, UpArgs},
    discovery::Announcement,
    fleet::{self, FleetArgs, FleetFile},
    keys::{self, Keys},
    notify, signals,
    supervise::{Member, STOP_LIMIT, die_with_parent},
    version,
};

use super::{agent::ROLES, members::kit};

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
    super::backup::refuse_half_restored(&directory)?;
    let agents = parse_agents(&args.agents)?;
    let stop = signals::stop_token()?;
    // Held until the NATS server has its ports, so that they differ.
    let held = gateway_port(args, &directory).await?;
    let gateway = held.address();
    let keys = keys(args, &directory, gateway)?;
    let nats = directory.join(NATS);
    let options = ServerOptions {
        binary: args.nats_server.clone(),
        port: args.port,
        listen: args.listen,
        closed: keys.as_ref().map(|keys| keys.close(&nats)).transpose()?,
        ..ServerOptions::new(nats)
    };
    let mut server = ManagedServer::start(&options).await?;
    let file = FleetFile {
        nats: server.url(),
        gateway: gateway.to_string(),
        store: store_url(args, &directory).await?,
        pid: std::process::id(),
        identity: keys.as_ref().map(Keys::admin),
    };
    file.write(&directory)?;
    let member_ttl = args.closed.member_ttl;
    let lease = Duration::from_secs_f64(args.lease);
    let local =
        Local { file: &file, directory: &directory, keys: keys.as_ref(), member_ttl, lease };
    let (working, coordinating) = (CancellationToken::new(), CancellationToken::new());
    let (workers, services) = (TaskTracker::new(), TaskTracker::new());
    let coordinator = local.coordinator(&server, args)?;
    drop(held);
    services.spawn(coordinator.supervise(coordinating.clone()));
    let joinable = stop.run_until_cancelled(coordinator_ready(&directory)).await;
    let refused = local.admit(&agents).await?;
    for member in local.agents(&agents, args.threads) {
        if !refused.contains(&member.name) {
            workers.spawn(member.supervise(working.clone()));
        }
    }
    let FleetFile { nats, gateway: at, store, .. } = &file;
    tracing::info!(nats, gateway = at, store, page = file.page(), "the fleet is up");
    let _announced = if args.announce { announce(&file, &directory, gateway) } else { None };
    tokio::select! {
        () = attend(&mut server, &stop) => {}
        never = report(&file, &directory, joinable.unwrap_or(false)) => match never {},
    }
    finish(&workers, &working).await;
    finish(&services, &coordinating).await;
    server.stop().await;
    tracing::info!("the fleet is down");
    Ok(ExitCode::SUCCESS)
}

fn prepare_directory(fleet: &FleetArgs) -> anyhow::Result<PathBuf> {
    let directory =
        fleet.dir.as_ref().context("pass --dir DIR, where the fleet's files are to be (A103)")?;
    std::fs::create_dir_all(directory)
        .and_then(|()| directory.canonicalize())
        .with_context(|| format!("use {} for a fleet", directory.display()))
}

/// The address asked for, the one the fleet had, or a free one.
async fn gateway_port(args: &UpArgs, directory: &Path) -> anyhow::Result<gateway::Bound> {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let before = FleetFile::read(directory)?.and_then(|file| file.gateway.parse().ok());
    if let (None, Some(listen)) = (args.gateway, before)
        && let Ok(bound) = gateway::bind(gateway::Config { listen, tls: None }).await
    {
        return Ok(bound);
    }
    let listen = args.gateway.unwrap_or(free);
    Ok(gateway::bind(gateway::Config { listen, tls: None }).await?)
}

/// The store asked for, or one here. Checked now: a coordinator that finds it unusable could
/// only be started again and again.
async fn store_url(args: &UpArgs, directory: &Path) -> anyhow::Result<String> {
    let here = || format!("file://{}/store", directory.display());
    let url = args.store.clone().unwrap_or_else(here);
    Store::open(&url).await?.check().await?;
    Ok(url)
}

/// Tells the service manager that the fleet can be joined, once it can be, and that its services
/// are looked after. Polled in one task with what looks after them.
async fn report(file: &FleetFile, directory: &Path, mut joinable: bool) -> Infallible {
    let Some(every) = notify::every() else { return pending().await };
    while !joinable {
        joinable = coordinator_ready(directory).await;
    }
    notify::ready();
    let mut tick = tokio::time::interval(every);
    let status = format!("NATS at {}, gateway at {}", file.nats, file.gateway);
    loop {
        tick.tick().await;
        notify::alive(&status);
    }
}

/// Those of a closed fleet. A new one is closed unless it is to be open; one that was begun
/// without keys stays as it is.
fn keys(args: &UpArgs, directory: &Path, gateway: SocketAddr) -> anyhow::Result<Option<Keys>> {
    let has_keys = Keys::open(directory)?.is_some();
    if has_keys && args.closed.open {
        let keys = directory.join(keys::DIRECTORY);
        bail!(
            "--open: this fleet has keys, and its agents look for a closed one; leave --open out, \
             or begin another in a directory without {} (K105)",
            keys.display()
        );
    }
    let before = FleetFile::read(directory)?;
    if !has_keys && before.as_ref().is_some_and(|file| file.identity.is_some()) {
        bail!(
            "this fleet is closed, and its keys are missing: put {} back, from a backup if need be (K105)",
            directory.join(keys::DIRECTORY).display()
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
    Ok(Some(Keys::make(directory, "flotilla", &hosts)?.0))
}

/// Waits until the fleet can be joined, and says whether it can be; not for ever, as the
/// coordinator may be long in coming.
async fn coordinator_ready(directory: &Path) -> bool {
    let there = FleetArgs { dir: Some(directory.to_owned()), ..FleetArgs::default() };
    let joinable = async {
        let bus = loop {
            match there.bus("up", "supervisor").await {
                Ok(bus) => break bus,
                Err(_) => tokio::time::sleep(COORDINATOR_POLL).await,
            }
        };
        while fleet::config(&bus).await.is_err() {
            tokio::time::sleep(COORDINATOR_POLL).await;
        }
        bus.close().await;
    };
    // What is wrong then, the coordinator says.
    tokio::time::timeout(COORDINATOR_LIMIT, joinable).await.is_ok()
}

/// Says on this network that the fleet is here. A fleet works as well unannounced.
fn announce(file: &FleetFile, directory: &Path, gateway: SocketAddr) -> Option<Announcement> {
    let announced = || {
        let identity = file.identity.as_ref().map(|identity| identity.within(directory));
        let authority = identity.map(|identity| identity.read_ca()).transpose()?;
        let authority = authority.map(|pem| Fingerprint::of_pem(&pem)).transpose()?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        Announcement::begin(&name, gateway, authority.as_ref())
    };
    announced()
        .inspect_err(|error| tracing::warn!(error = format!("{error:#}"), "not announced"))
        .ok()
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

/// What members on this machine are given.
struct Local<'a> {
    file: &'a FleetFile,
    directory: &'a Path,
    keys: Option<&'a Keys>,
    /// In hours.
    member_ttl: f64,
    lease: Duration,
}

impl Local<'_> {
    fn coordinator(&self, server: &ManagedServer, args: &UpArgs) -> anyhow::Result<Member> {
        let (log_limit, gib) = match args.log_max_gib {
            Some(gib) => ("--log-max-gib", gib),
            None => ("--new-log-max-gib", new_log_gib(&self.directory.join(NATS))),
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
            let kit = keys.coordinator_kit();
            let identity = Some(Identity::named("coordinator"));
            FleetFile { identity, pid: 0, ..self.file.clone() }.write(&kit)?;
            arguments.extend(["--dir".into(), kit.into()]);
            arguments.extend(["--keys".into(), keys.directory().into()]);
            arguments.extend(["--member-ttl".into(), self.member_ttl.to_string().into()]);
            if !args.closed.hosts.is_empty() {
                arguments.extend(["--host".into(), args.closed.hosts.join(",").into()]);
            }
        }
        Ok(Member {
            name: "coordinator".into(),
            arguments,
            log: self.directory.join("logs/coordinator.log"),
            may_leave: false,
            stop_limit: STOP_LIMIT,
        })
    }

    /// Makes members of the agents, who stay so by themselves. Those who were cut off are left out.
    async fn admit(&self, agents: &[(String, u32)]) -> anyhow::Result<BTreeSet<String>> {
        let Some(keys) = self.keys else { return Ok(BTreeSet::new()) };
        let here = FleetArgs { dir: Some(self.directory.to_owned()), ..FleetArgs::default() };
        let bus = here.bus("up", "supervisor").await?;
        bus.prepare_members(1).await?;
        let terms = Terms {
            keys: keys.directory(),
            servers: vec![self.file.nats.clone()],
            nats: vec![self.file.nats.clone()],
            gateways: vec![self.file.gateway.clone()],
            store: self.file.store.clone(),
            member_ttl: hours(self.member_ttl),
            lease: self.lease,
        };
        let members = Members::new(bus.clone(), terms);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut refused = BTreeSet::new();
        for (role, number) in each(agents) {
            let name = agent_name(role, number);
            let pool = wire::Pool::new("default")?;
            let standing = Standing::Agent { roles: [role.parse()?].into(), pool };
            let member = authority::Member { name: AgentId::new(name.as_str())?, standing };
            let at = self.kit(&name);
            let key = Identity::named(&name).within(&at).public_key()?;
            match members.enlist_here(&member, &key, (&host, version::VERSION)).await {
                Ok(membership) => kit::finish(&at, &membership, &self.file.gateway)?,
                Err(error @ MembersError::Refused(_)) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(name, error, "this agent is not started");
                    refused.insert(name);
                }
                Err(error) => return Err(error).context("let the agents in"),
            }
        }
        bus.close().await;
        Ok(refused)
    }

    fn kit(&self, agent: &str) -> PathBuf {
        self.directory.join("agents").join(agent).join("kit")
    }

    /// Agents of one machine share its cores and its cache.
    fn agents(&self, agents: &[(String, u32)], threads: Option<u32>) -> Vec<Member> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let count = |role: &str| {
            agents.iter().filter(|(of, _)| of == role).map(|(_, count)| *count as usize).sum()
        };
        let members = each(agents).map(|(role, number)| {
            let threads = match (threads, role) {
                (Some(threads), _) => threads as usize,
                // Generators work all at once; an eval must not slow the training beside it.
                (None, "generator") => cores.div_ceil(count(role)),
                (None, "evaluator") => 1,
                (None, _) => cores,
            };
            self.agent(role, number, threads)
        });
        members.collect()
    }

    fn agent(&self, role: &str, number: u32, threads: usize) -> Member {
        let name = agent_name(role, number);
        let home = self.directory.join("agents").join(&name);
        let fixed = ["agent", "--nats", &self.file.nats, "--roles", role, "--name", &name];
        let mut arguments = fixed.map(OsString::from).to_vec();
        if self.keys.is_some() {
            arguments.extend(["--dir".into(), self.kit(&name).into()]);
        }
        arguments.extend(["--agent-dir".into(), home.clone().into()]);
        arguments.extend(["--cache-dir".into(), self.directory.join("cache").into()]);
        arguments.extend(["--threads".into(), threads.to_string().into()]);
        arguments.push("--die-with-parent".into());
        let stop_limit = if role == "trainer" { STOP_LIMIT + stop_grace() } else { STOP_LIMIT };
        Member { name, arguments, log: home.join("agent.log"), may_leave: true, stop_limit }
    }
}

fn hours(hours: f64) -> Duration {
    Duration::from_secs_f64(hours * 3600.0)
}

fn agent_name(role: &str, number: u32) -> String {
    format!("{role}-{number}")
}

/// Each agent that is wanted.
fn each(agents: &[(String, u32)]) -> impl Iterator<Item = (&str, u32)> {
    agents.iter().flat_map(|(role, count)| (1..=*count).map(|number| (role.as_str(), number)))
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
            bail!("--agents {text}: the roles are {} (A101)", ROLES.join(", "));
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
