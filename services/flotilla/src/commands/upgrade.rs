//! `flotilla upgrade`: this box's binary replaced by another, its agents drained before and back
//! after. What follows what is decided in `crate::upgrade`.

mod binary;

use std::{
    path::PathBuf,
    process::{ExitCode, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail};
use control::Control;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{process::Command, time::Instant};
use wire::{AgentId, Timestamp, v1};

use crate::{
    cli::UpgradeArgs,
    fleet::FleetArgs,
    occupant::{self, Occupant},
    output,
    service::{Manager, Scope},
    upgrade::{Next, Outcome, Plan, Step},
};

const POLL: Duration = Duration::from_millis(500);

/// Where a packaged service's agent has its files.
const PACKAGED_AGENT: &str = "/var/lib/flotilla/agent";

/// One of this box's agents, as it was found.
struct Member {
    directory: PathBuf,
    name: String,
    /// To be told by a signal; an older one is told over the bus.
    pid: Option<Pid>,
    /// Of the process that is to leave. None: it does not work now.
    started_at: Option<Timestamp>,
    works: bool,
}

struct Shell<'a> {
    args: &'a UpgradeArgs,
    control: Control,
    installed: PathBuf,
    /// What the agents are to say they are: first the new one, after a failure the old.
    old_version: String,
    new_version: String,
    members: Vec<Member>,
    swapped_at: Timestamp,
}

