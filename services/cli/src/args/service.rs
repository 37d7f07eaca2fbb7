//! Arguments of `flotilla service` and `flotilla upgrade`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands of `flotilla service`.
#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Print the systemd unit that `install` writes.
    Unit(ServiceArgs),
    /// Write the systemd unit, start the agent now and at every boot.
    Install(ServiceArgs),
}

/// Arguments of `flotilla service unit` and `flotilla service install`.
#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// Roles of the agent: trainer, generator, verifier, scorer, evaluator, server [default:
    /// FLOTILLA_ROLES in /etc/flotilla/agent.env]
    #[arg(long, value_delimiter = ',')]
    pub roles: Vec<String>,
    /// Name of the agent in the fleet [default: FLOTILLA_NAME in /etc/flotilla/agent.env, or this
    /// machine's name]
    #[arg(long)]
    pub name: Option<String>,
    /// Install a user service, without root
    #[arg(long)]
    pub user: bool,
    /// Program to run [default: this program]
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}

/// Arguments of `flotilla upgrade`.
#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// New program
    #[arg(long, value_name = "FILE")]
    pub binary: PathBuf,
    /// Program to replace, kept as FILE.previous [default: this program]
    #[arg(long, value_name = "FILE")]
    pub installed: Option<PathBuf>,
    /// Directory of each agent on this box [default: the packaged service's]
    #[arg(long, value_name = "DIR", value_delimiter = ',', env = "FLOTILLA_AGENT_DIR")]
    pub agent_dir: Vec<PathBuf>,
    /// systemd service to restart; without it or --restart-command, restart the agents yourself
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "flotilla-agent",
          conflicts_with = "restart_command")]
    pub service: Option<String>,
    /// Restart a user service (`systemctl --user`)
    #[arg(long, requires = "service")]
    pub user: bool,
    /// Shell command that restarts the agents
    #[arg(long, value_name = "COMMAND")]
    pub restart_command: Option<String>,
    /// Seconds that the agents have to finish their jobs
    #[arg(long, value_name = "SECONDS", default_value_t = 3600,
          value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub drain_limit: u64,
    /// Seconds that the agents have to be ready after the restart
    #[arg(long, value_name = "SECONDS", default_value_t = 120,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub ready_limit: u64,
}
