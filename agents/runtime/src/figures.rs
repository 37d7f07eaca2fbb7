//! An agent's status as Prometheus reads it. Names are node_exporter's where it has them; all are in
//! docs/METRICS.md.

use std::fmt;

use metrics::{Labels, Page, Source, count, flag};
use wire::v1::{self, telemetry::Pressure};

use crate::presence::Presence;

impl Source for Presence {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        write(page, &self.now())
    }
}

fn write(page: &mut Page<'_>, status: &v1::AgentStatus) -> fmt::Result {
    agent(page, status)?;
    let Some(telemetry) = &status.telemetry else { return Ok(()) };
    gpus(page, &telemetry.gpus)?;
    host(page, telemetry)?;
    watched(page, telemetry)
}

fn agent(page: &mut Page<'_>, status: &v1::AgentStatus) -> fmt::Result {
    use v1::agent_status::State;
    let labels = vec![
        ("agent", status.agent.clone()),
        ("host", status.host.clone()),
        ("version", status.version.clone()),
        ("pool", status.pool.clone()),
        ("profile", status.profile.clone()),
    ];
    page.gauge("flotilla_agent_info", "The agent; always 1", &[(labels, 1.0)])?;
    let states = [State::Ready, State::Draining, State::Stopped, State::Quarantined];
    let state = states.map(|state| {
        let name = state.as_str_name().to_lowercase();
        (vec![("state", name)], flag(state == status.state()))
    });
    page.gauge("flotilla_agent_state", "1 for the state the agent is in", &state)?;
    let held = status.roles.iter().map(|role| {
        let jobs = status.jobs.iter().filter(|job| job.role == *role).count();
        (vec![("role", role.clone())], count(jobs as u64))
    });
    page.gauge("flotilla_jobs_held", "Jobs at hand", &held.collect::<Vec<_>>())?;
    page.counter("flotilla_jobs_done", "Jobs done", Some(count(status.jobs_done)))?;
    page.one(
        "flotilla_tokens_per_second",
        "Generated tokens a second over recent jobs",
        Some(status.tokens_per_s),
    )?;
    page.one(
        "process_resident_memory_bytes",
        "Resident memory of the agent",
        Some(count(status.rss_bytes)),
    )?;
    status.exchange.as_ref().map_or(Ok(()), |exchange| exchanged(page, exchange))
}

fn exchanged(page: &mut Page<'_>, exchange: &v1::Exchange) -> fmt::Result {
    let v1::Exchange { bytes_from_store, bytes_from_peers, bytes_to_peers, .. } = exchange;
    let came = [("store", bytes_from_store), ("peers", bytes_from_peers)];
    let came = came.map(|(from, bytes)| (vec![("from", from.to_owned())], count(*bytes)));
    let (name, help) = ("flotilla_files_received_bytes", "Bytes of files that were fetched");
    page.counters(name, help, &came)?;
    let (name, help) = ("flotilla_files_sent_bytes", "Bytes of files that peers fetched from here");
    page.counter(name, help, Some(count(*bytes_to_peers)))
}

fn gpus(page: &mut Page<'_>, gpus: &[v1::telemetry::Gpu]) -> fmt::Result {
    type Gpu = v1::telemetry::Gpu;
    let mut each = |name: &str, help: &str, value: fn(&Gpu) -> Option<f64>| {
        let values = gpus.iter().filter_map(|gpu| Some((card(gpu), value(gpu)?)));
        page.gauge(name, help, &values.collect::<Vec<_>>())
    };
    each("flotilla_gpu_asleep", "1 while the card is powered down", |gpu| Some(flag(gpu.asleep)))?;
    each("node_drm_gpu_busy_percent", "How busy the GPU is", |gpu| gpu.busy_percent)?;
    let vram = "The card's own memory";
    each("node_drm_memory_vram_size_bytes", vram, |gpu| gpu.vram_total.map(count))?;
    let vram = "Of the card's own memory, what is in use";
    each("node_drm_memory_vram_used_bytes", vram, |gpu| gpu.vram_used.map(count))?;
    let gtt = "Of the system's memory, what the card may map";
    each("node_drm_memory_gtt_size_bytes", gtt, |gpu| gpu.gtt_total.map(count))?;
    let gtt = "Of the system's memory, what the card has mapped";
    each("node_drm_memory_gtt_used_bytes", gtt, |gpu| gpu.gtt_used.map(count))?;
    let mut sensors = |name: &str, help: &str, values: fn(&Gpu) -> Vec<(String, f64)>| {
        let values = gpus.iter().flat_map(|gpu| {
            values(gpu).into_iter().map(|(sensor, value)| (chip(gpu, sensor), value))
        });
        page.gauge(name, help, &values.collect::<Vec<_>>())
    };
    sensors("node_hwmon_temp_celsius", "Temperature of a GPU's sensor", |gpu| {
        gpu.temperatures.iter().map(|one| (one.sensor.clone(), one.celsius)).collect()
    })?;
    sensors("node_hwmon_temp_crit_celsius", "At which the GPU gives up", |gpu| {
        let each = gpu.temperatures.iter();
        each.filter_map(|one| Some((one.sensor.clone(), one.critical?))).collect()
    })?;
    sensors("node_hwmon_power_average_watt", "Power of a GPU", |gpu| {
        gpu.watts.map(|watts| ("power1".to_owned(), watts)).into_iter().collect()
    })?;
    sensors("node_hwmon_freq_freq_mhz", "Clock of a GPU", |gpu| {
        gpu.clocks.iter().map(|one| (one.sensor.clone(), count(one.hertz) / 1e6)).collect()
    })
}

