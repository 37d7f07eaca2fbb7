//! An agent's status as Prometheus metrics. Names follow node_exporter where it has them;
//! docs/METRICS.md lists all.

use std::fmt;

use metrics::{MetricLabels, MetricsPage, MetricsSource, count_value, flag_value};
use wire::v1::{self, telemetry::Pressure};

use crate::live_status::LiveStatus;

impl MetricsSource for LiveStatus {
    fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        write_status(page, &self.current_status())
    }
}

fn write_status(page: &mut MetricsPage<'_>, status: &v1::AgentStatus) -> fmt::Result {
    write_agent(page, status)?;
    let Some(telemetry) = &status.telemetry else { return Ok(()) };
    write_gpus(page, &telemetry.gpus)?;
    write_host(page, telemetry)?;
    write_protection(page, telemetry)
}

fn write_agent(page: &mut MetricsPage<'_>, status: &v1::AgentStatus) -> fmt::Result {
    use v1::agent_status::State;
    let labels = vec![
        ("agent", status.agent.clone()),
        ("host", status.host.clone()),
        ("version", status.version.clone()),
        ("pool", status.pool.clone()),
        ("profile", status.profile.clone()),
    ];
    page.write_gauges("flotilla_agent_info", "The agent; always 1", &[(labels, 1.0)])?;
    let states = [State::Ready, State::Draining, State::Stopped, State::Quarantined];
    let state = states.map(|state| {
        let name = state.as_str_name().to_lowercase();
        (vec![("state", name)], flag_value(state == status.state()))
    });
    page.write_gauges("flotilla_agent_state", "1 for the state the agent is in", &state)?;
    let held = status.roles.iter().map(|role| {
        let jobs = status.jobs.iter().filter(|job| job.role == *role).count();
        (vec![("role", role.clone())], count_value(jobs as u64))
    });
    page.write_gauges("flotilla_jobs_held", "Jobs in progress", &held.collect::<Vec<_>>())?;
    page.write_counter(
        "flotilla_jobs_done",
        "Completed jobs",
        Some(count_value(status.jobs_done)),
    )?;
    page.write_gauge(
        "flotilla_tokens_per_second",
        "Generated tokens per second, average of recent jobs",
        Some(status.tokens_per_s),
    )?;
    page.write_gauge(
        "process_resident_memory_bytes",
        "Resident memory of the agent",
        Some(count_value(status.rss_bytes)),
    )?;
    status.exchange.as_ref().map_or(Ok(()), |exchange| write_exchange(page, exchange))
}

fn write_exchange(page: &mut MetricsPage<'_>, exchange: &v1::Exchange) -> fmt::Result {
    let v1::Exchange { bytes_from_store, bytes_from_peers, bytes_to_peers, .. } = exchange;
    let came = [("store", bytes_from_store), ("peers", bytes_from_peers)];
    let came = came.map(|(from, bytes)| (vec![("from", from.to_owned())], count_value(*bytes)));
    let (name, help) = ("flotilla_files_received_bytes", "Bytes of files fetched");
    page.write_counters(name, help, &came)?;
    let (name, help) = ("flotilla_files_sent_bytes", "Bytes of files sent to other agents");
    page.write_counter(name, help, Some(count_value(*bytes_to_peers)))
}

fn write_gpus(page: &mut MetricsPage<'_>, gpus: &[v1::telemetry::Gpu]) -> fmt::Result {
    type Gpu = v1::telemetry::Gpu;
    let mut each = |name: &str, help: &str, value: fn(&Gpu) -> Option<f64>| {
        let values = gpus.iter().filter_map(|gpu| Some((card_labels(gpu), value(gpu)?)));
        page.write_gauges(name, help, &values.collect::<Vec<_>>())
    };
    each("flotilla_gpu_asleep", "1 while the GPU is powered down", |gpu| {
        Some(flag_value(gpu.asleep))
    })?;
    each("node_drm_gpu_busy_percent", "GPU utilization", |gpu| gpu.busy_percent)?;
    let vram = "Total VRAM of the GPU";
    each("node_drm_memory_vram_size_bytes", vram, |gpu| gpu.vram_total.map(count_value))?;
    let vram = "Used VRAM of the GPU";
    each("node_drm_memory_vram_used_bytes", vram, |gpu| gpu.vram_used.map(count_value))?;
    let gtt = "System memory that the GPU can map";
    each("node_drm_memory_gtt_size_bytes", gtt, |gpu| gpu.gtt_total.map(count_value))?;
    let gtt = "System memory mapped by the GPU";
    each("node_drm_memory_gtt_used_bytes", gtt, |gpu| gpu.gtt_used.map(count_value))?;
    let mut sensors = |name: &str, help: &str, values: fn(&Gpu) -> Vec<(String, f64)>| {
        let values = gpus.iter().flat_map(|gpu| {
            values(gpu).into_iter().map(|(sensor, value)| (chip_labels(gpu, sensor), value))
        });
        page.write_gauges(name, help, &values.collect::<Vec<_>>())
    };
    sensors("node_hwmon_temp_celsius", "GPU temperature", |gpu| {
        gpu.temperatures.iter().map(|one| (one.sensor.clone(), one.celsius)).collect()
    })?;
    sensors("node_hwmon_temp_crit_celsius", "Critical GPU temperature", |gpu| {
        let each = gpu.temperatures.iter();
        each.filter_map(|one| Some((one.sensor.clone(), one.critical?))).collect()
    })?;
    sensors("node_hwmon_power_average_watt", "GPU power", |gpu| {
        gpu.watts.map(|watts| ("power1".to_owned(), watts)).into_iter().collect()
    })?;
    sensors("node_hwmon_freq_freq_mhz", "GPU clock frequency", |gpu| {
        gpu.clocks.iter().map(|one| (one.sensor.clone(), count_value(one.hertz) / 1e6)).collect()
    })
}

