//! `flotilla agent`: one process a box, hosting any of the roles.

mod care;
pub(super) mod trainer;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use ::trainer::TrainerRole;
use anyhow::{Context, bail};
use authority::Shown;
use bus::Bus;
use evaluator::EvaluatorRole;
use generator::GeneratorRole;
use hardware::{Profile, files::Live, snapshot::Snapshot};
use runtime::{Agent, Config, Doctor, Exchange, Herd, Launch, Role};
use rustix::process::Signal;
use store::{Cache, Store};
use tokio_util::sync::CancellationToken;
use verifier::VerifierRole;
use wire::{AgentId, Pool, v1};

use crate::{
    cli::{AgentArgs, EvaluatorEngine},
    fleet::{self, FleetArgs},
    local, notify, occupant, signals,
    supervise::{STOP_LIMIT, die_with_parent},
    version::VERSION,
};

use super::{
    members::renew::{self, Renewal},
    watching::{self, Watching},
};

pub(crate) const ROLES: [&str; 4] = ["trainer", "generator", "verifier", "evaluator"];

/// What is done here, and what was asked for and cannot be.
type Roles = (Vec<Arc<dyn Role>>, Vec<v1::Withheld>);

const GIB: f64 = (1_u64 << 30) as f64;

pub(crate) async fn agent(fleet: &FleetArgs, mut args: AgentArgs) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let renewal = membership(fleet, &mut args).await?;
    let watching = Watching::of(&args.watch, &args.pool)?;
    let id = agent_id(&args, watching.as_ref())?;
    let stop = signals::stop_token()?;
    let bus = fleet.bus(id.as_str(), "agent").await?;
    let config = fleet::config(&bus).await?;
    let store = fleet.stores(&config, args.store.as_deref())?.open().await?;
    // A box that cannot use the store would only fail the jobs it takes.
    store.check().await?;
    let directory = agent_directory(&args, &id)?;
    let _lock = occupant::move_in(&directory, id.as_str())?;
    let cache_directory = args.cache_dir.clone().unwrap_or_else(|| directory.join("cache"));
    let exchange = exchange(fleet, &args, &id, (&bus, &store)).await?;
    let mut elsewhere = local::elsewhere(&args.models)?;
    elsewhere.peers = exchange.as_ref().map(Exchange::peers);
    let cache = Cache::with(&cache_directory, cache_bytes(args.cache_gib)?, elsewhere)?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let launch = Launch {
        program: std::env::current_exe().context("find this program")?,
        wrapper: args.worker_wrapper.clone(),
        silence: args.worker_silence.map(Duration::from_secs),
        threads: args.threads.map_or(cores, |threads| threads as usize),
        device: args.device.clone(),
        dtype: args.dtype.name().into(),
        directory: directory.clone(),
        profile: profile(&args)?,
        root: args.care.sysroot.clone(),
        herd: Herd::default(),
    };
    let watched = care::options(&args, launch.herd.clone()).await?;
    let doctor = doctor(&args)?;
    let (roles, withheld) = roles(&args, &launch, &doctor, &cache_directory)?;
    let config = Config {
        id: id.clone(),
        version: VERSION.into(),
        pool: Pool::new(args.pool)?,
        directory: directory.clone(),
        lease: Duration::from_secs_f64(config.lease_s),
        profile: launch.profile.name.clone(),
        doctor,
        withheld,
    };
    let agent =
        Agent::new(config, bus.clone(), store.clone(), cache.clone(), roles).watched(watched);
    let agent = match exchange {
        Some(exchange) => agent.exchanging(exchange),
        None => agent,
    };
    let agent = supervised(agent).leaving(signals::leave_token()?);
    let member = renewal.map(|renewal| renewal.keep(bus.clone()));
    let Some(watching) = watching else {
        while_member(member, &stop, agent.run(stop.clone())).await?;
        return Ok(ExitCode::SUCCESS);
    };
    watching.check(&bus, &store).await?;
    let over = watching.outcome();
    let agent = agent.beside("watcher", watching.work(id, &directory, bus, (store, cache)));
    while_member(member, &stop, agent.run(stop.clone())).await?;
    Ok(watching::code(over.get()))
}

