//! `flotilla agent`: one process per box, with any of the roles.

mod telemetry_options;
mod trainer;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use ::trainer::TrainerRole;
use agent::{
    Agent, AgentConfig, AgentIntervals, AgentRole, AgentStack, HostDoctor, PeerExchange,
    ProcessGroups, WATCHER_TASK, WorkerLauncher, agent_lock,
};
use anyhow::{Context, bail};
use bus::Bus;
use evaluator::EvaluatorRole;
use futures::FutureExt;
use gateway::client::MembershipRenewal;
use generator::GeneratorRole;
use hardware::{HardwareProfile, host_files::LiveFiles};
use identity::{BearerInfo, UserScope};
use model_server::{ModelServerConfig, ServingEngine};
use rustix::process::{DumpableBehavior, Signal, set_dumpable_behavior};
use scorer::ScorerRole;
use store::{FileCache, Store};
use tokio_util::sync::CancellationToken;
use verifier::{EnvironmentHost, VerifierRole};
use wire::{AgentId, Pool, v1};

use crate::{
    args::{AgentArgs, EvaluatorEngine, ROLE_NAMES, SERVER_ROLE},
    fleet::{self, FleetArgs},
    local_models, output, service_notify, signals,
    supervisor::STOP_LIMIT,
    this_machine::{self, cpu_cores, gib_to_bytes, this_program},
    version::VERSION,
};

use super::{
    adopt::{self, TrainingAdoption},
    members::{self, credentials},
    stack,
};

/// Interval between two looks whether the agent is ready.
const READY_POLL_INTERVAL: Duration = Duration::from_secs(1);

type EnabledRoles = (Vec<Arc<dyn AgentRole>>, Vec<v1::Withheld>);

pub(crate) async fn run_agent(fleet: &FleetArgs, mut args: AgentArgs) -> anyhow::Result<ExitCode> {
    if args.die_with_parent {
        process::die_with_parent(Signal::TERM);
    }
    prevent_inspection()?;
    let stack = stack::apply_stack(&mut args)?;
    let renewal = prepare_membership(fleet, &mut args).await?;
    let watching = TrainingAdoption::from_args(&args.watch, &args.pool)?;
    let id = choose_agent_id(&args, watching.as_ref())?;
    let stop = signals::stop_token()?;
    let bus = fleet.connect_bus(id.as_str(), "agent").await?;
    let config = fleet::read_fleet_config(&bus).await?;
    let store = fleet.store_access(&config, args.store.as_deref())?.open().await?;
    // A box that cannot use the store would fail every job it takes.
    store.check_access().await?;
    let directory = create_agent_directory(&args, &id)?;
    let _lock = agent_lock::acquire_lock(&directory, id.as_str())?;
    let cache_directory = args.cache_dir.clone().unwrap_or_else(|| directory.join("cache"));
    let exchange = open_peer_exchange(fleet, &args, &id, (&bus, &store)).await?;
    let mut elsewhere = local_models::find_external_sources(&args.models)?;
    elsewhere.peers = exchange.as_ref().map(PeerExchange::peer_handle);
    let bytes = parse_gib("--cache-gib", args.cache_gib)?;
    let cache = FileCache::open_with_sources(&cache_directory, bytes, elsewhere)?;
    let launch = create_worker_launcher(&args, &directory)?;
    let watched =
        telemetry_options::build_telemetry_options(&args, launch.process_groups.clone()).await?;
    let doctor = create_doctor(&args)?.with_profile(&launch.profile);
    let stored = store.is_local().then(|| args.store.clone().unwrap_or(config.store));
    let own = collect_hidden_paths(fleet, &args, &directory, stored.as_deref());
    let serving = model_server_config(&args, &launch, &id, &cache_directory)?;
    let (roles, withheld) = create_roles(&args, &launch, &doctor, (&cache_directory, own))?;
    let config = AgentConfig {
        id: id.clone(),
        version: VERSION.into(),
        pool: Pool::new(args.pool)?,
        directory: directory.clone(),
        lease: Duration::from_secs_f64(config.lease_s),
        profile: launch.profile.name.clone(),
        stack: AgentStack { known: launch.profile.stack.clone(), ..stack },
        doctor,
        intervals: AgentIntervals {
            host_check: Duration::from_secs(args.care.host_check_every),
            status_record: Duration::from_secs(args.care.status_record_every),
        },
        withheld,
    };
    let agent = Agent::new(config, bus.clone(), store.clone(), cache.clone(), roles)
        .with_telemetry(watched);
    let agent = match exchange {
        Some(exchange) => agent.with_exchange(exchange),
        None => agent,
    };
    let agent = with_model_server(agent, serving, &bus, (&store, &cache));
    let agent = with_service_status(agent).with_drain_request(signals::drain_token()?);
    let member = renewal.map(|renewal| renewal.run_until_revoked(bus.clone()));
    let Some(watching) = watching else {
        run_while_member(member, &stop, agent.run(stop.clone())).await?;
        report_stop(&id);
        return Ok(ExitCode::SUCCESS);
    };
    watching.check_spec(&bus, &store).await?;
    let over = watching.final_status.clone();
    let agent = agent.with_background_task(
        WATCHER_TASK,
        watching.into_task(id, &directory, bus, (store, cache)),
    );
    run_while_member(member, &stop, agent.run(stop.clone())).await?;
    Ok(adopt::watched_exit_code(over.get()))
}

