use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::host_files::{CapturedEntry, HostCapture, LiveFiles};

/// A tree of files in memory, with its directories.
pub(crate) fn tree(files: &[(&str, &str)]) -> HostCapture {
    let mut capture = HostCapture::default();
    for (path, text) in files {
        put(&mut capture, path, text.as_bytes().to_vec());
    }
    capture
}

fn put(capture: &mut HostCapture, path: &str, bytes: Vec<u8>) {
    capture.entries.insert(path.to_owned(), CapturedEntry::File(bytes));
    let mut child = path;
    while let Some((parent, name)) = child.rsplit_once('/').filter(|(parent, _)| !parent.is_empty())
    {
        let names =
            capture.entries.entry(parent.to_owned()).or_insert(CapturedEntry::Names(Vec::new()));
        let CapturedEntry::Names(names) = names else { panic!("{parent} is a file") };
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
            names.sort();
        }
        child = parent;
    }
}

const CARD: &str = "/sys/class/drm/renderD128/device";

/// An R9700 with the values of such cards, and a processor.
fn card() -> Vec<(String, String)> {
    let node = "/sys/class/kfd/kfd/topology/nodes";
    let files = [
        (
            format!("{node}/0/properties"),
            "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\n",
        ),
        (
            format!("{node}/1/properties"),
            "simd_count 128\ngfx_target_version 120001\nvendor_id 4098\ndrm_render_minor 128\n",
        ),
        (format!("{CARD}/power/runtime_status"), "active\n"),
        (format!("{CARD}/drm/card1/dev"), "226:1\n"),
        (format!("{CARD}/gpu_busy_percent"), "97\n"),
        (format!("{CARD}/mem_info_vram_total"), "34208743424\n"),
        (format!("{CARD}/mem_info_vram_used"), "30000000000\n"),
        (format!("{CARD}/mem_info_gtt_total"), "16441004032\n"),
        (format!("{CARD}/mem_info_gtt_used"), "15000000\n"),
        (format!("{CARD}/hwmon/hwmon2/name"), "nvme\n"),
        (format!("{CARD}/hwmon/hwmon3/name"), "amdgpu\n"),
        (format!("{CARD}/hwmon/hwmon3/power1_average"), "212000000\n"),
        (format!("{CARD}/hwmon/hwmon3/temp1_input"), "62000\n"),
        (format!("{CARD}/hwmon/hwmon3/temp1_label"), "edge\n"),
        (format!("{CARD}/hwmon/hwmon3/temp1_crit"), "110000\n"),
        (format!("{CARD}/hwmon/hwmon3/temp2_input"), "71000\n"),
        (format!("{CARD}/hwmon/hwmon3/temp2_label"), "junction\n"),
        (format!("{CARD}/hwmon/hwmon3/temp2_crit"), "110000\n"),
        (format!("{CARD}/hwmon/hwmon3/freq1_input"), "2350000000\n"),
        (format!("{CARD}/hwmon/hwmon3/freq1_label"), "sclk\n"),
        ("/proc/stat".into(), "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n"),
        (
            "/proc/meminfo".into(),
            "MemTotal:       32882008 kB\nMemFree: 1 kB\nMemAvailable:   16441004 kB\n",
        ),
        (
            "/proc/vmstat".into(),
            "pswpin 5\npswpout 7\nallocstall_dma 0\nallocstall_normal 40\npgscan_direct 100\npgscan_direct_throttle 9\n",
        ),
        (
            "/proc/pressure/memory".into(),
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=12345\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=99\n",
        ),
        (
            "/proc/interrupts".into(),
            "            CPU0       CPU1\n  0:         34          0   IO-APIC   2-edge      timer\n TLB:       9452       9671   TLB shootdowns\n ERR:          0\n",
        ),
    ];
    files.into_iter().map(|(path, text)| (path, text.to_owned())).collect()
}

fn with(changes: &[(&str, &str)]) -> HostCapture {
    let mut files: BTreeMap<String, String> = card().into_iter().collect();
    files.extend(changes.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())));
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
    tree(&files)
}

fn look(files: &HostCapture) -> HostTelemetry {
    TelemetrySampler::default().take_sample(files, 0, true)
}

#[test]
fn a_card_s_numbers_are_read_by_their_labels() {
    let now = look(&with(&[]));
    let [gpu] = &now.gpus[..] else { panic!("{now:?}") };
    assert_eq!((gpu.gfx.as_str(), gpu.card.as_str(), gpu.integrated), ("gfx1201", "card1", false));
    assert_eq!((gpu.busy_percent, gpu.watts), (Some(97.0), Some(212.0)));
    assert_eq!((gpu.vram_total, gpu.gtt_used), (Some(34_208_743_424), Some(15_000_000)));
    let junction = &gpu.temperatures[1];
    assert_eq!(
        (junction.sensor.as_str(), junction.celsius, junction.critical),
        ("junction", 71.0, Some(110.0))
    );
    assert_eq!(gpu.clocks, [GpuClock { sensor: "sclk".into(), hertz: 2_350_000_000 }]);
    assert_eq!((now.watts, now.max_celsius()), (Some(212.0), Some(71.0)));
    assert_eq!(now.tlb_shootdowns, Some(9452 + 9671));
    assert_eq!(now.memory.available, Some(16_441_004 * 1024));
    assert_eq!(now.pressure.memory.unwrap().full_us, Some(99));
    assert_eq!((now.cpu, now.tlb_per_s), (None, None), "there is nothing to compare with yet");
}

