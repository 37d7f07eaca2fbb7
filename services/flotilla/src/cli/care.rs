//! How an agent treats its box.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use hardware::{citizen::QuietHours, storm::OnStorm};

const HEADING: &str = "Care for the box";

#[derive(Debug, Args)]
#[command(next_help_heading = HEADING)]
pub(crate) struct CareArgs {
    /// Seconds between looks at GPUs, processor and memory while anything runs.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, env = "FLOTILLA_SAMPLE_EVERY",
          value_parser = clap::value_parser!(u64).range(1..=60))]
    pub sample_every: u64,
    /// What is done about a storm of TLB shootdowns: tell, pause the workers for half a minute at
    /// a time, or kill them and hand their jobs back.
    #[arg(long, value_name = "REACTION", default_value = "tell", env = "FLOTILLA_ON_STORM")]
    pub on_storm: OnStorm,
    /// Shootdowns a second, and for how many seconds, that are a storm when they cost something.
    #[arg(long, value_name = "RATE:SECONDS", default_value = "200000:5", env = "FLOTILLA_STORM_AT",
          value_parser = rate)]
    pub storm_at: (f64, u64),
    /// Those that are worth a warning.
    #[arg(long, value_name = "RATE:SECONDS", default_value = "50000:10", env = "FLOTILLA_WARN_AT",
          value_parser = rate)]
    pub warn_at: (f64, u64),
    /// Fewer than these, and all is calm again.
    #[arg(long, value_name = "RATE:SECONDS", default_value = "10000:30", env = "FLOTILLA_CALM_AT",
          value_parser = rate)]
    pub calm_at: (f64, u64),
    /// GiB of memory that a training must leave on a box whose GPU has none of its own; it is ended
    /// when less is available. 0: never.
    #[arg(long, value_name = "GIB", default_value_t = 3, env = "FLOTILLA_KEEP_FREE",
          value_parser = clap::value_parser!(u64).range(0..=1024))]
    pub keep_free: u64,
    /// Take nothing new between these times of the box's day, such as 22:00-07:00.
    #[arg(long, value_delimiter = ',', value_name = "HOURS", env = "FLOTILLA_QUIET_HOURS")]
    pub quiet_hours: Vec<QuietHours>,
    /// Take nothing new while somebody else uses a GPU.
    #[arg(long, env = "FLOTILLA_YIELD_TO_OWNER")]
    pub yield_to_owner: bool,
    /// Take nothing new while a GPU is hotter, until it is 5 degrees cooler.
    #[arg(long, value_name = "CELSIUS", env = "FLOTILLA_MAX_TEMPERATURE",
          value_parser = clap::value_parser!(u16).range(30..=120))]
    pub max_temperature: Option<u16>,
    /// Take nothing new while GPUs and processor take more, until it is a tenth less.
    #[arg(long, value_name = "WATTS", env = "FLOTILLA_MAX_POWER",
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub max_power: Option<u16>,
    /// Serve /metrics for Prometheus here, such as 127.0.0.1:9464.
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Where sys and proc are: for tests, and for containers with the host's elsewhere.
    #[arg(long, hide = true, default_value = "/", env = "FLOTILLA_SYSROOT")]
    pub sysroot: PathBuf,
}

fn rate(text: &str) -> Result<(f64, u64), String> {
    let parsed = text.split_once(':').and_then(|(rate, seconds)| {
        let rate: f64 = rate.parse().ok()?;
        let seconds: u64 = seconds.parse().ok()?;
        (rate.is_finite() && rate > 0.0 && seconds <= 3600).then_some((rate, seconds))
    });
    parsed.ok_or_else(|| "a rate above 0 and up to 3600 seconds, as 200000:5".into())
}