/// Files from other agents: not for a directory of this machine, which is as near as they are.
async fn exchange(
    fleet: &FleetArgs,
    args: &AgentArgs,
    id: &AgentId,
    (bus, store): (&Bus, &Store),
) -> anyhow::Result<Option<Exchange>> {
    if args.no_peers || store.is_local() {
        return Ok(None);
    }
    let urls = fleet.options(id.as_str(), "agent")?.urls;
    let host = |url: &String| {
        let place = url.rsplit_once("://").map_or(url.as_str(), |(_, place)| place);
        place.rsplit_once('@').map_or(place, |(_, host)| host).trim_end_matches('/').to_owned()
    };
    let hosts = urls.iter().map(host).collect();
    Ok(Some(Exchange::open(args.peers, id, bus, hosts).await.context("--peers")?))
}

/// The service manager hears of it, where there is one.
fn supervised(agent: Agent) -> Agent {
    let Some(every) = notify::every() else { return agent };
    let mut ready = false;
    agent.reporting(every, move |status| {
        if !std::mem::replace(&mut ready, true) {
            notify::ready();
        }
        notify::alive(&notify::line(status));
    })
}

/// Who it is and what it may do, in a closed fleet, as its kit says; and what keeps that kit good.
async fn membership(fleet: &FleetArgs, args: &mut AgentArgs) -> anyhow::Result<Option<Renewal>> {
    let Some(directory) = &fleet.dir else { return Ok(None) };
    if let Some(granted) = renew::granted(directory)? {
        granted_only(&granted, args)?;
    }
    let renewal = Renewal::of(fleet)?;
    if let Some(renewal) = &renewal {
        renewal.now_if_due().await?;
    }
    Ok(renewal)
}

fn granted_only(granted: &Shown, args: &mut AgentArgs) -> anyhow::Result<()> {
    let Shown { name, roles, pool, .. } = granted;
    // An admin's directory is no agent's: whoever starts one there says what it is.
    let Some(pool) = pool else { return Ok(()) };
    if let Some(wanted) = args.name.as_deref().filter(|wanted| *wanted != name.as_str()) {
        bail!(
            "--name {wanted}: this kit is the one of {name}; leave --name out, or join again under that name (K105)"
        );
    }
    args.name = Some(name.to_string());
    pool.as_str().clone_into(&mut args.pool);
    let may = |role: &str| roles.iter().any(|granted| granted.as_str() == role);
    if let Some(role) = args.roles.iter().find(|role| !may(role)) {
        let granted: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
        bail!(
            "--roles {role}: {name} was let in as {}; ask for a join token with that role (K107)",
            granted.join(", ")
        );
    }
    if args.roles.is_empty() && args.watch.watch.is_none() {
        let works = roles.iter().map(|role| role.as_str()).filter(|role| ROLES.contains(role));
        args.roles = works.map(str::to_owned).collect();
    }
    Ok(())
}

/// Works until it is done, or is a member no more.
async fn while_member(
    member: Option<impl Future<Output = anyhow::Error>>,
    stop: &CancellationToken,
    working: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let Some(member) = member else { return working.await };
    tokio::pin!(working);
    tokio::select! {
        worked = &mut working => worked,
        cut_off = member => {
            tracing::error!(error = format!("{cut_off:#}"), "this agent is a member no more");
            stop.cancel();
            // What it holds is somebody else's by now; its children are still to be ended.
            let _ = tokio::time::timeout(STOP_LIMIT, working).await;
            Err(cut_off)
        }
    }
}

fn profile(args: &AgentArgs) -> anyhow::Result<Profile> {
    let profile = match &args.profile {
        Some(name) => Profile::named(name),
        None => Profile::of(&Snapshot::take(&Live::new(&args.care.sysroot))),
    };
    let profile = profile.context("choose the profile")?;
    tracing::info!(profile = profile.name, summary = profile.summary, "hardware profile");
    Ok(profile)
}

fn doctor(args: &AgentArgs) -> anyhow::Result<Doctor> {
    let is_id =
        |id: &&String| id.strip_prefix("C-").is_some_and(|number| number.parse::<u16>().is_ok());
    if let Some(wrong) = args.ignore_doctor.iter().find(|id| !is_id(id)) {
        bail!(
            "--ignore-doctor {wrong}: name findings as `flotilla doctor` does, such as C-28 (A101)"
        );
    }
    let training_bytes = args.training_gib.map(training_bytes).transpose()?;
    Ok(Doctor::new(args.care.sysroot.clone(), args.ignore_doctor.clone(), training_bytes))
}