#[test]
fn rates_are_those_since_the_look_before() {
    let mut sampler = TelemetrySampler::default();
    sampler.take_sample(&with(&[]), 1000, true);
    let later = with(&[
        ("/proc/stat", "cpu  150 0 130 820 50 10 10 0 0 0\n"),
        (
            "/proc/vmstat",
            "pswpin 5\npswpout 7\nallocstall_dma 0\nallocstall_normal 60\npgscan_direct 100\n",
        ),
        ("/proc/interrupts", "TLB:  689452  9671   TLB shootdowns\n"),
    ]);
    let now = sampler.take_sample(&later, 3000, true);
    assert_eq!(now.tlb_per_s, Some(340_000.0));
    let cpu = now.cpu.unwrap();
    assert!(
        (cpu.busy - 150.0 / 170.0).abs() < 1e-9 && (cpu.system - 100.0 / 170.0).abs() < 1e-9,
        "{cpu:?}"
    );
    assert_eq!((now.reclaim.stalls_per_s, now.reclaim.scanned_per_s), (Some(10.0), Some(0.0)));
    assert!((now.joules - 2.0 * 212.0).abs() < 1e-9);
}

#[test]
fn a_counter_that_went_back_makes_no_rate_and_the_next_one_counts_from_there() {
    let mut sampler = TelemetrySampler::default();
    let at = |count: u64| with(&[("/proc/interrupts", &format!("TLB: {count} TLB shootdowns\n"))]);
    let rates = [1000, 400, 900]
        .into_iter()
        .zip([0, 1000, 2000])
        .map(|(count, ms)| sampler.take_sample(&at(count), ms, true).tlb_per_s);
    assert_eq!(rates.collect::<Vec<_>>(), [None, None, Some(500.0)]);
}

#[test]
fn of_a_card_that_sleeps_only_its_state_is_read() {
    for status in ["suspended", "suspending", "resuming", "error", ""] {
        let path = format!("{CARD}/power/runtime_status");
        let files = with(&[(&path, status)]);
        let looks = crate::host_files::RecordingFiles::new(&files);
        let now = TelemetrySampler::default().take_sample(&looks, 0, true);
        assert!(now.gpus[0].asleep && now.watts.is_none(), "{status}");
        let touched: BTreeSet<String> = looks
            .into_capture()
            .entries
            .into_keys()
            .filter(|path| path.starts_with(CARD))
            .collect();
        let harmless = [format!("{CARD}/drm"), path];
        assert!(touched.iter().all(|path| harmless.contains(path)), "{status}: {touched:?}");
    }
}

#[test]
fn without_sensors_a_card_is_as_it_was_and_not_asked() {
    let mut sampler = TelemetrySampler::default();
    sampler.take_sample(&with(&[]), 0, true);
    let busy = format!("{CARD}/gpu_busy_percent");
    let files = with(&[(&busy, "3")]);
    let looks = crate::host_files::RecordingFiles::new(&files);
    let now = sampler.take_sample(&looks, 5000, false);
    assert_eq!((now.gpus[0].busy_percent, now.sensors_at_ms), (Some(97.0), 0));
    assert!(
        looks.into_capture().entries.into_keys().all(|path| !path.starts_with("/sys/class/drm"))
    );
    assert_eq!(sampler.take_sample(&files, 10_000, true).gpus[0].busy_percent, Some(3.0));
}

#[test]
fn a_value_that_is_none_is_absent_and_the_others_stay() {
    let hwmon = format!("{CARD}/hwmon/hwmon3");
    let path = |name: &str| format!("{hwmon}/{name}");
    let power = path("power1_average");
    for value in ["N/A", "", "-1", "99999999999999999999999", "18446744073709551615"] {
        let now = look(&with(&[(&power, value)]));
        assert_eq!((now.gpus[0].watts, now.gpus[0].busy_percent), (None, Some(97.0)), "{value:?}");
    }
    let mut busy = with(&[]);
    // EBUSY, as a card in a reset answers.
    busy.entries.insert(format!("{CARD}/gpu_busy_percent"), CapturedEntry::Failed(16));
    busy.entries.insert(path("temp1_input"), CapturedEntry::Failed(95));
    let now = look(&busy);
    assert_eq!((now.gpus[0].busy_percent, now.gpus[0].temperatures.len()), (None, 1));
    let cut = with(&[("/proc/interrupts", " TLB:       94"), ("/proc/stat", "cpu  100 0 5")]);
    let now = look(&cut);
    assert_eq!((now.tlb_shootdowns, now.cpu), (Some(94), None));
}

#[test]
fn a_card_of_another_vendor_is_ignored() {
    let node = "simd_count 80\ngfx_target_version 120001\nvendor_id 4318\ndrm_render_minor 128\n";
    let files = with(&[("/sys/class/kfd/kfd/topology/nodes/1/properties", node)]);
    assert_eq!(look(&files).gpus, []);
}

