//! Arguments about access to a fleet: keys, backups of them, and who may join.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Flags of `flotilla up` that decide who may use the fleet.
#[derive(Debug, Clone, Args)]
pub(crate) struct FleetAccessArgs {
    /// Names or addresses at which other boxes reach this machine, for the server certificate
    /// [default: this machine's name and its listen addresses]
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Lifetime of agent credentials in hours; agents renew them at about half of it
    #[arg(long, default_value_t = 24.0, value_name = "HOURS", env = "FLOTILLA_MEMBER_TTL",
          value_parser = super::parse_hours)]
    pub member_ttl: f64,
    /// Run an open fleet, without keys and TLS: anyone who can reach it may use it; an existing
    /// fleet stays as it is
    #[arg(long)]
    pub open: bool,
}

/// Arguments of `flotilla init`.
#[derive(Debug, Clone, Args)]
pub(crate) struct InitArgs {
    /// Name of the fleet in its certificates
    #[arg(long, default_value = "flotilla")]
    pub name: String,
    /// Names or addresses at which other boxes reach the fleet's servers; with --nats, those of
    /// every NATS server
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Address of the coordinator's gateway as HOST:PORT, if you run your own NATS servers (--nats)
    /// [default: the first host, port 7070]
    #[arg(long, value_name = "HOST:PORT", requires = "nats")]
    pub gateway: Option<String>,
}

/// The subcommands of `flotilla keys`.
#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum KeysCommand {
    /// Show the keys and when they expire.
    Show,
    /// Create a new key and certificate for the servers; they use it after a restart.
    RotateServer,
    /// Create a new signing key for members; members of the old key renew within a day, then run
    /// `retire`.
    RotateSigning,
    /// Invalidate all credentials that were signed with earlier signing keys.
    Retire,
}

/// Arguments of `flotilla backup`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BackupArgs {
    /// New directory for the backup
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Arguments of `flotilla restore`.
#[derive(Debug, Clone, Args)]
pub(crate) struct RestoreArgs {
    /// Directory of a backup made by `flotilla backup`
    #[arg(long, value_name = "DIR")]
    pub from: PathBuf,
    /// Path of the nats-server program [default: found on PATH or in .tools]
    #[arg(long, env = "FLOTILLA_NATS_SERVER")]
    pub nats_server: Option<PathBuf>,
}
