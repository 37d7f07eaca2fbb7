//! Arguments of the commands that run or watch a fleet.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;

use super::{FleetAccessArgs, parse_gib, parse_hours, parse_seconds};

/// Arguments of `flotilla demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Random seed of the demo
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number of RAFT cycles
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
    /// Number of generator agents
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub generators: u32,
    /// Keep the fleet running; stop it with `flotilla down --dir DIR`
    #[arg(long)]
    pub keep: bool,
    /// Serve the model, and let it learn from its users' feedback
    #[arg(long = "loop")]
    pub learn_loop: bool,
}

/// Arguments of `flotilla up`.
#[derive(Debug, Clone, Args)]
pub(crate) struct UpArgs {
    /// Announce the gateway on this network by multicast DNS
    #[arg(long, env = "FLOTILLA_ANNOUNCE")]
    pub announce: bool,
    /// URL of the object store, file:///DIR or s3://BUCKET/PREFIX [default: a directory below
    /// --dir]
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Listen address of the managed NATS server
    #[arg(long, default_value = "127.0.0.1", env = "FLOTILLA_LISTEN")]
    pub listen: std::net::IpAddr,
    #[command(flatten)]
    pub closed: FleetAccessArgs,
    /// Port of the managed NATS server [default: the previous port, or a free one]
    #[arg(long, env = "FLOTILLA_NATS_PORT")]
    pub port: Option<u16>,
    /// Listen address of the gateway [default: the previous address, or a free port on loopback]
    #[arg(long, env = "FLOTILLA_GATEWAY")]
    pub gateway: Option<SocketAddr>,
    /// Path of the nats-server program [default: found on PATH or in .tools]
    #[arg(long, env = "FLOTILLA_NATS_SERVER")]
    pub nats_server: Option<PathBuf>,
    /// Job lease in seconds; the work of an agent that is silent for longer goes to another agent
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds)]
    pub lease: f64,
    /// Cycles per run whose samples stay in the log after they are archived: a number, or all
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::CycleRetention,
    /// Maximum size of the log in GiB; a full log refuses new facts [default for a new log: half of
    /// the free disk space, at most 64]
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = parse_gib)]
    pub log_max_gib: Option<f64>,
    /// Serve the coordinator's Prometheus /metrics on this address, such as 127.0.0.1:9463
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Agents to start on this machine, by role and count: trainer,generator=2,verifier,evaluator;
    /// or none [default: those that this fleet had before]
    #[arg(long, value_delimiter = ',', value_name = "ROLE[=N]")]
    pub agents: Vec<String>,
    /// CPU cores of each agent [default: agents share all cores]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Exit when the parent process exits
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// Arguments of `flotilla coordinator`.
#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// URL of the object store, file:///DIR or s3://BUCKET/PREFIX [default: the fleet's store]
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Listen address of the gateway
    #[arg(long, default_value = "127.0.0.1:7070", env = "FLOTILLA_GATEWAY")]
    pub gateway: SocketAddr,
    /// Job lease in seconds; the work of an agent that is silent for longer goes to another agent
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds)]
    pub lease: f64,
    /// Lifetime of agent credentials in hours; agents renew them at about half of it
    #[arg(long, default_value_t = 24.0, value_name = "HOURS", env = "FLOTILLA_MEMBER_TTL",
          value_parser = parse_hours)]
    pub member_ttl: f64,
    /// Monitoring URL of each NATS server, to check that it writes to disk before it acknowledges
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_MONITOR")]
    pub monitor: Vec<String>,
    /// Cycles per run whose samples stay in the log after they are archived: a number, or all
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::CycleRetention,
    /// Maximum size of the log in GiB; a full log refuses new facts
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = parse_gib)]
    pub log_max_gib: Option<f64>,
    /// Maximum size of the log in GiB if it has to be created
    #[arg(long, hide = true, value_parser = parse_gib)]
    pub new_log_max_gib: Option<f64>,
    /// Key directory of a closed fleet, created by `flotilla init` [default: the fleet is open]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_KEYS")]
    pub keys: Option<PathBuf>,
    /// Names or addresses at which joining boxes reach this machine
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Serve Prometheus /metrics on this address, such as 127.0.0.1:9463
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Program that redacts kept requests to models: reads a JSON object of texts and prints it
    /// redacted, or prints nothing to drop the request
    #[arg(long, value_name = "PROGRAM", env = "FLOTILLA_REDACT")]
    pub redact: Option<PathBuf>,
    /// Number of copies of the log in a NATS cluster
    #[arg(long, default_value_t = 1, env = "FLOTILLA_REPLICAS",
          value_parser = clap::value_parser!(u32).range(1..=5))]
    pub replicas: u32,
    /// Exit when the parent process exits
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// Arguments of `flotilla open`.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OpenArgs {
    /// Only print the link
    #[arg(long)]
    pub print: bool,
}

/// Arguments of `flotilla discover`.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiscoverArgs {
    /// Time to listen, in seconds
    #[arg(long, default_value_t = 3.0, value_parser = parse_seconds)]
    pub wait: f64,
}

/// Arguments of `flotilla watch`.
#[derive(Debug, Args)]
pub(crate) struct TuiArgs {
    /// Run to select first [default: the newest]
    pub run: Option<String>,
}
