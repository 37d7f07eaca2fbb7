//! `flotilla upgrade`: replaces this box's program, with its agents drained before and restarted
//! after. `crate::upgrade_plan` decides the order of the steps.

mod binary;

use std::{path::PathBuf, process::Stdio, time::Duration};

use agent::agent_lock;
use anyhow::{Context, bail};
use control::FleetControl;
use rustix::process::{Pid, Signal, kill_process};
use systemd::{ServiceManager, ServiceScope};
use tokio::{process::Command, time::Instant};
use wire::{AgentId, Timestamp, v1};

use crate::{
    args::UpgradeArgs,
    fleet::FleetArgs,
    output,
    this_machine::this_program,
    upgrade_plan::{UpgradeDecision, UpgradeOutcome, UpgradePlan, UpgradeStep},
};

const POLL_INTERVAL: Duration = Duration::from_millis(500);

const PACKAGED_AGENT_DIRECTORY: &str = "/var/lib/flotilla/agent";

struct UpgradeAgent {
    directory: PathBuf,
    name: String,
    /// Process id, to drain the agent by a signal. `None` for older agents, which are drained over
    /// the bus.
    pid: Option<Pid>,
    /// Start time of the process that is to exit. `None` if the agent was not running.
    started_at: Option<Timestamp>,
    is_running: bool,
}

struct UpgradeRunner<'a> {
    args: &'a UpgradeArgs,
    control: FleetControl,
    installed: PathBuf,
    old_version: String,
    new_version: String,
    members: Vec<UpgradeAgent>,
    swapped_at: Timestamp,
}

pub(crate) async fn upgrade_program(fleet: &FleetArgs, args: &UpgradeArgs) -> anyhow::Result<()> {
    let installed = match &args.installed {
        Some(path) => path.clone(),
        None => this_program()?,
    };
    let installed =
        installed.canonicalize().with_context(|| format!("use {}", installed.display()))?;
    let new_version = binary::read_version(&args.binary).await?;
    let old_version = binary::read_version(&installed).await?;
    if binary::is_same_content(&args.binary, &installed)? {
        output::print_message(&format!("{} is already {new_version}", installed.display()));
        return Ok(());
    }
    let control = fleet.connect_control().await?;
    let members = find_agents(args, &control).await?;
    output::print_message(&format!("{}: {old_version} → {new_version}", installed.display()));
    let swapped_at = wire::clock::now();
    let mut upgrade =
        UpgradeRunner { args, control, installed, old_version, new_version, members, swapped_at };
    match upgrade.run_steps().await {
        UpgradeOutcome::Upgraded => {
            let kept = binary::previous_path(&upgrade.installed);
            output::print_message(&format!(
                "upgraded to {}; the old one is {}",
                upgrade.new_version,
                kept.display()
            ));
            Ok(())
        }
        UpgradeOutcome::Unchanged { why } => bail!("nothing was changed: {why} (A109)"),
        UpgradeOutcome::StillDraining { why } => bail!(
            "nothing was replaced: {why}; the agents leave when they are done: upgrade again then, \
             or start them again (A109)"
        ),
        UpgradeOutcome::RolledBack { why } => bail!(
            "{}: {why}; {} was put back and works (A109)",
            upgrade.new_version,
            upgrade.old_version
        ),
        UpgradeOutcome::Down { why, then } => bail!(
            "{}: {why}; rollback failed: {then}; the agents of this host are down (A109)",
            upgrade.new_version
        ),
    }
}

async fn find_agents(
    args: &UpgradeArgs,
    control: &FleetControl,
) -> anyhow::Result<Vec<UpgradeAgent>> {
    let packaged = PathBuf::from(PACKAGED_AGENT_DIRECTORY);
    let directories = match &args.agent_dir[..] {
        [] if packaged.exists() => vec![packaged],
        [] => bail!(
            "no agents of this host found; pass the --agent-dir DIR they were started with (A109)"
        ),
        named => named.to_vec(),
    };
    let known = control.list_agents().await?;
    let member = |directory: PathBuf| {
        let (works, occupant) = agent_lock::inspect_lock(&directory)?;
        let (name, pid) = match occupant {
            Some(holder) => (holder.name.clone(), holder.process()),
            None => {
                let name = directory.file_name().context("an agent's directory needs a name")?;
                (name.to_string_lossy().into_owned(), None)
            }
        };
        let status = known.iter().find(|status| status.agent == name && works);
        let started_at = status.and_then(|status| status.started_at);
        Ok(UpgradeAgent { directory, name, pid, started_at, is_running: works })
    };
    directories.into_iter().map(member).collect()
}

