//! What a person should hear of in one look, without asking.

use super::Telemetry;

/// Percent of ten seconds in which somebody waited for memory.
const MEMORY_PRESSURE: f64 = 20.0;

/// Of all memory, what is in use when it gets tight.
const MEMORY_USED: f64 = 0.9;

/// So far below what it takes for the card to give up.
const BELOW_CRITICAL_C: f64 = 5.0;

/// One sentence each. A card's own memory may well be full: that is what it is for.
pub fn warnings(now: &Telemetry) -> Vec<String> {
    let mut said = Vec::new();
    if let Some(pressure) = now.pressure.memory.filter(|one| one.some_avg10 > MEMORY_PRESSURE) {
        said.push(format!("work waits for memory {:.0} % of the time", pressure.some_avg10));
    }
    if let Some(used) = used(now.memory.total, now.memory.available) {
        said.push(format!("{:.0} % of the memory is in use", used * 100.0));
    }
    for gpu in &now.gpus {
        let free = gpu.gtt_total.zip(gpu.gtt_used).map(|(total, used)| total.saturating_sub(used));
        if let Some(used) = used(gpu.gtt_total.filter(|_| gpu.integrated), free) {
            said.push(format!("{} has {:.0} % of what it may map in use", gpu.gfx, used * 100.0));
        }
        for one in &gpu.temperatures {
            if one.critical.is_some_and(|critical| one.celsius > critical - BELOW_CRITICAL_C) {
                said.push(format!("{}: {} is at {:.0} °C", gpu.gfx, one.sensor, one.celsius));
            }
        }
    }
    said
}

/// The share in use, if that is much.
fn used(total: Option<u64>, free: Option<u64>) -> Option<f64> {
    let (total, free) = total.zip(free).filter(|(total, _)| *total > 0)?;
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    let used = 1.0 - free as f64 / total as f64;
    (used > MEMORY_USED).then_some(used)
}
