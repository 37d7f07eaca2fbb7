//! Warnings about a sample that a user should see without asking.

use super::HostTelemetry;

/// The percentage of ten seconds in which some task waited for memory.
const MEMORY_PRESSURE_PERCENT: f64 = 20.0;

const MEMORY_USED_SHARE: f64 = 0.9;

/// The distance to a card's critical temperature, in °C.
const CRITICAL_MARGIN_C: f64 = 5.0;

/// Returns one sentence for each warning. A card's own memory may be full without a warning,
/// because that is its purpose.
pub fn telemetry_warnings(now: &HostTelemetry) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(pressure) =
        now.pressure.memory.filter(|one| one.some_avg10 > MEMORY_PRESSURE_PERCENT)
    {
        warnings.push(format!("work waits for memory {:.0} % of the time", pressure.some_avg10));
    }
    if let Some(used) = high_usage(now.memory.total, now.memory.available) {
        warnings.push(format!("{:.0} % of the memory is in use", used * 100.0));
    }
    for gpu in &now.gpus {
        let free = gpu.gtt_total.zip(gpu.gtt_used).map(|(total, used)| total.saturating_sub(used));
        if let Some(used) = high_usage(gpu.gtt_total.filter(|_| gpu.integrated), free) {
            warnings.push(format!(
                "{} uses {:.0} % of the memory that it may map",
                gpu.gfx,
                used * 100.0
            ));
        }
        for one in &gpu.temperatures {
            if one.critical.is_some_and(|critical| one.celsius > critical - CRITICAL_MARGIN_C) {
                warnings.push(format!("{}: {} is at {:.0} °C", gpu.gfx, one.sensor, one.celsius));
            }
        }
    }
    warnings
}

fn high_usage(total: Option<u64>, free: Option<u64>) -> Option<f64> {
    let (total, free) = total.zip(free).filter(|(total, _)| *total > 0)?;
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    let used = 1.0 - free as f64 / total as f64;
    (used > MEMORY_USED_SHARE).then_some(used)
}
