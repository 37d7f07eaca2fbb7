//! Agent flags that protect the box: telemetry, reactions to TLB-shootdown storms, free memory and
//! the owner's limits.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use hardware::{owner_policy::QuietHours, storm::StormResponse};

const HEADING: &str = "Host protection";

/// Flags of `flotilla agent` that protect the box and its owner.
#[derive(Debug, Args)]
#[command(next_help_heading = HEADING)]
pub(crate) struct HostProtectionArgs {
    /// Seconds between samples of GPU, CPU and memory telemetry while work is running
    #[arg(long, value_name = "SECONDS", default_value_t = 1, env = "FLOTILLA_SAMPLE_EVERY",
          value_parser = clap::value_parser!(u64).range(1..=60))]
    pub sample_every: u64,
    /// Reaction to a TLB-shootdown storm: tell (report only), pause the workers for up to 30
    /// seconds at a time, or kill them and return their jobs
    #[arg(long, value_name = "REACTION", default_value = "tell", env = "FLOTILLA_ON_STORM")]
    pub on_storm: StormResponse,
    /// Shootdowns per second, and their duration in seconds, that count as a storm if they have a
    /// measurable cost
    #[arg(long, value_name = "RATE:SECONDS", default_value = "200000:5", env = "FLOTILLA_STORM_AT",
          value_parser = parse_rate)]
    pub storm_at: (f64, u64),
    /// Shootdowns per second, and their duration in seconds, that cause a warning
    #[arg(long, value_name = "RATE:SECONDS", default_value = "50000:10", env = "FLOTILLA_WARN_AT",
          value_parser = parse_rate)]
    pub warn_at: (f64, u64),
    /// Shootdowns per second below which, for this many seconds, a storm or warning ends
    #[arg(long, value_name = "RATE:SECONDS", default_value = "10000:30", env = "FLOTILLA_CALM_AT",
          value_parser = parse_rate)]
    pub calm_at: (f64, u64),
    /// Memory in GiB that a training must leave free on a box with unified memory; it is stopped if
    /// less is available (0 disables this)
    #[arg(long, value_name = "GIB", default_value_t = 3, env = "FLOTILLA_KEEP_FREE",
          value_parser = clap::value_parser!(u64).range(0..=1024))]
    pub keep_free: u64,
    /// Take no new work between these local times, such as 22:00-07:00
    #[arg(long, value_delimiter = ',', value_name = "HOURS", env = "FLOTILLA_QUIET_HOURS")]
    pub quiet_hours: Vec<QuietHours>,
    /// Take no new work while another program uses a GPU
    #[arg(long, env = "FLOTILLA_YIELD_TO_OWNER")]
    pub yield_to_owner: bool,
    /// Take no new work while a GPU is hotter than this, until it is 5 degrees cooler
    #[arg(long, value_name = "CELSIUS", env = "FLOTILLA_MAX_TEMPERATURE",
          value_parser = clap::value_parser!(u16).range(30..=120))]
    pub max_temperature: Option<u16>,
    /// Take no new work while GPUs and CPU draw more power than this, until they draw 10 % less
    #[arg(long, value_name = "WATTS", env = "FLOTILLA_MAX_POWER",
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub max_power: Option<u16>,
    /// Serve Prometheus /metrics on this address, such as 127.0.0.1:9464
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Seconds between two checks of a host that failed one, or of its memory
    #[arg(long, hide = true, default_value_t = 60, env = "FLOTILLA_HOST_CHECK_EVERY",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub host_check_every: u64,
    /// Seconds between two durable records of the agent's status
    #[arg(long, hide = true, default_value_t = 10, env = "FLOTILLA_STATUS_RECORD_EVERY",
          value_parser = clap::value_parser!(u64).range(1..=10))]
    pub status_record_every: u64,
    /// Root directory of /sys and /proc, for tests and for containers that mount the host's
    /// elsewhere
    #[arg(long, hide = true, default_value = "/", env = "FLOTILLA_SYSROOT")]
    pub sysroot: PathBuf,
}

fn parse_rate(text: &str) -> Result<(f64, u64), String> {
    let parsed = text.split_once(':').and_then(|(rate, seconds)| {
        let rate: f64 = rate.parse().ok()?;
        let seconds: u64 = seconds.parse().ok()?;
        (rate.is_finite() && rate > 0.0 && seconds <= 3600).then_some((rate, seconds))
    });
    parsed.ok_or_else(|| "a rate above 0 and up to 3600 seconds, as 200000:5".into())
}
