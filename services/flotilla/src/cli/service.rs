//! This box: its service, and its program's upgrade.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Print the unit that `install` would write.
    Unit(ServiceArgs),
    /// Write the unit, start the agent, and have it started with the box.
    Install(ServiceArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// What it does: trainer, generator, verifier, evaluator. Default: FLOTILLA_ROLES in
    /// /etc/flotilla/agent.env.
    #[arg(long, value_delimiter = ',')]
    pub roles: Vec<String>,
    /// Its name in the fleet. Default: FLOTILLA_NAME there, or this machine's.
    #[arg(long)]
    pub name: Option<String>,
    /// A service of yours alone, without root.
    #[arg(long)]
    pub user: bool,
    /// The program. Default: this one.
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// The new program.
    #[arg(long, value_name = "FILE")]
    pub binary: PathBuf,
    /// The program to replace; it is kept as FILE.previous. Default: this one.
    #[arg(long, value_name = "FILE")]
    pub installed: Option<PathBuf>,
    /// An agent's directory, for each agent of this box. Default: the packaged service's.
    #[arg(long, value_name = "DIR", value_delimiter = ',', env = "FLOTILLA_AGENT_DIR")]
    pub agent_dir: Vec<PathBuf>,
    /// The systemd service to restart. With neither this nor --restart-command, you do.
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "flotilla-agent",
          conflicts_with = "restart_command")]
    pub service: Option<String>,
    /// The service is yours: `systemctl --user`.
    #[arg(long, requires = "service")]
    pub user: bool,
    /// A command of the shell that starts the agents again.
    #[arg(long, value_name = "COMMAND")]
    pub restart_command: Option<String>,
    /// Seconds the agents have to finish what they hold.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600,
          value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub drain_limit: u64,
    /// Seconds they have to be back.
    #[arg(long, value_name = "SECONDS", default_value_t = 120,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub ready_limit: u64,
}
