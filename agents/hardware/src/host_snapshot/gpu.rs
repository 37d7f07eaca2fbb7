//! One card as described by the compute driver, the graphics driver and PCI.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DeviceAccess, device_access};
use crate::host_files::{
    ContentFilter, HostFiles, keep_parts, last_component, read_number, read_text,
    read_text_filtered,
};
use crate::target::{is_amd_gpu, is_integrated_target, target_name};

/// The facts of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// The target, such as `gfx1151`.
    pub gfx: String,
    pub ordinal: u32,
    pub node: u32,
    pub device_id: u32,
    pub unified_memory: bool,
    pub render_minor: u32,
    /// The result of opening `/dev/dri/renderD<N>` as this user.
    pub render: DeviceAccess,
    /// The PCI address, such as `0000:c1:00.0`.
    pub pci: String,
    /// True if the kernel saves the complete state of a preempted wave (KFD 1.20).
    pub saves_wave_state: bool,
    pub vram_total: u64,
    pub vram_used: u64,
    /// The system memory that the card may map.
    pub gtt_total: u64,
    pub gtt_used: u64,
    pub mes_firmware: Option<u32>,
    /// True if the card is powered down; memory and sensors are then not read.
    pub suspended: bool,
}

/// HIP's order is that of the KFD nodes.
pub(super) fn read_gpus(files: &dyn HostFiles) -> Vec<GpuInfo> {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let mut numbers: Vec<u32> =
        files.list_names(nodes).iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let seen =
        numbers.into_iter().filter_map(|node| read_gpu(files, &format!("{nodes}/{node}"), node));
    seen.zip(0..).map(|(gpu, ordinal)| GpuInfo { ordinal, ..gpu }).collect()
}

/// Returns `None` for a node without an AMD GPU.
fn read_gpu(files: &dyn HostFiles, directory: &str, node: u32) -> Option<GpuInfo> {
    // The serial number of a card is private.
    let keep: ContentFilter =
        |bytes| keep_parts(bytes, b'\n', |line| !line.starts_with(b"unique_id"));
    let properties = read_text_filtered(files, &format!("{directory}/properties"), keep);
    let properties: BTreeMap<&str, u64> = properties
        .lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name, value.trim().parse().ok()?))
        })
        .collect();
    let get = |name: &str| properties.get(name).copied().unwrap_or(0);
    let version = get("gfx_target_version");
    if !is_amd_gpu(get) {
        return None;
    }
    let narrow = |name: &str| u32::try_from(get(name)).unwrap_or(0);
    let minor = narrow("drm_render_minor");
    let device = format!("/sys/class/drm/renderD{minor}/device");
    // Reading the memory or sensors of a suspended card, or opening it, wakes it. Reading this file
    // does not.
    let suspended = read_text(files, &format!("{device}/power/runtime_status"))
        .is_some_and(|status| status == "suspended" || status == "suspending");
    let node_of_card = format!("/dev/dri/renderD{minor}");
    let render = device_access(if suspended {
        files.check_permission(&node_of_card)
    } else {
        files.open_device(&node_of_card)
    });
    let memory = |name: &str| {
        if suspended { None } else { read_number(files, &format!("{device}/mem_info_{name}")) }
    };
    let bytes = |name: &str| memory(name).unwrap_or(0);
    let firmware = read_text(files, &format!("{device}/fw_version/mes_fw_version"));
    let gfx = target_name(version);
    Some(GpuInfo {
        unified_memory: is_integrated_target(&gfx),
        gfx,
        ordinal: 0,
        node,
        device_id: narrow("device_id"),
        render_minor: minor,
        render,
        pci: files
            .read_link(&device)
            .map_or_else(|| pci_address(&get), |link| last_component(&link).to_owned()),
        saves_wave_state: properties.contains_key("cwsr_size"),
        // The driver's own record is readable while the card is suspended.
        vram_total: memory("vram_total")
            .or_else(|| memory_bank_bytes(files, directory))
            .unwrap_or(0),
        vram_used: bytes("vram_used"),
        gtt_total: bytes("gtt_total"),
        gtt_used: bytes("gtt_used"),
        mes_firmware: firmware.as_deref().and_then(parse_hex),
        suspended,
    })
}

fn memory_bank_bytes(files: &dyn HostFiles, directory: &str) -> Option<u64> {
    let text = read_text(files, &format!("{directory}/mem_banks/0/properties"))?;
    text.lines().find_map(|line| line.strip_prefix("size_in_bytes ")?.trim().parse().ok())
}

/// Formats the PCI address from the compute driver's fields: 49408 is `c1:00.0`.
fn pci_address(get: &dyn Fn(&str) -> u64) -> String {
    let (domain, location) = (get("domain"), get("location_id"));
    let (bus, device, function) = (location >> 8 & 0xff, location >> 3 & 0x1f, location & 7);
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")
}

/// Parses a number such as `0x00000083`.
fn parse_hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}