pub(crate) async fn upgrade(fleet: &FleetArgs, args: &UpgradeArgs) -> anyhow::Result<ExitCode> {
    let installed = match &args.installed {
        Some(path) => path.clone(),
        None => std::env::current_exe().context("find this program")?,
    };
    let installed =
        installed.canonicalize().with_context(|| format!("use {}", installed.display()))?;
    let new_version = binary::version(&args.binary).await?;
    let old_version = binary::version(&installed).await?;
    if binary::same(&args.binary, &installed)? {
        output::say(&format!("{} is {new_version} already", installed.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let control = fleet.control().await?;
    let members = members(args, &control).await?;
    output::say(&format!("{}: {old_version} → {new_version}", installed.display()));
    let swapped_at = now();
    let mut shell =
        Shell { args, control, installed, old_version, new_version, members, swapped_at };
    match shell.carry_out().await {
        Outcome::Upgraded => {
            let kept = binary::previous(&shell.installed);
            output::say(&format!(
                "upgraded to {}; the old one is {}",
                shell.new_version,
                kept.display()
            ));
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Unchanged { why } => bail!("nothing was changed: {why} (A109)"),
        Outcome::StillLeaving { why } => bail!(
            "nothing was replaced: {why}; the agents leave when they are done: upgrade again then, \
             or start them again (A109)"
        ),
        Outcome::PutBack { why } => {
            bail!(
                "{}: {why}; {} was put back and works (A109)",
                shell.new_version,
                shell.old_version
            )
        }
        Outcome::Down { why, then } => {
            bail!(
                "{}: {why}; and then: {then}; this box's agents are down (A109)",
                shell.new_version
            )
        }
    }
}

/// The agents of the directories named, with what the fleet knows of them.
async fn members(args: &UpgradeArgs, control: &Control) -> anyhow::Result<Vec<Member>> {
    let packaged = PathBuf::from(PACKAGED_AGENT);
    let directories = match &args.agent_dir[..] {
        [] if packaged.exists() => vec![packaged],
        [] => bail!(
            "which agents are this box's? pass --agent-dir DIR, as they were started with (A109)"
        ),
        named => named.to_vec(),
    };
    let known = control.agents().await?;
    let member = |directory: PathBuf| {
        let (works, occupant) = occupant::look(&directory)?;
        let (name, pid) = match occupant {
            Some(Occupant { name, pid }) => (name, i32::try_from(pid).ok().and_then(Pid::from_raw)),
            None => {
                let name = directory.file_name().context("an agent's directory has a name")?;
                (name.to_string_lossy().into_owned(), None)
            }
        };
        let status = known.iter().find(|status| status.agent == name && works);
        let started_at = status.and_then(|status| status.started_at);
        Ok(Member { directory, name, pid, started_at, works })
    };
    directories.into_iter().map(member).collect()
}

impl Shell<'_> {
    async fn carry_out(&mut self) -> Outcome {
        let mut plan = Plan::default();
        let mut step = Plan::first(self.members.iter().filter(|member| member.works).count());
        loop {
            let went = self.step(step).await.map_err(|error| format!("{error:#}"));
            if let Err(why) = &went {
                output::say(why);
            }
            match plan.after(step, went) {
                Next::Do(next) => step = next,
                Next::End(outcome) => return outcome,
            }
        }
    }

    async fn step(&mut self, step: Step) -> anyhow::Result<()> {
        match step {
            Step::Drain => self.drain().await,
            Step::AwaitLeft => self.await_left().await,
            Step::Swap => {
                let (new, installed) = (self.args.binary.clone(), self.installed.clone());
                self.swapped_at = now();
                tokio::task::spawn_blocking(move || binary::swap(&new, &installed)).await?
            }
            Step::PutBack => {
                self.swapped_at = now();
                binary::put_back(&self.installed)
            }
            Step::Restart | Step::RestartOld => self.restart().await,
            Step::AwaitBack => self.await_back(&self.new_version).await,
            Step::AwaitOld => self.await_back(&self.old_version).await,
        }
    }

    async fn drain(&self) -> anyhow::Result<()> {
        for member in self.members.iter().filter(|member| member.works) {
            match member.pid {
                Some(pid) => kill_process(pid, Signal::USR1)
                    .with_context(|| format!("tell {} to leave", member.name))?,
                None => self.control.drain(&AgentId::new(member.name.as_str())?).await?,
            }
        }
        Ok(())
    }

    /// Until none of those that were told works any more, however soon another follows.
    async fn await_left(&self) -> anyhow::Result<()> {
        let limit = Duration::from_secs(self.args.drain_limit);
        let (began, mut said) = (Instant::now(), String::new());
        loop {
            let stay = self.staying()?;
            if stay.is_empty() {
                return Ok(());
            }
            // Only for people: where the fleet is away, the directories still tell.
            let known = self.control.agents().await.unwrap_or_default();
            let held: Vec<String> = known
                .iter()
                .filter(|status| stay.contains(&status.agent.as_str()))
                .map(holding)
                .collect();
            let line = format!("waiting for {}", held.join("; "));
            if line != said {
                output::say(&line);
                said = line;
            }
            if began.elapsed() > limit {
                bail!("{} still at work after {limit:?} (--drain-limit) (A109)", stay.join(", "));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn staying(&self) -> anyhow::Result<Vec<&str>> {
        let mut stay = Vec::new();
        for member in self.members.iter().filter(|member| member.works) {
            let (works, occupant) = occupant::look(&member.directory)?;
            let pid = occupant.and_then(|one| i32::try_from(one.pid).ok()).and_then(Pid::from_raw);
            if works && pid == member.pid {
                stay.push(member.name.as_str());
            }
        }
        Ok(stay)
    }

    async fn restart(&self) -> anyhow::Result<()> {
        if let Some(service) = &self.args.service {
            let scope = if self.args.user { Scope::User } else { Scope::System };
            output::say(&format!("restarting {service}"));
            return Manager::of(scope)?.restart(service).await;
        }
        let Some(command) = &self.args.restart_command else {
            output::say(&format!(
                "start the agents of this box again now; waiting for them for {} s",
                self.args.ready_limit
            ));
            return Ok(());
        };
        output::say(&format!("running {command}"));
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

    async fn await_back(&self, version: &str) -> anyhow::Result<()> {
        let limit = Duration::from_secs(self.args.ready_limit);
        let began = Instant::now();
        loop {
            let known = self.control.agents().await;
            let known = known.as_deref().unwrap_or_default();
            let missing: Vec<String> = self
                .members
                .iter()
                .filter_map(|member| self.missing(member, version, known))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if began.elapsed() > limit {
                bail!("not back within {limit:?} (--ready-limit): {} (A109)", missing.join("; "));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// What is still to be seen of an agent, if anything.
    fn missing(&self, member: &Member, version: &str, known: &[v1::AgentStatus]) -> Option<String> {
        let name = &member.name;
        let Some(status) = known.iter().find(|status| status.agent == *name) else {
            return Some(format!("the fleet has not heard of {name}"));
        };
        // Its own clock's, as this process's.
        let seconds = |at: Option<&Timestamp>| at.map_or(0, |at| at.seconds);
        let started_at = status.started_at.as_ref();
        if started_at == member.started_at.as_ref() || seconds(started_at) < self.swapped_at.seconds
        {
            return Some(format!("{name} was not started again"));
        }
        if status.version != version {
            return Some(format!("{name} says it is {}", status.version));
        }
        let rests = status.telemetry.as_ref().is_some_and(|now| !now.resting.is_empty());
        match status.state() {
            v1::agent_status::State::Ready => None,
            v1::agent_status::State::Draining if rests => None,
            state => Some(format!("{name} is {}", state.as_str_name().to_lowercase())),
        }
    }
}

fn holding(status: &v1::AgentStatus) -> String {
    let job = |job: &v1::ActiveJob| {
        format!("{} c{} {} {}/{}", job.run, job.cycle, job.job, job.done, job.total)
    };
    let jobs: Vec<String> = status.jobs.iter().map(job).collect();
    if jobs.is_empty() {
        status.agent.clone()
    } else {
        format!("{}: {}", status.agent, jobs.join(", "))
    }
}

fn now() -> Timestamp {
    wire::timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}
