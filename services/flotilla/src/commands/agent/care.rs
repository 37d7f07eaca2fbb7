//! How the agent watches its box, as its flags say.

use std::time::Duration;

use anyhow::{Context, bail};
use hardware::{citizen::Wishes, storm::Thresholds};
use metrics::Endpoint;
use runtime::{Herd, watch::Options};

use crate::cli::AgentArgs;

/// A worker that is paused says nothing; it must not count as hung.
const PAUSE_MAX: Duration = Duration::from_secs(30);

pub(super) async fn options(args: &AgentArgs, herd: Herd) -> anyhow::Result<Options> {
    let care = &args.care;
    let metrics = Endpoint::bind_if_any(care.metrics).await.context("--metrics")?;
    let [(warn_per_s, warn_s), (storm_per_s, storm_s), (clear_per_s, clear_s)] =
        [care.warn_at, care.storm_at, care.calm_at];
    if !(clear_per_s <= warn_per_s && warn_per_s <= storm_per_s) {
        bail!("--calm-at, --warn-at and --storm-at must not fall in this order (A101)");
    }
    let thresholds = Thresholds {
        warn_per_s,
        warn_ms: warn_s * 1000,
        storm_per_s,
        storm_ms: storm_s * 1000,
        clear_per_s,
        clear_ms: clear_s * 1000,
        ..Thresholds::default()
    };
    let wishes = Wishes {
        quiet: care.quiet_hours.clone(),
        yield_to_owner: care.yield_to_owner,
        max_celsius: care.max_temperature.map(f64::from),
        max_watts: care.max_power.map(f64::from),
    };
    let silence = args.worker_silence.map(|seconds| Duration::from_secs(seconds) / 2);
    Ok(Options {
        root: care.sysroot.clone(),
        every: Duration::from_secs(care.sample_every),
        wishes,
        on_storm: care.on_storm,
        thresholds,
        pause_max: silence.unwrap_or(PAUSE_MAX).min(PAUSE_MAX),
        keep_free: care.keep_free << 30,
        herd,
        metrics,
    })
}
