//! How the system's memory and the GPU's are divided.

use super::{Finding, Severity, gib};
use crate::snapshot::{GpuSeen, Snapshot};

const GIB: u64 = 1 << 30;

/// Of graphics' page limit.
const PAGE: u64 = 4096;

/// The host needs some memory of its own.
const HOST_BYTES: u64 = 4 * GIB;

pub(super) fn check(box_: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    let unified = box_.main_gpu().filter(|gpu| gpu.unified_memory && !gpu.suspended);
    if let Some(gpu) = unified {
        findings.extend(small_gtt(box_, gpu));
        findings.extend(carve_out(gpu));
        findings.extend(eager_swapping(box_));
        findings.extend(nowhere_to_swap(box_));
    }
    findings.extend(deprecated(box_));
    findings.extend(starved(box_));
    findings.extend(swapped(box_));
    findings
}

/// What of the memory a job may plan with, by the kernel's own figures: what torch says of a
/// unified box is twice or half of it. `None` without a GPU, and where its memory is not known.
pub fn budget(box_: &Snapshot) -> Option<u64> {
    let gpu = box_.main_gpu()?;
    if gpu.vram_total == 0 && gpu.gtt_total == 0 {
        return None;
    }
    if !gpu.unified_memory {
        return Some(gpu.vram_total.saturating_sub(gpu.vram_used).saturating_sub(GIB));
    }
    let limit = box_.memory.limit.unwrap_or(u64::MAX);
    let available = box_.memory.available.min(limit).saturating_sub(8 * GIB);
    Some(gpu.gtt_total.max(gpu.vram_total).min(available).min(box_.memory.total / 10 * 8))
}

fn small_gtt(box_: &Snapshot, gpu: &GpuSeen) -> Option<Finding> {
    let total = box_.memory.total;
    (gpu.gtt_total > 0 && gpu.gtt_total < total / 10 * 6).then(|| Finding {
        id: "C-22",
        severity: Severity::Warn,
        seen: format!("the GPU may map {} of {} of memory (GTT)", gib(gpu.gtt_total), gib(total)),
        why: "half of the memory is the kernel's default; models above it do not load",
        remedy: format!(
            "ttm.pages_limit={} on the kernel's command line (all but 8 GiB), rebuild the \
             initramfs, reboot",
            total.saturating_sub(8 * GIB) / PAGE
        ),
        source: "Linux, drivers/gpu/drm/ttm; kyuz0's toolboxes",
    })
}

fn carve_out(gpu: &GpuSeen) -> Option<Finding> {
    (gpu.vram_total >= 16 * GIB).then(|| Finding {
        id: "C-25",
        severity: Severity::Warn,
        seen: format!("the BIOS sets {} aside as VRAM", gib(gpu.vram_total)),
        why: "the host cannot use it: loading a model through host memory runs out",
        remedy: "set the BIOS's UMA buffer to 512 MB and let ttm.pages_limit do the rest".into(),
        source: "a 128 GB box whose host had 31 GiB left",
    })
}

/// The value of `name=` on the kernel's command line.
fn parameter(box_: &Snapshot, name: &str) -> Option<u64> {
    let words = box_.kernel.command_line.split_whitespace();
    words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok()).next_back()
}

fn deprecated(box_: &Snapshot) -> Option<Finding> {
    let megabytes = parameter(box_, "amdgpu.gttsize")?;
    Some(Finding {
        id: "C-23",
        severity: Severity::Warn,
        seen: format!("amdgpu.gttsize={megabytes} on the kernel's command line"),
        why: "it is deprecated: the kernel takes ttm.pages_limit",
        remedy: "remove it and set ttm.pages_limit".into(),
        source: "Linux's own message: configuring gttsize via module parameter is deprecated",
    })
}

fn starved(box_: &Snapshot) -> Option<Finding> {
    let names = ["ttm.pages_limit", "amdttm.pages_limit"];
    let asked = names.into_iter().find_map(|name| parameter(box_, name));
    let pages = asked.or(box_.kernel.ttm_pages_limit)?;
    let bytes = pages.saturating_mul(PAGE);
    let total = box_.memory.total;
    (total > 0 && bytes > total.saturating_sub(HOST_BYTES)).then(|| Finding {
        id: "C-23",
        severity: Severity::Warn,
        seen: format!(
            "the GPU may map {} of {} of memory (ttm.pages_limit={pages})",
            gib(bytes),
            gib(total)
        ),
        why: "nothing is left for the host, which then freezes instead of refusing",
        remedy: format!("ttm.pages_limit={}", total.saturating_sub(8 * GIB) / PAGE),
        source: "halo-forge's notes recommend all of the memory; measured boxes froze at 90 %",
    })
}

/// More than this much swapped out is somebody's memory.
const SWAPPED_BYTES: u64 = 2 * GIB;

fn swapped(box_: &Snapshot) -> Option<Finding> {
    let used = box_.memory.swap_total.saturating_sub(box_.memory.swap_free);
    (!box_.gpus.is_empty() && used > SWAPPED_BYTES).then(|| Finding {
        id: "C-32",
        severity: Severity::Warn,
        seen: format!("{} are swapped out", gib(used)),
        why: "a ROCm process whose pages are swapped keeps a kernel worker at 100 % restoring them",
        remedy: "sysctl vm.swappiness=10, then swapoff -a && swapon -a, or reboot".into(),
        source: "TheRock #7956",
    })
}

/// What keeps a unified box from swapping its weights out.
const SWAPPINESS: u64 = 10;

fn eager_swapping(box_: &Snapshot) -> Option<Finding> {
    let value = box_.kernel.swappiness.filter(|value| *value > SWAPPINESS)?;
    let compaction = box_.kernel.compaction_proactiveness.unwrap_or(20);
    Some(Finding {
        id: "C-31",
        severity: Severity::Info,
        seen: format!("vm.swappiness={value}, vm.compaction_proactiveness={compaction}"),
        why: "the kernel swaps early, and pages of the GPU's with it",
        remedy: "in /etc/sysctl.d/90-flotilla.conf: vm.swappiness=10, \
                 vm.compaction_proactiveness=20, vm.min_free_kbytes=1048576"
            .into(),
        source: "ROCm legacy-rocm-build #6297, its reporter's settings",
    })
}

fn nowhere_to_swap(box_: &Snapshot) -> Option<Finding> {
    let memory = &box_.memory;
    let seen = match memory.swap_total {
        0 => "no swap",
        total if memory.swap_zram >= total => "no swap but compressed memory (zram)",
        _ => return None,
    };
    Some(Finding {
        id: "C-33",
        severity: Severity::Info,
        seen: seen.into(),
        why: "when memory runs short the kernel takes the pages of mapped weights, again and again",
        remedy: "stay within the budget; 8 GiB of swap on a disk give the host room".into(),
        source: "ROCm legacy-rocm-build #6297",
    })
}