fn host(page: &mut Page<'_>, now: &v1::Telemetry) -> fmt::Result {
    let memory = [
        ("MemTotal", "All memory", now.memory_total),
        ("MemAvailable", "Memory that is free or can be freed", now.memory_available),
        ("SwapTotal", "All swap", now.swap_total),
        ("SwapFree", "Free swap", now.swap_free),
    ];
    for (name, help, value) in memory {
        page.one(&format!("node_memory_{name}_bytes"), help, value.map(count))?;
    }
    let pressures =
        [("cpu", &now.cpu_pressure), ("io", &now.io_pressure), ("memory", &now.memory_pressure)];
    for (name, pressure) in pressures {
        let seconds = |us: fn(&Pressure) -> Option<u64>| {
            pressure.as_ref().and_then(us).map(|us| count(us) / 1e6)
        };
        let waiting = format!("node_pressure_{name}_waiting_seconds");
        page.counter(&waiting, "Time in which somebody waited", seconds(|one| Some(one.some_us)))?;
        if name != "cpu" {
            let stalled = format!("node_pressure_{name}_stalled_seconds");
            page.counter(&stalled, "Time in which everybody waited", seconds(|one| one.full_us))?;
        }
    }
    page.one("flotilla_cpu_busy_ratio", "Share of all cores' time in use", now.cpu_busy)?;
    page.one(
        "flotilla_cpu_system_ratio",
        "Share of all cores' time in the kernel and its interrupts",
        now.cpu_system,
    )?;
    page.one(
        "flotilla_allocation_stalls_per_second",
        "Allocations that had to wait for memory",
        now.allocation_stalls_per_s,
    )?;
    page.one(
        "flotilla_direct_scans_per_second",
        "Pages looked at by those who wait for memory",
        now.direct_scans_per_s,
    )?;
    page.one("flotilla_swapped_in_pages_per_second", "Pages read back", now.swapped_in_per_s)?;
    page.one("flotilla_swapped_out_pages_per_second", "Pages swapped out", now.swapped_out_per_s)
}

fn watched(page: &mut Page<'_>, now: &v1::Telemetry) -> fmt::Result {
    use v1::telemetry::storm::Level;
    page.counter(
        "flotilla_tlb_shootdowns",
        "Interrupts by which one core has others forget addresses",
        now.tlb_shootdowns.map(count),
    )?;
    let storm = now.storm.as_ref();
    let level = storm.map(|storm| match storm.level() {
        Level::Unspecified | Level::Calm => 0.0,
        Level::Warn => 1.0,
        Level::Storm => 2.0,
    });
    page.one("flotilla_tlb_storm_level", "0 calm, 1 warning, 2 storm", level)?;
    let storms = storm.map(|storm| count(storm.storms));
    page.counter("flotilla_tlb_storms", "Storms since the agent started", storms)?;
    page.one("flotilla_power_watts", "Power of GPUs and processor as far as told", now.watts)?;
    page.counter(
        "flotilla_energy_joules",
        "Energy since the agent started",
        now.watts.map(|_| now.joules),
    )?;
    let resting = flag(!now.resting.is_empty());
    page.one("flotilla_resting", "1 while it takes nothing by its owner's wishes", Some(resting))?;
    let warnings = count(now.warnings.len() as u64);
    page.one("flotilla_warnings", "What is short or hot", Some(warnings))
}

fn card(gpu: &v1::telemetry::Gpu) -> Labels {
    let named = if gpu.card.is_empty() { format!("gpu{}", gpu.ordinal) } else { gpu.card.clone() };
    vec![("card", named)]
}

fn chip(gpu: &v1::telemetry::Gpu, sensor: String) -> Labels {
    let chip = gpu.pci.replace('.', "_");
    let chip = if chip.is_empty() { format!("gpu{}", gpu.ordinal) } else { chip };
    vec![("chip", chip), ("sensor", sensor)]
}

#[cfg(test)]
mod tests;
