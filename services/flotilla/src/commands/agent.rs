//! `flotilla agent`: one process a box, hosting any of the roles.

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use evaluator::EvaluatorRole;
use generator::GeneratorRole;
use runtime::{Agent, Config, Launch, Role};
use rustix::process::Signal;
use store::Cache;
use trainer::TrainerRole;
use verifier::VerifierRole;
use wire::{AgentId, Pool};

use crate::{
    cli::AgentArgs,
    fleet::{self, FleetArgs},
    signals,
    supervise::die_with_parent,
};

pub(crate) const ROLES: [&str; 4] = ["trainer", "generator", "verifier", "evaluator"];

const GIB: f64 = (1_u64 << 30) as f64;

pub(crate) async fn agent(fleet: &FleetArgs, args: AgentArgs) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        die_with_parent(Signal::TERM);
    }
    let id = agent_id(&args)?;
    let stop = signals::stop_token()?;
    let bus = fleet.bus(id.as_str(), "agent").await?;
    let config = fleet::config(&bus).await?;
    let store = control::open_store(&config.store).await?;
    // A box that cannot use the store would only fail the jobs it takes.
    store.check().await?;
    let directory = agent_directory(&args, &id)?;
    let _lock = lock(&directory)?;
    let cache_directory = args.cache_dir.clone().unwrap_or_else(|| directory.join("cache"));
    let cache = Cache::open(&cache_directory, cache_bytes(args.cache_gib)?)?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let launch = Launch {
        program: std::env::current_exe().context("find this program")?,
        wrapper: args.worker_wrapper.clone(),
        silence: args.worker_silence.map(Duration::from_secs),
        threads: args.threads.map_or(cores, |threads| threads as usize),
        device: args.device.clone(),
        directory: directory.clone(),
    };
    let roles = roles(&args, &launch)?;
    let config = Config {
        id,
        pool: Pool::new(args.pool)?,
        directory,
        lease: Duration::from_secs_f64(config.lease_s),
    };
    Agent::new(config, bus, store, cache, roles).run(stop).await?;
    Ok(ExitCode::SUCCESS)
}

/// The name asked for, or this machine's in the form of an id.
fn agent_id(args: &AgentArgs) -> anyhow::Result<AgentId> {
    if let Some(name) = &args.name {
        return Ok(AgentId::new(name.as_str())?);
    }
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    AgentId::new(host.chars().map(legal).take(64).collect::<String>())
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

/// Two agents in one directory would take each other's files.
fn lock(directory: &Path) -> anyhow::Result<File> {
    let path = directory.join("lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            bail!("an agent works in {} already; pass --name or --agent-dir", directory.display())
        }
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("lock {}", path.display()))
        }
    }
}

fn cache_bytes(gib: f64) -> anyhow::Result<u64> {
    if !(0.01..=1e6).contains(&gib) {
        bail!("--cache-gib {gib}: must be from 0.01 to 1000000");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok((gib * GIB) as u64)
}

fn roles(args: &AgentArgs, launch: &Launch) -> anyhow::Result<Vec<Arc<dyn Role>>> {
    let mut roles: Vec<Arc<dyn Role>> = Vec::new();
    let mut named = args.roles.clone();
    named.sort();
    named.dedup();
    for role in &named {
        let launch = launch.clone();
        roles.push(match role.as_str() {
            "trainer" => Arc::new(TrainerRole::new(launch)),
            "generator" => {
                let slots = args.slots;
                Arc::new(GeneratorRole::new(generator::Config { launch, slots }))
            }
            "verifier" => Arc::new(VerifierRole::new(launch)),
            "evaluator" => Arc::new(EvaluatorRole::new(launch)),
            other => bail!("--roles {other}: the roles are {}", ROLES.join(", ")),
        });
    }
    Ok(roles)
}
