//! Conversion of a telemetry sample to its form in the agent's status.

use hardware::{
    storm::StormLevel,
    telemetry::{self, GpuReading, HostTelemetry},
};
use wire::v1::{
    self,
    telemetry::{Clock, Gpu, Pressure, Storm, Temperature},
};

pub(super) fn convert_level(level: StormLevel) -> v1::telemetry::storm::Level {
    use v1::telemetry::storm::Level as Wire;
    match level {
        StormLevel::Calm => Wire::Calm,
        StormLevel::Warn => Wire::Warn,
        StormLevel::Storm => Wire::Storm,
    }
}

/// `resting` is the reason why no job is taken; empty if jobs are taken.
pub(super) fn convert_telemetry(
    now: &HostTelemetry,
    storm: Storm,
    resting: String,
) -> v1::Telemetry {
    v1::Telemetry {
        at: Some(wire::clock::now()),
        gpus: now.gpus.iter().map(convert_gpu).collect(),
        cpu_busy: now.cpu.map(|cpu| cpu.busy),
        cpu_system: now.cpu.map(|cpu| cpu.system),
        memory_total: now.memory.total,
        memory_available: now.memory.available,
        swap_total: now.memory.swap_total,
        swap_free: now.memory.swap_free,
        cpu_pressure: now.pressure.cpu.map(convert_pressure),
        io_pressure: now.pressure.io.map(convert_pressure),
        memory_pressure: now.pressure.memory.map(convert_pressure),
        tlb_shootdowns: now.tlb_shootdowns,
        tlb_shootdowns_per_s: now.tlb_per_s,
        allocation_stalls_per_s: now.reclaim.stalls_per_s,
        direct_scans_per_s: now.reclaim.scanned_per_s,
        swapped_in_per_s: now.reclaim.swapped_in_per_s,
        swapped_out_per_s: now.reclaim.swapped_out_per_s,
        watts: now.watts,
        joules: now.joules,
        storm: Some(storm),
        warnings: telemetry::telemetry_warnings(now),
        resting,
    }
}

fn convert_gpu(gpu: &GpuReading) -> Gpu {
    let temperature = |one: &telemetry::GpuTemperature| Temperature {
        sensor: one.sensor.clone(),
        celsius: one.celsius,
        critical: one.critical,
    };
    let clock = |one: &telemetry::GpuClock| Clock { sensor: one.sensor.clone(), hertz: one.hertz };
    Gpu {
        ordinal: gpu.ordinal,
        gfx: gpu.gfx.clone(),
        card: gpu.card.clone(),
        pci: gpu.pci.clone(),
        integrated: gpu.integrated,
        asleep: gpu.asleep,
        busy_percent: gpu.busy_percent,
        vram_total: gpu.vram_total,
        vram_used: gpu.vram_used,
        gtt_total: gpu.gtt_total,
        gtt_used: gpu.gtt_used,
        watts: gpu.watts,
        temperatures: gpu.temperatures.iter().map(temperature).collect(),
        clocks: gpu.clocks.iter().map(clock).collect(),
    }
}

fn convert_pressure(pressure: telemetry::StallPressure) -> Pressure {
    let telemetry::StallPressure { some_avg10, some_us, full_us } = pressure;
    Pressure { some_avg10, some_us, full_us }
}