fn with_model_server(
    agent: Agent,
    serving: Option<ModelServerConfig>,
    bus: &Bus,
    (store, cache): (&Store, &FileCache),
) -> Agent {
    let Some(serving) = serving else { return agent };
    let (bus, files) = (bus.clone(), (store.clone(), cache.clone()));
    agent.with_background_task(SERVER_ROLE, move |context| {
        model_server::serve_channels(serving, bus, files, context).boxed()
    })
}

fn create_worker_launcher(args: &AgentArgs, directory: &Path) -> anyhow::Result<WorkerLauncher> {
    Ok(WorkerLauncher {
        program: this_program()?,
        wrapper: args.worker_wrapper.clone(),
        silence_limit: args.worker_silence.map(Duration::from_secs),
        threads: args.threads.map_or_else(cpu_cores, |threads| threads as usize),
        device: args.device.clone(),
        dtype: args.dtype.type_name().into(),
        directory: directory.to_owned(),
        profile: choose_profile(args)?,
        root: args.care.sysroot.clone(),
        process_groups: ProcessGroups::default(),
    })
}

/// Returns the paths that no program run for a verifier may see: this agent's files, its
/// credentials, the whole directory of a fleet that any of them lies in (its keys, and the
/// credentials of its other members), a store on this machine, and files with secrets that were
/// named.
fn collect_hidden_paths(
    fleet: &FleetArgs,
    args: &AgentArgs,
    directory: &Path,
    store: Option<&str>,
) -> Vec<PathBuf> {
    let FleetArgs { dir, nats_creds, nats_key, .. } = fleet;
    let named =
        [dir, nats_creds, nats_key, &args.generator_tools.endpoint_key_file, &args.cache_dir];
    let named = named.into_iter().flatten().cloned();
    let store = store.and_then(|url| url.strip_prefix("file://")).map(PathBuf::from);
    let own: Vec<PathBuf> = named.chain([directory.to_owned()]).chain(store).collect();
    let fleets: BTreeSet<PathBuf> =
        own.iter().filter_map(|path| find_fleet_directory(path)).collect();
    fleets.into_iter().chain(own).collect()
}

fn find_fleet_directory(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let is_fleet = |above: &&Path| above.join("keys").is_dir() || above.join("fleet.json").exists();
    absolute.ancestors().skip(1).find(is_fleet).map(Path::to_owned)
}

/// Keeps other programs of this user from reading its memory, environment and open files.
fn prevent_inspection() -> anyhow::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .context("protect this process's memory from other processes")
}

/// A store that is a directory on this machine is at least as fast as other agents.
async fn open_peer_exchange(
    fleet: &FleetArgs,
    args: &AgentArgs,
    id: &AgentId,
    (bus, store): (&Bus, &Store),
) -> anyhow::Result<Option<PeerExchange>> {
    if args.no_peers || store.is_local() {
        return Ok(None);
    }
    let urls = fleet.connect_options(id.as_str(), "agent")?.urls;
    let host = |url: &String| {
        let place = url.rsplit_once("://").map_or(url.as_str(), |(_, place)| place);
        place.rsplit_once('@').map_or(place, |(_, host)| host).trim_end_matches('/').to_owned()
    };
    let hosts = urls.iter().map(host).collect();
    Ok(Some(PeerExchange::listen_at(args.peers, id, bus, hosts).await.context("--peers")?))
}

fn with_service_status(agent: Agent) -> Agent {
    let Some(every) = service_notify::status_interval() else { return with_ready_message(agent) };
    let mut ready = false;
    agent.with_status_reports(every, move |status| {
        if !std::mem::replace(&mut ready, true) {
            service_notify::notify_ready();
        }
        service_notify::notify_alive(&run_view::status_line(status));
    })
}