#[test]
fn an_integrated_gpu_s_power_is_the_package_s_and_counted_once() {
    let package = |energy: &str, gfx: &str| {
        let node = format!(
            "simd_count 80\ngfx_target_version {gfx}\nvendor_id 4098\ndrm_render_minor 128\n"
        );
        with(&[
            ("/sys/class/powercap/intel-rapl:0/energy_uj", energy),
            ("/sys/class/kfd/kfd/topology/nodes/1/properties", &node),
        ])
    };
    for (gfx, watts) in [("110501", 212.0), ("120001", 212.0 + 45.0)] {
        let mut sampler = TelemetrySampler::default();
        sampler.take_sample(&package("1000000", gfx), 0, true);
        let now = sampler.take_sample(&package("46000000", gfx), 1000, true);
        assert_eq!(now.watts, Some(watts), "{gfx}");
    }
}

#[test]
fn low_memory_and_high_temperatures_are_warned_about() {
    assert_eq!(telemetry_warnings(&look(&with(&[]))), [""; 0]);
    let hot = format!("{CARD}/hwmon/hwmon3/temp2_input");
    let now = look(&with(&[
        (&hot, "106000"),
        ("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 4 kB\n"),
        ("/proc/pressure/memory", "some avg10=35.00 avg60=0.00 avg300=0.00 total=1\n"),
    ]));
    let said = telemetry_warnings(&now).join("\n");
    for words in ["35 %", "96 % of the memory", "junction is at 106"] {
        assert!(said.contains(words), "{said}");
    }
}

/// Contents of the files of a sample, with bytes of every kind and very large numbers.
fn content() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        any::<i128>().prop_map(|number| number.to_string().into_bytes()),
        any::<f64>()
            .prop_map(|number| format!("some avg10={number} total={number}\n").into_bytes()),
        proptest::collection::vec(any::<u64>(), 0..9).prop_map(|columns| {
            let columns: Vec<String> = columns.iter().map(u64::to_string).collect();
            format!(
                "cpu {0}\nTLB: {0}\npswpin {0}\nMemTotal: {0} kB\nsimd_count {0}\n",
                columns.join(" ")
            )
            .into_bytes()
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_input_makes_a_look_panic_or_a_number_insane(
        broken in proptest::collection::vec((any::<prop::sample::Index>(), content(), any::<bool>()), 0..12),
        times in proptest::collection::vec(any::<u64>(), 3),
    ) {
        let paths: Vec<String> = card().into_iter().map(|(path, _)| path).collect();
        let (first, mut second) = (with(&[]), with(&[]));
        for (place, bytes, fails) in broken {
            let seen = if fails { CapturedEntry::Failed(16) } else { CapturedEntry::File(bytes) };
            second.entries.insert(place.get(&paths).clone(), seen);
        }
        let mut sampler = TelemetrySampler::default();
        let mut weather = crate::storm::StormDetector::default();
        for (files, at) in [&first, &second, &first].into_iter().zip(times) {
            let now = sampler.take_sample(files, at, true);
            weather.observe_sample(&now);
            telemetry_warnings(&now);
            let sane = |value: Option<f64>| value.is_none_or(|value| value.is_finite() && value >= 0.0);
            prop_assert!(sane(now.tlb_per_s) && sane(now.watts) && sane(Some(now.joules)), "{now:?}");
            prop_assert!(now.cpu.is_none_or(|cpu| (0.0..=1.0).contains(&cpu.busy) && (0.0..=1.0).contains(&cpu.system)), "{now:?}");
            prop_assert!(sane(now.max_gpu_busy()), "{now:?}");
        }
    }
}

/// The design allows 0.2 % of a core at one sample a second.
#[test]
#[ignore = "measures this machine: run it by hand, in a release build"]
fn the_cost_of_a_look() {
    const LOOKS: u64 = 2000;
    let directory = tempfile::tempdir().unwrap();
    for (path, text) in card() {
        // The size on a host of 32 threads.
        let text = if path == "/proc/interrupts" { interrupts(32) } else { text };
        let path = directory.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    for (what, root) in [("this box", std::path::Path::new("/")), ("a fixture", directory.path())] {
        let (files, mut sampler) = (LiveFiles::new(root), TelemetrySampler::default());
        let before = cpu_ticks();
        for look in 0..LOOKS {
            sampler.take_sample(&files, look * 1000, true);
        }
        let seconds = (cpu_ticks() - before) as f64 / 100.0;
        println!("{what}: {:.3} ms of a core a look", seconds / LOOKS as f64 * 1e3);
    }
}

fn interrupts(cores: usize) -> String {
    let row = |name: String| {
        format!("{name:>5}:{}   IR-PCI-MSIX some-device\n", " 123456789".repeat(cores))
    };
    let rows: String = (0..150).map(|n| row(n.to_string())).collect();
    rows + &row("TLB".into())
}

fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    stat.rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|n| n.parse::<u64>().unwrap())
        .sum()
}
