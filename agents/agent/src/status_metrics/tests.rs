use metrics::{parse_documented_names, parse_metric_names};
use v1::telemetry::{Clock, Gpu, Storm, Temperature};

use super::*;

#[derive(Debug)]
struct Told(v1::AgentStatus);

impl MetricsSource for Told {
    fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        write_status(page, &self.0)
    }
}

fn render(status: v1::AgentStatus) -> String {
    metrics::render_source(Told(status))
}

fn everything() -> v1::AgentStatus {
    let pressure = || Some(Pressure { some_avg10: 1.5, some_us: 2_500_000, full_us: Some(1) });
    let gpu = Gpu {
        gfx: "gfx1201".into(),
        card: "card1".into(),
        pci: "0000:c1:00.0".into(),
        busy_percent: Some(97.0),
        vram_total: Some(34_208_743_424),
        vram_used: Some(1),
        gtt_total: Some(2),
        gtt_used: Some(3),
        watts: Some(212.0),
        temperatures: vec![Temperature {
            sensor: "junction".into(),
            celsius: 71.0,
            critical: Some(110.0),
        }],
        clocks: vec![Clock { sensor: "sclk".into(), hertz: 2_350_000_000 }],
        ..Gpu::default()
    };
    let telemetry = v1::Telemetry {
        gpus: vec![gpu],
        cpu_busy: Some(0.5),
        cpu_system: Some(0.1),
        memory_total: Some(1),
        memory_available: Some(1),
        swap_total: Some(0),
        swap_free: Some(0),
        cpu_pressure: pressure(),
        io_pressure: pressure(),
        memory_pressure: pressure(),
        tlb_shootdowns: Some(9),
        tlb_shootdowns_per_s: Some(1.0),
        allocation_stalls_per_s: Some(0.0),
        direct_scans_per_s: Some(0.0),
        swapped_in_per_s: Some(0.0),
        swapped_out_per_s: Some(0.0),
        watts: Some(212.0),
        joules: 3.5,
        storm: Some(Storm { level: 3, storms: 1, ..Storm::default() }),
        ..v1::Telemetry::default()
    };
    v1::AgentStatus {
        agent: "box".into(),
        roles: vec!["trainer".into()],
        state: v1::agent_status::State::Ready.into(),
        telemetry: Some(telemetry),
        exchange: Some(v1::Exchange { bytes_from_peers: 7, ..v1::Exchange::default() }),
        ..v1::AgentStatus::default()
    }
}

#[test]
fn the_page_names_every_metric_that_is_served_and_no_other() {
    let page = include_str!("../../../../docs/METRICS.md");
    let (page, _) = page.split_once("## The coordinator").expect("what others serve");
    assert_eq!(parse_metric_names(&render(everything())), parse_documented_names(page));
}

#[test]
fn values_carry_the_labels_and_units_of_their_names() {
    let text = render(everything());
    for line in [
        "node_drm_gpu_busy_percent{card=\"card1\"} 97.0",
        "node_hwmon_temp_celsius{chip=\"0000:c1:00_0\",sensor=\"junction\"} 71.0",
        "node_hwmon_freq_freq_mhz{chip=\"0000:c1:00_0\",sensor=\"sclk\"} 2350.0",
        "node_pressure_memory_waiting_seconds_total 2.5",
        "flotilla_agent_state{state=\"ready\"} 1.0",
        "flotilla_tlb_storm_level 2.0",
        "flotilla_energy_joules_total 3.5",
        "# EOF",
    ] {
        assert!(text.lines().any(|one| one == line), "no {line} in:\n{text}");
    }
}

#[test]
fn a_host_without_telemetry_serves_only_agent_metrics_and_labels_are_escaped() {
    let agent = "a\"b\\c\nd".to_owned();
    let text = render(v1::AgentStatus { agent, ..v1::AgentStatus::default() });
    assert!(parse_metric_names(&text).iter().all(|name| !name.starts_with("node_")), "{text}");
    assert!(text.contains(r#"agent="a\"b\\c\nd""#), "{text}");
}