/// Tells a person at a terminal once that the agent is ready.
fn with_ready_message(agent: Agent) -> Agent {
    if !output::stderr_is_terminal() {
        return agent;
    }
    let mut is_announced = false;
    agent.with_status_reports(READY_POLL_INTERVAL, move |status| {
        if !is_announced && let Some(line) = ready_line(status) {
            output::print_message(&line);
            is_announced = true;
        }
    })
}

/// Returns a line about an agent that takes work.
fn ready_line(status: &v1::AgentStatus) -> Option<String> {
    let is_ready = status.state() == v1::agent_status::State::Ready;
    let v1::AgentStatus { agent, roles, pool, .. } = status;
    is_ready.then(|| {
        format!("{agent} is ready in the pool {pool}, as {}; Ctrl-C stops it", roles.join(", "))
    })
}

fn report_stop(id: &AgentId) {
    if output::stderr_is_terminal() {
        output::print_message(&format!("{id} has stopped; other agents take its open jobs"));
    }
}

async fn prepare_membership(
    fleet: &FleetArgs,
    args: &mut AgentArgs,
) -> anyhow::Result<Option<MembershipRenewal>> {
    let Some(directory) = &fleet.dir else { return Ok(None) };
    if let Some(granted) = credentials::read_grant(directory)? {
        apply_grant(&granted, args)?;
    }
    let renewal = members::membership_renewal(directory)?;
    if let Some(renewal) = &renewal {
        renewal.renew_if_due().await?;
    }
    Ok(renewal)
}

fn apply_grant(granted: &BearerInfo, args: &mut AgentArgs) -> anyhow::Result<()> {
    let BearerInfo { name, scope, roles, pool } = granted;
    if let Some(scope @ (UserScope::Client | UserScope::Reader | UserScope::Operator)) = scope {
        bail!("{name} is a user ({scope}), not an agent; run `flotilla join` with a token (K104)");
    }
    // The credentials of an admin have no pool: an agent started with them takes its name and roles
    // from the arguments.
    let Some(pool) = pool else { return Ok(()) };
    if let Some(wanted) = args.name.as_deref().filter(|wanted| *wanted != name.as_str()) {
        bail!(
            "--name {wanted}: these credentials belong to {name}; omit --name, or join again under that name (K105)"
        );
    }
    args.name = Some(name.to_string());
    pool.as_str().clone_into(&mut args.pool);
    let may = |role: &str| roles.iter().any(|granted| granted.as_str() == role);
    if let Some(role) = args.roles.iter().find(|role| !may(role)) {
        let granted: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
        bail!(
            "--roles {role}: {name} is a member with the roles {}; request a join token with that role (K107)",
            granted.join(", ")
        );
    }
    if args.roles.is_empty() && args.watch.watch.is_none() {
        let works = roles.iter().map(|role| role.as_str()).filter(|role| ROLE_NAMES.contains(role));
        args.roles = works.map(str::to_owned).collect();
    }
    Ok(())
}

async fn run_while_member(
    member: Option<impl Future<Output = anyhow::Error>>,
    stop: &CancellationToken,
    working: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let Some(member) = member else { return working.await };
    tokio::pin!(working);
    tokio::select! {
        worked = &mut working => worked,
        cut_off = member => {
            tracing::error!(error = format!("{cut_off:#}"), "this agent's membership was revoked");
            stop.cancel();
            // Other agents take over its jobs; its child processes still have to end.
            let _ = tokio::time::timeout(STOP_LIMIT, working).await;
            Err(cut_off)
        }
    }
}

fn choose_profile(args: &AgentArgs) -> anyhow::Result<HardwareProfile> {
    let files = LiveFiles::new(&args.care.sysroot);
    let profile = HardwareProfile::choose_for_host(args.profile.as_deref(), &files)
        .context("choose the profile")?;
    tracing::info!(profile = profile.name, summary = profile.summary, "hardware profile");
    Ok(profile)
}

fn create_doctor(args: &AgentArgs) -> anyhow::Result<HostDoctor> {
    let is_id =
        |id: &&String| id.strip_prefix("C-").is_some_and(|number| number.parse::<u16>().is_ok());
    if let Some(wrong) = args.ignore_doctor.iter().find(|id| !is_id(id)) {
        bail!(
            "--ignore-doctor {wrong}: not a finding; use an id that `flotilla doctor` prints, such as C-28 (A101)"
        );
    }
    let training_bytes =
        args.training_gib.map(|gib| parse_gib("--training-gib", gib)).transpose()?;
    Ok(HostDoctor::new(args.care.sysroot.clone(), args.ignore_doctor.clone(), training_bytes))
}

