//! Closing a fleet to everybody but its members.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Whom a fleet lets in.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClosedArgs {
    /// Names or addresses by which other boxes reach this one; the servers' certificate is for
    /// them. Default: this machine's name, and what it listens on.
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Hours for which agents are let in; they renew it at half of that.
    #[arg(long, default_value_t = 24.0, value_name = "HOURS", env = "FLOTILLA_MEMBER_TTL",
          value_parser = super::hours)]
    pub member_ttl: f64,
    /// Let in whoever can reach it, without keys and without TLS. A fleet that has keys stays
    /// closed; one that was begun without them stays open.
    #[arg(long)]
    pub open: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct InitArgs {
    /// What the fleet is called in its certificates.
    #[arg(long, default_value = "flotilla")]
    pub name: String,
    /// Names or addresses by which other boxes will reach its servers: with NATS servers of your
    /// own (--nats), those of each.
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// With NATS servers of your own (--nats), where the coordinator's gateway will be, as
    /// HOST:PORT. Default: the first host, port 7070.
    #[arg(long, value_name = "HOST:PORT", requires = "nats")]
    pub gateway: Option<String>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum KeysCommand {
    /// What there is, and until when.
    Show,
    /// A new key and certificate for the servers; they show it when they start again.
    RotateServer,
    /// Make members with a new key. Those of the old one renew within a day; `retire` ends it.
    RotateSigning,
    /// What was made with earlier signing keys counts no longer.
    Retire,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct BackupArgs {
    /// A new directory for it.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RestoreArgs {
    /// What `flotilla backup` made.
    #[arg(long, value_name = "DIR")]
    pub from: PathBuf,
    /// The nats-server to run. Default: found on PATH or in .tools.
    #[arg(long, env = "FLOTILLA_NATS_SERVER")]
    pub nats_server: Option<PathBuf>,
}