fn write_host(page: &mut MetricsPage<'_>, now: &v1::Telemetry) -> fmt::Result {
    let memory = [
        ("MemTotal", "Total memory", now.memory_total),
        ("MemAvailable", "Memory that is free or can be freed", now.memory_available),
        ("SwapTotal", "Total swap", now.swap_total),
        ("SwapFree", "Free swap", now.swap_free),
    ];
    for (name, help, value) in memory {
        page.write_gauge(&format!("node_memory_{name}_bytes"), help, value.map(count_value))?;
    }
    let pressures =
        [("cpu", &now.cpu_pressure), ("io", &now.io_pressure), ("memory", &now.memory_pressure)];
    for (name, pressure) in pressures {
        let seconds = |us: fn(&Pressure) -> Option<u64>| {
            pressure.as_ref().and_then(us).map(|us| count_value(us) / 1e6)
        };
        let waiting = format!("node_pressure_{name}_waiting_seconds");
        page.write_counter(
            &waiting,
            "Time in which at least one task waited",
            seconds(|one| Some(one.some_us)),
        )?;
        if name != "cpu" {
            let stalled = format!("node_pressure_{name}_stalled_seconds");
            page.write_counter(
                &stalled,
                "Time in which all tasks waited",
                seconds(|one| one.full_us),
            )?;
        }
    }
    page.write_gauge(
        "flotilla_cpu_busy_ratio",
        "CPU utilization, share of all cores",
        now.cpu_busy,
    )?;
    page.write_gauge(
        "flotilla_cpu_system_ratio",
        "Kernel and interrupt time, share of all cores",
        now.cpu_system,
    )?;
    page.write_gauge(
        "flotilla_allocation_stalls_per_second",
        "Allocations per second that waited for memory",
        now.allocation_stalls_per_s,
    )?;
    page.write_gauge(
        "flotilla_direct_scans_per_second",
        "Pages scanned per second by allocations that wait for memory",
        now.direct_scans_per_s,
    )?;
    page.write_gauge(
        "flotilla_swapped_in_pages_per_second",
        "Pages swapped in per second",
        now.swapped_in_per_s,
    )?;
    page.write_gauge(
        "flotilla_swapped_out_pages_per_second",
        "Pages swapped out per second",
        now.swapped_out_per_s,
    )
}

fn write_protection(page: &mut MetricsPage<'_>, now: &v1::Telemetry) -> fmt::Result {
    use v1::telemetry::storm::Level;
    page.write_counter(
        "flotilla_tlb_shootdowns",
        "TLB shootdown interrupts",
        now.tlb_shootdowns.map(count_value),
    )?;
    let storm = now.storm.as_ref();
    let level = storm.map(|storm| match storm.level() {
        Level::Unspecified | Level::Calm => 0.0,
        Level::Warn => 1.0,
        Level::Storm => 2.0,
    });
    page.write_gauge(
        "flotilla_tlb_storm_level",
        "TLB shootdown level: 0 calm, 1 warning, 2 storm",
        level,
    )?;
    let storms = storm.map(|storm| count_value(storm.storms));
    page.write_counter(
        "flotilla_tlb_storms",
        "TLB shootdown storms since the agent started",
        storms,
    )?;
    page.write_gauge(
        "flotilla_power_watts",
        "Power of GPUs and CPU, if sensors report it",
        now.watts,
    )?;
    page.write_counter(
        "flotilla_energy_joules",
        "Energy used since the agent started",
        now.watts.map(|_| now.joules),
    )?;
    let resting = flag_value(!now.resting.is_empty());
    page.write_gauge("flotilla_resting", "1 while owner limits block new work", Some(resting))?;
    let warnings = count_value(now.warnings.len() as u64);
    page.write_gauge("flotilla_warnings", "Resources that are scarce or too hot", Some(warnings))
}

fn card_labels(gpu: &v1::telemetry::Gpu) -> MetricLabels {
    let named = if gpu.card.is_empty() { format!("gpu{}", gpu.ordinal) } else { gpu.card.clone() };
    vec![("card", named)]
}

/// The labels as node_exporter names them.
fn chip_labels(gpu: &v1::telemetry::Gpu, sensor: String) -> MetricLabels {
    let chip = gpu.pci.replace('.', "_");
    let chip = if chip.is_empty() { format!("gpu{}", gpu.ordinal) } else { chip };
    vec![("chip", chip), ("sensor", sensor)]
}

#[cfg(test)]
mod tests;
