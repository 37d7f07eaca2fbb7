//! One card: what the compute driver, the graphics driver and PCI say of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Access, access};
use crate::files::{Files, Keep, keep_parts, last, number, part, text};

/// Of AMD, as PCI has it.
const VENDOR: u64 = 4098;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSeen {
    /// `gfx1151`
    pub gfx: String,
    /// As HIP counts.
    pub ordinal: u32,
    pub node: u32,
    pub device_id: u32,
    pub unified_memory: bool,
    pub render_minor: u32,
    /// `/dev/dri/renderD<N>`, opened as this user.
    pub render: Access,
    /// `0000:c1:00.0`
    pub pci: String,
    /// Whether the kernel saves a wave's whole state when it is preempted (KFD 1.20).
    pub saves_wave_state: bool,
    pub vram_total: u64,
    pub vram_used: u64,
    /// Of the system's memory, what the card may map.
    pub gtt_total: u64,
    pub gtt_used: u64,
    pub mes_firmware: Option<u32>,
    /// The card is powered down: memory and sensors were not asked.
    pub suspended: bool,
}

/// In HIP's order: the rank among the GPUs by number of their KFD node.
pub(super) fn all(files: &dyn Files) -> Vec<GpuSeen> {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let mut numbers: Vec<u32> =
        files.list(nodes).iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let seen = numbers.into_iter().filter_map(|node| one(files, &format!("{nodes}/{node}"), node));
    seen.zip(0..).map(|(gpu, ordinal)| GpuSeen { ordinal, ..gpu }).collect()
}

fn one(files: &dyn Files, directory: &str, node: u32) -> Option<GpuSeen> {
    // A card's serial number is nobody's business.
    let keep: Keep = |bytes| keep_parts(bytes, b'\n', |line| !line.starts_with(b"unique_id"));
    let properties = part(files, &format!("{directory}/properties"), keep);
    let properties: BTreeMap<&str, u64> = properties
        .lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name, value.trim().parse().ok()?))
        })
        .collect();
    let get = |name: &str| properties.get(name).copied().unwrap_or(0);
    let version = get("gfx_target_version");
    if get("simd_count") == 0 || version == 0 || get("vendor_id") != VENDOR {
        return None;
    }
    let narrow = |name: &str| u32::try_from(get(name)).unwrap_or(0);
    let minor = narrow("drm_render_minor");
    let device = format!("/sys/class/drm/renderD{minor}/device");
    // Reading a sleeping card's memory or sensors wakes it, and opening it does; this file does
    // not.
    let suspended = text(files, &format!("{device}/power/runtime_status"))
        .is_some_and(|status| status == "suspended" || status == "suspending");
    let node_of_card = format!("/dev/dri/renderD{minor}");
    let render = access(if suspended {
        files.may_open(&node_of_card)
    } else {
        files.open_device(&node_of_card)
    });
    let memory = |name: &str| {
        if suspended { None } else { number(files, &format!("{device}/mem_info_{name}")) }
    };
    let bytes = |name: &str| memory(name).unwrap_or(0);
    let firmware = text(files, &format!("{device}/fw_version/mes_fw_version"));
    let gfx = crate::target::gfx(version);
    Some(GpuSeen {
        unified_memory: crate::target::is_integrated(&gfx),
        gfx,
        ordinal: 0,
        node,
        device_id: narrow("device_id"),
        render_minor: minor,
        render,
        pci: files.link(&device).map_or_else(|| address(&get), |link| last(&link).to_owned()),
        saves_wave_state: properties.contains_key("cwsr_size"),
        // The driver's own note of it can be read while the card sleeps.
        vram_total: memory("vram_total").or_else(|| bank(files, directory)).unwrap_or(0),
        vram_used: bytes("vram_used"),
        gtt_total: bytes("gtt_total"),
        gtt_used: bytes("gtt_used"),
        mes_firmware: firmware.as_deref().and_then(parse_hex),
        suspended,
    })
}

/// Of a card's own memory.
fn bank(files: &dyn Files, directory: &str) -> Option<u64> {
    let text = text(files, &format!("{directory}/mem_banks/0/properties"))?;
    text.lines().find_map(|line| line.strip_prefix("size_in_bytes ")?.trim().parse().ok())
}

/// Bus, device and function as the compute driver packs them: 49408 is `c1:00.0`.
fn address(get: &dyn Fn(&str) -> u64) -> String {
    let (domain, location) = (get("domain"), get("location_id"));
    let (bus, device, function) = (location >> 8 & 0xff, location >> 3 & 0x1f, location & 7);
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")
}

/// `0x00000083`
fn parse_hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}
