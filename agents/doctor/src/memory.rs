//! Checks of how system memory and GPU memory are divided.

use super::{DoctorFinding, Severity, format_gib};
use hardware::host_snapshot::{GpuInfo, HostSnapshot};

const GIB: u64 = 1 << 30;

const TTM_PAGE_BYTES: u64 = 4096;

/// The memory that the host needs for itself.
const HOST_BYTES: u64 = 4 * GIB;

pub(super) fn check_memory(box_: &HostSnapshot) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    let unified = box_.main_gpu().filter(|gpu| gpu.unified_memory && !gpu.suspended);
    if let Some(gpu) = unified {
        findings.extend(check_gtt_size(box_, gpu));
        findings.extend(check_carve_out(gpu));
        findings.extend(check_swappiness(box_));
        findings.extend(check_missing_swap(box_));
    }
    findings.extend(check_deprecated_gttsize(box_));
    findings.extend(check_page_limit(box_));
    findings.extend(check_swapped_memory(box_));
    findings
}

/// Returns the bytes that a job may plan with, from the kernel's figures; those of torch are wrong
/// by a factor of two on unified memory. `None` without a GPU, or if its memory is unknown.
///
/// A card with its own memory: the free VRAM less 1 GiB. Unified memory: the minimum of GTT,
/// available memory less 8 GiB, and 80 % of the total.
pub fn memory_budget(box_: &HostSnapshot) -> Option<u64> {
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

fn check_gtt_size(box_: &HostSnapshot, gpu: &GpuInfo) -> Option<DoctorFinding> {
    let total = box_.memory.total;
    (gpu.gtt_total > 0 && gpu.gtt_total < total / 10 * 6).then(|| DoctorFinding {
        id: "C-22",
        severity: Severity::Warn,
        seen: format!(
            "the GPU may map {} of {} of memory (GTT)",
            format_gib(gpu.gtt_total),
            format_gib(total)
        ),
        why: "half of the memory is the kernel's default; models above it do not load",
        remedy: format!(
            "ttm.pages_limit={} on the kernel's command line (all but 8 GiB), rebuild the \
             initramfs, reboot",
            total.saturating_sub(8 * GIB) / TTM_PAGE_BYTES
        ),
        source: "Linux, drivers/gpu/drm/ttm; kyuz0's toolboxes",
    })
}

fn check_carve_out(gpu: &GpuInfo) -> Option<DoctorFinding> {
    (gpu.vram_total >= 16 * GIB).then(|| DoctorFinding {
        id: "C-25",
        severity: Severity::Warn,
        seen: format!("the BIOS sets {} aside as VRAM", format_gib(gpu.vram_total)),
        why: "the host cannot use it: loading a model through host memory runs out",
        remedy: "set the BIOS's UMA buffer to 512 MB and let ttm.pages_limit do the rest".into(),
        source: "a 128 GB box whose host had 31 GiB left",
    })
}

/// Returns the value of `name=` on the kernel's command line.
fn kernel_parameter(box_: &HostSnapshot, name: &str) -> Option<u64> {
    let words = box_.kernel.command_line.split_whitespace();
    words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok()).next_back()
}

fn check_deprecated_gttsize(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let megabytes = kernel_parameter(box_, "amdgpu.gttsize")?;
    Some(DoctorFinding {
        id: "C-23",
        severity: Severity::Warn,
        seen: format!("amdgpu.gttsize={megabytes} on the kernel's command line"),
        why: "it is deprecated: the kernel takes ttm.pages_limit",
        remedy: "remove it and set ttm.pages_limit".into(),
        source: "Linux's own message: configuring gttsize via module parameter is deprecated",
    })
}

/// A page limit must leave memory to the host.
fn check_page_limit(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let names = ["ttm.pages_limit", "amdttm.pages_limit"];
    let asked = names.into_iter().find_map(|name| kernel_parameter(box_, name));
    let pages = asked.or(box_.kernel.ttm_pages_limit)?;
    let bytes = pages.saturating_mul(TTM_PAGE_BYTES);
    let total = box_.memory.total;
    (total > 0 && bytes > total.saturating_sub(HOST_BYTES)).then(|| DoctorFinding {
        id: "C-23",
        severity: Severity::Warn,
        seen: format!(
            "the GPU may map {} of {} of memory (ttm.pages_limit={pages})",
            format_gib(bytes),
            format_gib(total)
        ),
        why: "nothing is left for the host, which then freezes instead of refusing",
        remedy: format!("ttm.pages_limit={}", total.saturating_sub(8 * GIB) / TTM_PAGE_BYTES),
        source: "halo-forge's notes recommend all of the memory; measured boxes froze at 90 %",
    })
}

const SWAPPED_BYTES_MAX: u64 = 2 * GIB;

fn check_swapped_memory(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let used = box_.memory.swap_total.saturating_sub(box_.memory.swap_free);
    (!box_.gpus.is_empty() && used > SWAPPED_BYTES_MAX).then(|| DoctorFinding {
        id: "C-32",
        severity: Severity::Warn,
        seen: format!("{} are swapped out", format_gib(used)),
        why: "a ROCm process whose pages are swapped keeps a kernel worker at 100 % restoring them",
        remedy: "sysctl vm.swappiness=10, then swapoff -a && swapon -a, or reboot".into(),
        source: "TheRock #7956",
    })
}

/// The highest swappiness at which a unified host does not swap out weights.
const SWAPPINESS_MAX: u64 = 10;

fn check_swappiness(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let value = box_.kernel.swappiness.filter(|value| *value > SWAPPINESS_MAX)?;
    let compaction = box_.kernel.compaction_proactiveness.unwrap_or(20);
    Some(DoctorFinding {
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

fn check_missing_swap(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let memory = &box_.memory;
    let seen = match memory.swap_total {
        0 => "no swap",
        total if memory.swap_zram >= total => "no swap but compressed memory (zram)",
        _ => return None,
    };
    Some(DoctorFinding {
        id: "C-33",
        severity: Severity::Info,
        seen: seen.into(),
        why: "when memory runs short the kernel takes the pages of mapped weights, again and again",
        remedy: "stay within the budget; 8 GiB of swap on a disk give the host room".into(),
        source: "ROCm legacy-rocm-build #6297",
    })
}
