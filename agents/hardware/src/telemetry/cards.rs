//! The readings of GPUs. A card's sensors are read only while it is awake, because reading them
//! would wake it.

use serde::Serialize;

use crate::host_files::{HostFiles, last_component, read_number, read_text};
use crate::target;

const SENSORS_MAX: u32 = 8;

/// The readings of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GpuReading {
    pub ordinal: u32,
    /// The target, such as `gfx1151`.
    pub gfx: String,
    /// The DRM name, such as `card1`.
    pub card: String,
    /// The PCI address, such as `0000:c1:00.0`.
    pub pci: String,
    /// True if the GPU is part of the processor and uses system memory.
    pub integrated: bool,
    /// True if the card is powered down; the readings are then absent.
    pub asleep: bool,
    pub busy_percent: Option<f64>,
    pub vram_total: Option<u64>,
    pub vram_used: Option<u64>,
    /// The system memory that the card may map.
    pub gtt_total: Option<u64>,
    pub gtt_used: Option<u64>,
    pub watts: Option<f64>,
    pub temperatures: Vec<GpuTemperature>,
    pub clocks: Vec<GpuClock>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuTemperature {
    /// The sensor's name: `edge`, `junction`, `mem`.
    pub sensor: String,
    pub celsius: f64,
    pub critical: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuClock {
    /// The clock's name: `sclk`, `mclk`.
    pub sensor: String,
    pub hertz: u64,
}

#[derive(Debug, Default)]
pub(super) struct CardList(Vec<GpuCard>);

#[derive(Debug)]
struct GpuCard {
    /// The values of a reading that do not change.
    constant_values: GpuReading,
    /// The device directory, such as `/sys/class/drm/renderD128/device`.
    device: String,
    /// Searched when the card is first seen awake.
    sensors: Option<CardSensors>,
}

#[derive(Debug, Default)]
struct CardSensors {
    power: Option<String>,
    /// The name, the path and the critical temperature of each sensor.
    temperatures: Vec<(String, String, Option<f64>)>,
    clocks: Vec<(String, String)>,
}

impl CardList {
    pub(super) fn find_cards(files: &dyn HostFiles) -> Self {
        let nodes = "/sys/class/kfd/kfd/topology/nodes";
        let mut numbers: Vec<u32> =
            files.list_names(nodes).iter().filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        let found = numbers
            .into_iter()
            .filter_map(|node| GpuCard::find_card(files, &format!("{nodes}/{node}")));
        let with_ordinal = found.zip(0..).map(|(mut card, ordinal)| {
            card.constant_values.ordinal = ordinal;
            card
        });
        Self(with_ordinal.collect())
    }

    pub(super) fn read_cards(&mut self, files: &dyn HostFiles) -> Vec<GpuReading> {
        self.0.iter_mut().map(|card| card.read_card(files)).collect()
    }
}

impl GpuCard {
    fn find_card(files: &dyn HostFiles, node: &str) -> Option<Self> {
        let properties = read_text(files, &format!("{node}/properties"))?;
        let get = |name: &str| {
            let line =
                properties.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let version = get("gfx_target_version");
        if !target::is_amd_gpu(get) {
            return None;
        }
        let device = format!("/sys/class/drm/renderD{}/device", get("drm_render_minor"));
        let gfx = target::target_name(version);
        let card = files
            .list_names(&format!("{device}/drm"))
            .into_iter()
            .find(|name| name.starts_with("card"));
        let known = GpuReading {
            integrated: target::is_integrated_target(&gfx),
            gfx,
            card: card.unwrap_or_default(),
            pci: files
                .read_link(&device)
                .map(|link| last_component(&link).to_owned())
                .unwrap_or_default(),
            ..GpuReading::default()
        };
        Some(Self { constant_values: known, device, sensors: None })
    }

    /// Reads only the constant values if the card is suspended.
    fn read_card(&mut self, files: &dyn HostFiles) -> GpuReading {
        let mut now = self.constant_values.clone();
        if !is_awake(files, &self.device) {
            now.asleep = true;
            return now;
        }
        let memory = |name: &str| read_number(files, &format!("{}/mem_info_{name}", self.device));
        let busy = read_number(files, &format!("{}/gpu_busy_percent", self.device));
        now.busy_percent = busy.filter(|percent| *percent <= 100).map(to_float);
        now.vram_total = memory("vram_total");
        now.vram_used = memory("vram_used");
        now.gtt_total = memory("gtt_total");
        now.gtt_used = memory("gtt_used");
        let sensors =
            self.sensors.get_or_insert_with(|| CardSensors::find_sensors(files, &self.device));
        now.watts = sensors.power.as_ref().and_then(|path| read_watts(files, path));
        for (sensor, path, critical) in &sensors.temperatures {
            if let Some(celsius) = read_celsius(files, path) {
                let (sensor, critical) = (sensor.clone(), *critical);
                now.temperatures.push(GpuTemperature { sensor, celsius, critical });
            }
        }
        for (sensor, path) in &sensors.clocks {
            if let Some(hertz) = read_number(files, path) {
                now.clocks.push(GpuClock { sensor: sensor.clone(), hertz });
            }
        }
        now
    }
}

impl CardSensors {
    fn find_sensors(files: &dyn HostFiles, device: &str) -> Self {
        let all = format!("{device}/hwmon");
        let is_gpu =
            |path: &String| read_text(files, &format!("{path}/name")).as_deref() == Some("amdgpu");
        let chips = files.list_names(&all).into_iter().map(|name| format!("{all}/{name}"));
        let Some(chip) = chips.into_iter().find(is_gpu) else { return Self::default() };
        let there = files.list_names(&chip);
        let path =
            |name: &str| there.iter().any(|one| one == name).then(|| format!("{chip}/{name}"));
        let label = |kind: &str, n: u32| {
            let label = read_text(files, &format!("{chip}/{kind}{n}_label"));
            label.filter(|label| !label.is_empty()).unwrap_or_else(|| format!("{kind}{n}"))
        };
        let temperature = |n: u32| {
            let input = path(&format!("temp{n}_input"))?;
            let critical = read_celsius(files, &format!("{chip}/temp{n}_crit"));
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

/// Reading this file does not wake the card; a card in transition counts as suspended.
fn is_awake(files: &dyn HostFiles, device: &str) -> bool {
    match files.read(&format!("{device}/power/runtime_status")) {
        Ok(status) => matches!(status.trim_ascii(), b"active" | b"unsupported"),
        // A kernel without power management.
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// The file has microwatts. Implausibly high values are rejected.
fn read_watts(files: &dyn HostFiles, path: &str) -> Option<f64> {
    read_number(files, path)
        .filter(|microwatts| *microwatts < 10_000_000_000)
        .map(|uw| to_float(uw) / 1e6)
}

/// The file has thousandths of a degree. Implausible values are rejected.
fn read_celsius(files: &dyn HostFiles, path: &str) -> Option<f64> {
    let thousandths: i32 = read_text(files, path)?.parse().ok()?;
    (-50_000..=200_000).contains(&thousandths).then(|| f64::from(thousandths) / 1000.0)
}

#[expect(clippy::cast_precision_loss, reason = "readings of a sensor, far below 2^52")]
fn to_float(reading: u64) -> f64 {
    reading as f64
}