impl UpgradeRunner<'_> {
    async fn run_steps(&mut self) -> UpgradeOutcome {
        let mut plan = UpgradePlan::default();
        let mut step =
            UpgradePlan::first_step(self.members.iter().filter(|member| member.is_running).count());
        loop {
            let went = self.perform_step(step).await.map_err(|error| format!("{error:#}"));
            if let Err(why) = &went {
                output::print_message(why);
            }
            match plan.next_decision(step, went) {
                UpgradeDecision::Run(next) => step = next,
                UpgradeDecision::Finish(outcome) => return outcome,
            }
        }
    }

    async fn perform_step(&mut self, step: UpgradeStep) -> anyhow::Result<()> {
        match step {
            UpgradeStep::Drain => self.drain_agents().await,
            UpgradeStep::AwaitExit => self.wait_agents_exited().await,
            UpgradeStep::Swap => {
                let (new, installed) = (self.args.binary.clone(), self.installed.clone());
                self.swapped_at = wire::clock::now();
                tokio::task::spawn_blocking(move || binary::swap_program(&new, &installed)).await?
            }
            UpgradeStep::RollBack => {
                self.swapped_at = wire::clock::now();
                binary::restore_previous(&self.installed)
            }
            UpgradeStep::Restart | UpgradeStep::RestartOld => self.restart_agents().await,
            UpgradeStep::AwaitNew => self.wait_agents_ready(&self.new_version).await,
            UpgradeStep::AwaitOld => self.wait_agents_ready(&self.old_version).await,
        }
    }

    async fn drain_agents(&self) -> anyhow::Result<()> {
        for member in self.members.iter().filter(|member| member.is_running) {
            match member.pid {
                Some(pid) => kill_process(pid, Signal::USR1)
                    .with_context(|| format!("ask {} to drain", member.name))?,
                None => self.control.drain_agent(&AgentId::new(member.name.as_str())?).await?,
            }
        }
        Ok(())
    }

    /// Even if another process follows at once.
    async fn wait_agents_exited(&self) -> anyhow::Result<()> {
        let limit = Duration::from_secs(self.args.drain_limit);
        let (began, mut said) = (Instant::now(), String::new());
        loop {
            let stay = self.running_agents()?;
            if stay.is_empty() {
                return Ok(());
            }
            // Only for display: if the fleet is unreachable, the lock files still show which agents
            // run.
            let known = self.control.list_agents().await.unwrap_or_default();
            let held: Vec<String> = known
                .iter()
                .filter(|status| stay.contains(&status.agent.as_str()))
                .map(jobs_text)
                .collect();
            let line = format!("waiting for {}", held.join("; "));
            if line != said {
                output::print_message(&line);
                said = line;
            }
            if began.elapsed() > limit {
                bail!(
                    "{} still working after {limit:?}; raise --drain-limit (A109)",
                    stay.join(", ")
                );
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn running_agents(&self) -> anyhow::Result<Vec<&str>> {
        let mut stay = Vec::new();
        for member in self.members.iter().filter(|member| member.is_running) {
            let (works, occupant) = agent_lock::inspect_lock(&member.directory)?;
            if works && occupant.and_then(|holder| holder.process()) == member.pid {
                stay.push(member.name.as_str());
            }
        }
        Ok(stay)
    }

    async fn restart_agents(&self) -> anyhow::Result<()> {
        if let Some(service) = &self.args.service {
            let scope = if self.args.user { ServiceScope::User } else { ServiceScope::System };
            output::print_message(&format!("restarting {service}"));
            return ServiceManager::for_scope(scope)?.restart_service(service).await;
        }
        let Some(command) = &self.args.restart_command else {
            output::print_message(&format!(
                "restart the agents of this host now; waiting {} s for them",
                self.args.ready_limit
            ));
            return Ok(());
        };
        output::print_message(&format!("running {command}"));
        let mut run = Command::new("/bin/sh");
        run.args(["-c", command]).stdin(Stdio::null()).kill_on_drop(true);
        let limit = Duration::from_secs(self.args.ready_limit);
        let ended = tokio::time::timeout(limit, run.status()).await;
        let status = ended.with_context(|| format!("{command}: not done within {limit:?}"))??;
        if !status.success() {
            bail!("{command}: {status} (A109)");
        }
        Ok(())
    }

    async fn wait_agents_ready(&self, version: &str) -> anyhow::Result<()> {
        let limit = Duration::from_secs(self.args.ready_limit);
        let began = Instant::now();
        loop {
            let known = self.control.list_agents().await;
            let known = known.as_deref().unwrap_or_default();
            let missing: Vec<String> = self
                .members
                .iter()
                .filter_map(|member| self.unmet_condition(member, version, known))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if began.elapsed() > limit {
                bail!("not back within {limit:?} (--ready-limit): {} (A109)", missing.join("; "));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn unmet_condition(
        &self,
        member: &UpgradeAgent,
        version: &str,
        known: &[v1::AgentStatus],
    ) -> Option<String> {
        let name = &member.name;
        let Some(status) = known.iter().find(|status| status.agent == *name) else {
            return Some(format!("the fleet has not seen {name}"));
        };
        // The agent runs on this box, so both times come from the same clock.
        let seconds = |at: Option<&Timestamp>| at.map_or(0, |at| at.seconds);
        let started_at = status.started_at.as_ref();
        if started_at == member.started_at.as_ref() || seconds(started_at) < self.swapped_at.seconds
        {
            return Some(format!("{name} was not restarted"));
        }
        if status.version != version {
            return Some(format!("{name} reports version {}", status.version));
        }
        let rests = status.telemetry.as_ref().is_some_and(|now| !now.resting.is_empty());
        match status.state() {
            v1::agent_status::State::Ready => None,
            v1::agent_status::State::Draining if rests => None,
            state => Some(format!("{name} is {}", state.as_str_name().to_lowercase())),
        }
    }
}

fn jobs_text(status: &v1::AgentStatus) -> String {
    let jobs: Vec<String> = status.jobs.iter().map(run_view::job_text).collect();
    if jobs.is_empty() {
        status.agent.clone()
    } else {
        format!("{}: {}", status.agent, jobs.join(", "))
    }
}
