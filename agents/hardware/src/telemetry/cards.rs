//! The GPUs' own numbers. A card's sensors are touched only while it is awake: asking one that
//! sleeps would wake it.

use serde::Serialize;

use crate::files::{Files, last, number, text};
use crate::target;

/// Sensors of one kind a card may have.
const SENSORS_MAX: u32 = 8;

/// One GPU, just now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GpuNow {
    /// As HIP counts.
    pub ordinal: u32,
    /// `gfx1151`
    pub gfx: String,
    /// `card1`
    pub card: String,
    /// `0000:c1:00.0`
    pub pci: String,
    /// Part of the processor, and in its memory.
    pub integrated: bool,
    /// Powered down: the rest is not known.
    pub asleep: bool,
    pub busy_percent: Option<f64>,
    pub vram_total: Option<u64>,
    pub vram_used: Option<u64>,
    /// Of the system's memory, what the card may map.
    pub gtt_total: Option<u64>,
    pub gtt_used: Option<u64>,
    pub watts: Option<f64>,
    pub temperatures: Vec<Temperature>,
    pub clocks: Vec<Clock>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Temperature {
    /// `edge`, `junction`, `mem`
    pub sensor: String,
    pub celsius: f64,
    pub critical: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Clock {
    /// `sclk`, `mclk`
    pub sensor: String,
    pub hertz: u64,
}

/// The box's GPUs, in HIP's order.
#[derive(Debug, Default)]
pub(super) struct Cards(Vec<Card>);

#[derive(Debug)]
struct Card {
    /// Of `GpuNow`, what does not change.
    known: GpuNow,
    /// `/sys/class/drm/renderD128/device`
    device: String,
    /// Found when the card is first seen awake.
    sensors: Option<Sensors>,
}

/// Paths of the sensors there are.
#[derive(Debug, Default)]
struct Sensors {
    power: Option<String>,
    /// By name, with the temperature at which the card gives up.
    temperatures: Vec<(String, String, Option<f64>)>,
    clocks: Vec<(String, String)>,
}

impl Cards {
    /// What computes, by the compute driver.
    pub(super) fn find(files: &dyn Files) -> Self {
        let nodes = "/sys/class/kfd/kfd/topology/nodes";
        let mut numbers: Vec<u32> =
            files.list(nodes).iter().filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        let found =
            numbers.into_iter().filter_map(|node| Card::find(files, &format!("{nodes}/{node}")));
        let with_ordinal = found.zip(0..).map(|(mut card, ordinal)| {
            card.known.ordinal = ordinal;
            card
        });
        Self(with_ordinal.collect())
    }

    pub(super) fn look(&mut self, files: &dyn Files) -> Vec<GpuNow> {
        self.0.iter_mut().map(|card| card.look(files)).collect()
    }
}

impl Card {
    fn find(files: &dyn Files, node: &str) -> Option<Self> {
        let properties = text(files, &format!("{node}/properties"))?;
        let get = |name: &str| {
            let line =
                properties.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let version = get("gfx_target_version");
        if get("simd_count") == 0 || version == 0 {
            return None;
        }
        let device = format!("/sys/class/drm/renderD{}/device", get("drm_render_minor"));
        let gfx = target::gfx(version);
        let card =
            files.list(&format!("{device}/drm")).into_iter().find(|name| name.starts_with("card"));
        let known = GpuNow {
            integrated: target::is_integrated(&gfx),
            gfx,
            card: card.unwrap_or_default(),
            pci: files.link(&device).map(|link| last(&link).to_owned()).unwrap_or_default(),
            ..GpuNow::default()
        };
        Some(Self { known, device, sensors: None })
    }

    fn look(&mut self, files: &dyn Files) -> GpuNow {
        let mut now = self.known.clone();
        if !is_awake(files, &self.device) {
            now.asleep = true;
            return now;
        }
        let memory = |name: &str| number(files, &format!("{}/mem_info_{name}", self.device));
        let busy = number(files, &format!("{}/gpu_busy_percent", self.device));
        now.busy_percent = busy.filter(|percent| *percent <= 100).map(whole);
        now.vram_total = memory("vram_total");
        now.vram_used = memory("vram_used");
        now.gtt_total = memory("gtt_total");
        now.gtt_used = memory("gtt_used");
        let sensors = self.sensors.get_or_insert_with(|| Sensors::find(files, &self.device));
        now.watts = sensors.power.as_ref().and_then(|path| watts(files, path));
        for (sensor, path, critical) in &sensors.temperatures {
            if let Some(celsius) = celsius(files, path) {
                let (sensor, critical) = (sensor.clone(), *critical);
                now.temperatures.push(Temperature { sensor, celsius, critical });
            }
        }
        for (sensor, path) in &sensors.clocks {
            if let Some(hertz) = number(files, path) {
                now.clocks.push(Clock { sensor: sensor.clone(), hertz });
            }
        }
        now
    }
}

impl Sensors {
    fn find(files: &dyn Files, device: &str) -> Self {
        let all = format!("{device}/hwmon");
        let is_gpu =
            |path: &String| text(files, &format!("{path}/name")).as_deref() == Some("amdgpu");
        let chips = files.list(&all).into_iter().map(|name| format!("{all}/{name}"));
        let Some(chip) = chips.into_iter().find(is_gpu) else { return Self::default() };
        let there = files.list(&chip);
        let path =
            |name: &str| there.iter().any(|one| one == name).then(|| format!("{chip}/{name}"));
        let label = |kind: &str, n: u32| {
            let label = text(files, &format!("{chip}/{kind}{n}_label"));
            label.filter(|label| !label.is_empty()).unwrap_or_else(|| format!("{kind}{n}"))
        };
        let temperature = |n: u32| {
            let input = path(&format!("temp{n}_input"))?;
            let critical = celsius(files, &format!("{chip}/temp{n}_crit"));
            Some((label("temp", n), input, critical))
        };
        let clock = |n: u32| Some((label("freq", n), path(&format!("freq{n}_input"))?));
        Self {
            power: path("power1_average").or_else(|| path("power1_input")),
            temperatures: (1..=SENSORS_MAX).filter_map(temperature).collect(),
            clocks: (1..=SENSORS_MAX).filter_map(clock).collect(),
        }
    }
}

/// Reading this file wakes nothing. A card between two states is left alone.
fn is_awake(files: &dyn Files, device: &str) -> bool {
    match files.read(&format!("{device}/power/runtime_status")) {
        Ok(status) => matches!(status.trim_ascii(), b"active" | b"unsupported"),
        // A kernel without power management.
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// From microwatts; more than any card takes is no reading.
fn watts(files: &dyn Files, path: &str) -> Option<f64> {
    number(files, path).filter(|microwatts| *microwatts < 10_000_000_000).map(|uw| whole(uw) / 1e6)
}

/// From thousandths; colder or hotter than any card can be is no reading.
fn celsius(files: &dyn Files, path: &str) -> Option<f64> {
    let thousandths: i32 = text(files, path)?.parse().ok()?;
    (-50_000..=200_000).contains(&thousandths).then(|| f64::from(thousandths) / 1000.0)
}

#[expect(clippy::cast_precision_loss, reason = "readings of a sensor, far below 2^52")]
fn whole(reading: u64) -> f64 {
    reading as f64
}
