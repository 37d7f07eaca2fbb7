//! Telemetry options of the agent, from its flags.

use std::time::Duration;

use agent::{ProcessGroups, telemetry::TelemetryOptions};
use anyhow::{Context, bail};
use hardware::{owner_policy::OwnerLimits, storm::StormThresholds};
use metrics::MetricsEndpoint;

use crate::args::AgentArgs;

/// A paused worker is silent and must not count as hung.
const STORM_PAUSE_MAX: Duration = Duration::from_secs(30);

pub(super) async fn build_telemetry_options(
    args: &AgentArgs,
    process_groups: ProcessGroups,
) -> anyhow::Result<TelemetryOptions> {
    let care = &args.care;
    let metrics = MetricsEndpoint::bind_optional(care.metrics).await.context("--metrics")?;
    let [(warn_per_s, warn_s), (storm_per_s, storm_s), (clear_per_s, clear_s)] =
        [care.warn_at, care.storm_at, care.calm_at];
    if !(clear_per_s <= warn_per_s && warn_per_s <= storm_per_s) {
        bail!("--calm-at, --warn-at and --storm-at must be in ascending order (A101)");
    }
    let thresholds = StormThresholds {
        warn_per_s,
        warn_ms: warn_s * 1000,
        storm_per_s,
        storm_ms: storm_s * 1000,
        clear_per_s,
        clear_ms: clear_s * 1000,
        ..StormThresholds::default()
    };
    let owner_limits = OwnerLimits {
        quiet: care.quiet_hours.clone(),
        yield_to_owner: care.yield_to_owner,
        max_celsius: care.max_temperature.map(f64::from),
        max_watts: care.max_power.map(f64::from),
    };
    let silence = args.worker_silence.map(|seconds| Duration::from_secs(seconds) / 2);
    Ok(TelemetryOptions {
        root: care.sysroot.clone(),
        sample_interval: Duration::from_secs(care.sample_every),
        owner_limits,
        on_storm: care.on_storm,
        thresholds,
        pause_max: silence.unwrap_or(STORM_PAUSE_MAX).min(STORM_PAUSE_MAX),
        keep_free: care.keep_free << 30,
        process_groups,
        metrics,
    })
}