fn parse_gib(flag: &str, gib: f64) -> anyhow::Result<u64> {
    if !(0.01..=1e6).contains(&gib) {
        bail!("{flag} {gib}: must be from 0.01 to 1000000 (A101)");
    }
    Ok(gib_to_bytes(gib))
}

fn choose_agent_id(
    args: &AgentArgs,
    watching: Option<&TrainingAdoption>,
) -> anyhow::Result<AgentId> {
    if let Some(name) = &args.name {
        return Ok(AgentId::new(name.as_str())?);
    }
    if let Some(watching) = watching.filter(|_| args.roles.is_empty()) {
        return Ok(AgentId::new(adopt::watcher_agent_name(
            &this_machine::host_name().to_lowercase(),
            &watching.name,
        ))?);
    }
    host_agent_id()
}

pub(crate) fn host_agent_id() -> anyhow::Result<AgentId> {
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    AgentId::new(
        this_machine::host_name().to_lowercase().chars().map(legal).take(64).collect::<String>(),
    )
    .context("this machine's name is not a valid agent name; pass --name")
}

fn create_agent_directory(args: &AgentArgs, id: &AgentId) -> anyhow::Result<PathBuf> {
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

/// On a box with a GPU, `auto` is the fastest engine; on others too if `--calibrate` asks for it.
fn generator_config(
    args: &AgentArgs,
    launch: WorkerLauncher,
    cache: &Path,
) -> anyhow::Result<generator::GeneratorConfig> {
    let places = generator_paths(args, launch.directory.join("generate"), cache)?;
    let wanted = args.generator_tools.engine_options(&args.generator_engine);
    let limits = generator::GeneratorLimits::from_launcher(&launch);
    let is_auto = args.generator_engine == generator::GeneratorEngineChoice::Auto;
    if args.calibrate && !is_auto {
        bail!("--calibrate chooses the engine: omit --generator-engine (A102)");
    }
    let calibration = if is_auto && (args.calibrate || !launch.profile.is_cpu()) {
        let (llama_cpp, profile) = (wanted.llama_cpp, &launch.profile);
        let candidates =
            generator::EngineCandidate::list_candidates(llama_cpp, profile, limits, &places);
        let file = launch.directory.join("engine-speeds.json");
        let opened = generator::EngineCalibration::open(candidates, file, args.calibrate);
        Some(opened.context("forget the speeds of this box's engines")?)
    } else {
        None
    };
    let backend =
        generator::GeneratorBackend::select_backend(&wanted, &launch.profile, limits, places)?;
    let slots = args.slots;
    Ok(generator::GeneratorConfig { launch, backend, calibration, slots })
}

/// Looks for the toolchain only if an order needs an environment, because that takes seconds.
fn environment_host(
    args: &AgentArgs,
    launch: WorkerLauncher,
    hidden: Vec<PathBuf>,
) -> EnvironmentHost {
    let tools = args.tools.clone();
    let find = move || super::verify::find_toolchain(&tools, hidden.clone());
    EnvironmentHost::new(launch, find)
}

/// Returns the settings of a scorer: those of a generator, whose engine is not chosen by its speed
/// in generating.
fn scorer_config(
    args: &AgentArgs,
    launch: WorkerLauncher,
    cache: &Path,
) -> anyhow::Result<generator::GeneratorConfig> {
    let places = generator_paths(args, launch.directory.join("score"), cache)?;
    let wanted = args.generator_tools.engine_options(&args.generator_engine);
    let limits = generator::GeneratorLimits::from_launcher(&launch);
    let backend =
        generator::GeneratorBackend::select_backend(&wanted, &launch.profile, limits, places)?;
    if !backend.has_verified_weights() {
        bail!(
            "--generator-engine {}: such a server reports no log-probabilities of given tokens, \
             which a scorer needs; omit the role scorer, or use candle or llama.cpp (A102)",
            backend.describe_engine()
        );
    }
    Ok(generator::GeneratorConfig { launch, backend, calibration: None, slots: args.slots })
}

fn generator_paths(
    args: &AgentArgs,
    directory: PathBuf,
    cache: &Path,
) -> anyhow::Result<generator::GeneratorPaths> {
    Ok(generator::GeneratorPaths {
        gguf_cache: cache.join("gguf"),
        gguf_cache_bytes: parse_gib("--cache-gib", args.cache_gib)?,
        converters: args.converters.find_converters()?,
        directory,
    })
}

/// Returns the settings of the role server; `None` if the agent does not have it.
fn model_server_config(
    args: &AgentArgs,
    launch: &WorkerLauncher,
    id: &AgentId,
    cache: &Path,
) -> anyhow::Result<Option<ModelServerConfig>> {
    if !args.roles.iter().any(|role| role == SERVER_ROLE) {
        return Ok(None);
    }
    let places = generator_paths(args, launch.directory.join("serve"), cache)?;
    let (llama_cpp, choice) = (args.generator_tools.llama_cpp.as_deref(), args.server_engine);
    let directory = places.directory.clone();
    let engine = ServingEngine::select_engine(choice, llama_cpp, launch, places)?;
    let (agent, pool) = (id.clone(), Pool::new(args.pool.as_str())?);
    let (slots, context) = (args.serve_slots, args.serve_context);
    Ok(Some(ModelServerConfig { agent, pool, engine, directory, slots, context }))
}

fn create_roles(
    args: &AgentArgs,
    launch: &WorkerLauncher,
    doctor: &HostDoctor,
    (cache, own): (&Path, Vec<PathBuf>),
) -> anyhow::Result<EnabledRoles> {
    let (mut roles, mut withheld): EnabledRoles = (Vec::new(), Vec::new());
    let mut named = args.roles.clone();
    named.sort();
    named.dedup();
    let serves = named.iter().any(|role| role == SERVER_ROLE);
    named.retain(|role| role != SERVER_ROLE);
    for role in &named {
        let launch = launch.clone();
        roles.push(match role.as_str() {
            "trainer" => match trainer::trainer_config(args, launch, doctor.clone())? {
                Ok(config) => Arc::new(TrainerRole::new(config)),
                Err(found) => {
                    withheld.push(found);
                    continue;
                }
            },
            "generator" => {
                let environments = environment_host(args, launch.clone(), own.clone());
                let config = generator_config(args, launch, cache)?;
                Arc::new(GeneratorRole::new(config, environments))
            }
            "verifier" => {
                let toolchain = super::verify::find_toolchain(&args.tools, own.clone())?;
                Arc::new(VerifierRole::open(launch, toolchain))
            }
            "scorer" => Arc::new(ScorerRole::new(scorer_config(args, launch, cache)?)),
            "evaluator" => {
                let backend = choose_evaluator_backend(args, &launch, cache)?;
                Arc::new(EvaluatorRole::new(launch, backend))
            }
            other => bail!("--roles {other}: the roles are {} (A101)", ROLE_NAMES.join(", ")),
        });
    }
    if named.is_empty() && !serves && args.watch.watch.is_none() {
        bail!(
            "no roles given; pass --roles with some of {}, or --watch DIR (A100)",
            ROLE_NAMES.join(", ")
        );
    }
    if roles.is_empty() && !named.is_empty() && !serves {
        bail!("this host cannot run any of the requested roles; the log has the reasons (A112)");
    }
    Ok((roles, withheld))
}

fn choose_evaluator_backend(
    args: &AgentArgs,
    launch: &WorkerLauncher,
    cache: &Path,
) -> anyhow::Result<evaluator::EvaluatorBackend> {
    let choice = match args.evaluator_engine {
        EvaluatorEngine::Auto => evaluator::EvaluatorEngineChoice::Auto,
        EvaluatorEngine::Candle => evaluator::EvaluatorEngineChoice::Candle,
        EvaluatorEngine::LlamaCpp => evaluator::EvaluatorEngineChoice::LlamaCpp,
    };
    let cache_bytes = parse_gib("--cache-gib", args.cache_gib)?;
    let programs = (args.generator_tools.llama_cpp.as_deref(), args.converters.find_converters()?);
    let cache = cache.join("gguf");
    evaluator::EvaluatorBackend::select_backend(choice, programs, launch, cache, cache_bytes)
        .context("--evaluator-engine")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_ready_once_it_takes_work() {
        let mut status = v1::AgentStatus {
            agent: "box-2".into(),
            pool: "default".into(),
            roles: vec!["trainer".into(), "verifier".into()],
            ..Default::default()
        };
        assert_eq!(ready_line(&status), None);
        status.set_state(v1::agent_status::State::Ready);
        let line = "box-2 is ready in the pool default, as trainer, verifier; Ctrl-C stops it";
        assert_eq!(ready_line(&status).as_deref(), Some(line));
    }
}