fn training_bytes(gib: f64) -> anyhow::Result<u64> {
    if !(0.01..=1e6).contains(&gib) {
        bail!("--training-gib {gib}: must be from 0.01 to 1000000 (A101)");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok((gib * GIB) as u64)
}

/// The name asked for, or this machine's in the form of an id.
fn agent_id(args: &AgentArgs, watching: Option<&Watching>) -> anyhow::Result<AgentId> {
    if let Some(name) = &args.name {
        return Ok(AgentId::new(name.as_str())?);
    }
    if let Some(watching) = watching.filter(|_| args.roles.is_empty()) {
        return Ok(AgentId::new(watching::agent_name(&host(), watching.name()))?);
    }
    machine_name()
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().to_lowercase()
}

/// This machine's name, as an agent's.
pub(crate) fn machine_name() -> anyhow::Result<AgentId> {
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    AgentId::new(host().chars().map(legal).take(64).collect::<String>())
        .context("this machine's name does not do as an agent's; pass --name")
}

fn agent_directory(args: &AgentArgs, id: &AgentId) -> anyhow::Result<PathBuf> {
    let directory = match &args.agent_dir {
        Some(directory) => directory.clone(),
        None => {
            let home = std::env::var_os("HOME").context("HOME is not set; pass --agent-dir")?;
            PathBuf::from(home).join(".flotilla/agents").join(id.as_str())
        }
    };
    std::fs::create_dir_all(&directory)
        .and_then(|()| directory.canonicalize())
        .with_context(|| format!("use {} for an agent", directory.display()))
}

fn cache_bytes(gib: f64) -> anyhow::Result<u64> {
    if !(0.01..=1e6).contains(&gib) {
        bail!("--cache-gib {gib}: must be from 0.01 to 1000000 (A101)");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok((gib * GIB) as u64)
}

/// What its generator draws samples with.
fn generator_backend(
    args: &AgentArgs,
    launch: &Launch,
    cache: &Path,
) -> anyhow::Result<generator::Backend> {
    let places = generator::Places {
        shelf: cache.join("gguf"),
        shelf_bytes: cache_bytes(args.cache_gib)?,
        directory: launch.directory.join("generate"),
    };
    let wanted = generator::Wanted {
        choice: &args.generator_engine,
        llama_cpp: args.llama_cpp.as_deref(),
        endpoint_model: args.endpoint_model.as_deref(),
        endpoint_key_file: args.endpoint_key_file.as_deref(),
    };
    generator::Backend::choose(&wanted, &launch.profile, generator::Limits::of(launch), places)
}

fn roles(
    args: &AgentArgs,
    launch: &Launch,
    doctor: &Doctor,
    cache: &Path,
) -> anyhow::Result<Roles> {
    let (mut roles, mut withheld): Roles = (Vec::new(), Vec::new());
    let mut named = args.roles.clone();
    named.sort();
    named.dedup();
    for role in &named {
        let launch = launch.clone();
        roles.push(match role.as_str() {
            "trainer" => match trainer::config(args, launch, doctor.clone())? {
                Ok(config) => Arc::new(TrainerRole::new(config)),
                Err(found) => {
                    withheld.push(found);
                    continue;
                }
            },
            "generator" => {
                let (backend, slots) = (generator_backend(args, &launch, cache)?, args.slots);
                Arc::new(GeneratorRole::new(generator::Config { launch, backend, slots }))
            }
            "verifier" => {
                let kit = super::verify::kit(&args.tools, vec![launch.directory.clone()])?;
                Arc::new(VerifierRole::open(launch, kit))
            }
            "evaluator" => {
                let backend = evaluator_backend(args, &launch, cache)?;
                Arc::new(EvaluatorRole::new(launch, backend))
            }
            other => bail!("--roles {other}: the roles are {} (A101)", ROLES.join(", ")),
        });
    }
    if named.is_empty() && args.watch.watch.is_none() {
        bail!("which roles? pass --roles with some of {}, or --watch DIR (A100)", ROLES.join(", "));
    }
    if roles.is_empty() && !named.is_empty() {
        bail!("none of the roles asked for can be done here; what was logged says why (A112)");
    }
    Ok((roles, withheld))
}

fn evaluator_backend(
    args: &AgentArgs,
    launch: &Launch,
    cache: &Path,
) -> anyhow::Result<evaluator::Backend> {
    let choice = match args.evaluator_engine {
        EvaluatorEngine::Auto => evaluator::Choice::Auto,
        EvaluatorEngine::Candle => evaluator::Choice::Candle,
        EvaluatorEngine::LlamaCpp => evaluator::Choice::LlamaCpp,
    };
    let shelf_bytes = cache_bytes(args.cache_gib)?;
    let directory = args.llama_cpp.as_deref();
    evaluator::Backend::choose(choice, directory, launch, cache.join("gguf"), shelf_bytes)
        .context("--evaluator-engine")
}
