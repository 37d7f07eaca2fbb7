//! The catalogue of all checks by id: subject, severity and remedy. The page docs/DOCTOR.md is
//! generated from it.

/// The part of a host that a check concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckedPart {
    Gpu,
    Torch,
    Disk,
    /// The settings of a job, not the host.
    Plan,
}

/// One check, of this crate or of the component that performs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoctorCheck {
    pub id: &'static str,
    pub part: CheckedPart,
    /// `fail`, `warn`, `info`, or the component that performs the check.
    pub how: &'static str,
    pub about: &'static str,
    pub remedy: &'static str,
}

const fn new_check(
    id: &'static str,
    part: CheckedPart,
    how: &'static str,
    about: &'static str,
    remedy: &'static str,
) -> DoctorCheck {
    DoctorCheck { id, part, how, about, remedy }
}

use CheckedPart::{Disk, Gpu, Plan, Torch};

/// All checks, in the order of their ids.
pub const CHECKS: [DoctorCheck; 57] = [
    new_check(
        "C-01",
        Gpu,
        "fail; info without amdgpu",
        "amdgpu is loaded and its compute driver knows a GPU",
        "`dmesg | grep -i kfd`; linux-firmware; PCIe atomics in the BIOS",
    ),
    new_check(
        "C-02",
        Gpu,
        "warn, info",
        "the target is what the PCI id says",
        "update the kernel or amdgpu-dkms; a new id: send a capture",
    ),
    new_check(
        "C-03",
        Gpu,
        "by design",
        "the target is a line of KFD's `properties`, not a file",
        "",
    ),
    new_check(
        "C-04",
        Gpu,
        "by design",
        "HIP counts GPUs in the order of their KFD nodes",
        "children get HIP_VISIBLE_DEVICES",
    ),
    new_check(
        "C-05",
        Gpu,
        "warn, info",
        "an integrated GPU beside a card; HIP_VISIBLE_DEVICES that names none, or contradicts ROCR_VISIBLE_DEVICES",
        "unset them; children get HIP_VISIBLE_DEVICES",
    ),
    new_check(
        "C-06",
        Gpu,
        "by design",
        "KFD's node and DRM's card are joined by the render minor, or the PCI address",
        "",
    ),
    new_check(
        "C-07",
        Gpu,
        "fail",
        "/dev/kfd can be opened",
        "groups render and video; in a container --device /dev/kfd",
    ),
    new_check("C-08", Gpu, "fail", "/dev/dri/renderD… can be opened", "as C-07"),
    new_check(
        "C-09",
        Gpu,
        "info",
        "a udev rule opens /dev/kfd to all users",
        "delete it; use the groups",
    ),
    new_check(
        "C-10",
        Gpu,
        "fail, warn",
        "a container sees the host's GPU in sysfs and has no device; SELinux",
        "pass the devices (reported as C-07 and C-08); setsebool -P container_use_devices on",
    ),
    new_check(
        "C-11",
        Gpu,
        "warn",
        "rootless podman dropped the groups",
        "podman run --group-add keep-groups",
    ),
    new_check("C-12", Gpu, "warn", "a virtual machine, or WSL", "run the agent on the host"),
    new_check(
        "C-20",
        Gpu,
        "fail, warn",
        "a kernel that saves gfx1151's registers whole",
        "6.18.4 or newer, Ubuntu's 6.17.0-19 (HWE) or 6.14.0-1018 (OEM)",
    ),
    new_check(
        "C-21",
        Torch,
        "fail, info",
        "kernel and torch's ROCm go together on gfx1151",
        "torch for ROCm 7.2.1 or newer, or TheRock's 7.11 or newer",
    ),
    new_check(
        "C-22",
        Gpu,
        "warn",
        "how much of the memory an integrated GPU may map (GTT)",
        "ttm.pages_limit",
    ),
    new_check(
        "C-23",
        Gpu,
        "warn",
        "amdgpu.gttsize, or a page limit that leaves the host nothing",
        "ttm.pages_limit, all but 8 GiB",
    ),
    new_check("C-24", Gpu, "info", "amd_iommu=off", "iommu=pt"),
    new_check(
        "C-25",
        Gpu,
        "warn",
        "a BIOS carve-out of 16 GiB or more",
        "UMA buffer 512 MB and ttm.pages_limit",
    ),
    new_check(
        "C-26",
        Gpu,
        "by design",
        "budgets come from sysfs, since torch's totals are wrong on unified memory",
        "",
    ),
    new_check(
        "C-27",
        Gpu,
        "by design",
        "a unified box plans with the least of GTT, what is available less 8 GiB, and 80 %",
        "",
    ),
    new_check(
        "C-28",
        Gpu,
        "fail",
        "MES firmware 0x83 on gfx1151",
        "linux-firmware 20260110 or newer",
    ),
    new_check("C-29", Gpu, "info", "amdgpu comes from amdgpu-dkms", "name it in bug reports"),
    new_check(
        "C-30",
        Gpu,
        "info",
        "a unified box whose processor has no INVLPGB",
        "evals in processes of their own, as ours are",
    ),
    new_check("C-31", Gpu, "info", "vm.swappiness above 10 on a unified box", "sysctl.d"),
    new_check(
        "C-32",
        Gpu,
        "warn",
        "more than 2 GiB swapped out",
        "vm.swappiness=10; swapoff -a && swapon -a",
    ),
    new_check("C-33", Gpu, "info", "no swap but zram on a unified box", "8 GiB of swap on a disk"),
    new_check(
        "C-34",
        Gpu,
        "warn",
        "another process holds more than 1 GiB of the GPU",
        "end it if it is a leftover",
    ),
    new_check(
        "C-35",
        Disk,
        "fail, warn",
        "room for models and checkpoints",
        "free some; --cache-dir on another disk",
    ),
    new_check("C-36", Gpu, "info", "a card that is powered down is left asleep", "amdgpu.runpm=0"),
    new_check("C-40", Torch, "shown", "the system's ROCm", ""),
    new_check(
        "C-41",
        Torch,
        "fail, warn",
        "torch is there, and no second ROCm gets into its process",
        "unset LD_LIBRARY_PATH and LD_PRELOAD; a wheel that bundles its ROCm",
    ),
    new_check(
        "C-42",
        Torch,
        "by design",
        "a driver of another version than torch's ROCm is no trouble",
        "",
    ),
    new_check(
        "C-43",
        Torch,
        "fail, warn",
        "a Python for which there are wheels",
        "uv venv --python",
    ),
    new_check(
        "C-44",
        Torch,
        "fail",
        "torch has kernels for this card",
        "the index that the profile names",
    ),
    new_check(
        "C-45",
        Gpu,
        "fail, warn",
        "HSA_OVERRIDE_GFX_VERSION, set or waiting in a file",
        "unset it, delete the line",
    ),
    new_check(
        "C-46",
        Gpu,
        "fail, warn",
        "settings of torch's allocator that corrupt, hang, contradict each other or are unknown",
        "unset all three names",
    ),
    new_check("C-47", Gpu, "warn", "HSA_DISABLE_CACHE=1 halves the speed", "unset it"),
    new_check(
        "C-48",
        Gpu,
        "info",
        "HSA_ENABLE_SDMA is other than the profile's",
        "the profile's value",
    ),
    new_check(
        "C-49",
        Gpu,
        "warn, info",
        "ROCBLAS_USE_HIPBLASLT forced on gfx1201, or other than the profile's",
        "unset it; the profile's value",
    ),
    new_check(
        "C-50",
        Gpu,
        "info",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL is other than the profile's",
        "the profile's value",
    ),
    new_check(
        "C-51",
        Plan,
        "fail, warn",
        "the precision is one the card computes rightly and fast",
        "the profile's dtype",
    ),
    new_check(
        "C-52",
        Plan,
        "fail, warn",
        "weights in 4 or 8 bits",
        "train without; bitsandbytes 0.49 or newer where there are builds",
    ),
    new_check(
        "C-53",
        Plan,
        "warn",
        "dataloader workers and pinned memory on a unified box",
        "0 and false",
    ),
    new_check(
        "C-54",
        Plan,
        "fail, warn",
        "evals inside the training process, and settings that transformers refuses",
        "eval_strategy: \"no\", and evals elsewhere",
    ),
    new_check("C-55", Torch, "fail", "a torchao too new for torch", "uninstall torchao"),
    new_check(
        "C-56",
        Torch,
        "fail, warn",
        "versions of torch, transformers, peft and accelerate",
        "install newer ones",
    ),
    new_check(
        "C-57",
        Gpu,
        "info",
        "OMP_NUM_THREADS or TOKENIZERS_PARALLELISM are other than the profile's",
        "the profile's value",
    ),
    new_check(
        "C-58",
        Torch,
        "the trainer's probe, before its first order",
        "torch computes rightly on the card, in a process of its own",
        "",
    ),
    new_check(
        "C-59",
        Gpu,
        "the evaluator's canary, before its first eval",
        "llama.cpp computes the same logits on the GPU as on the CPU",
        "",
    ),
    new_check(
        "C-60",
        Plan,
        "fail, warn, info",
        "a checkpoint is saved before the end, and often enough",
        "save_steps of a third of the steps, or ten minutes",
    ),
    new_check(
        "C-61",
        Plan,
        "warn",
        "the host's memory holds a shard of the weights while they are loaded",
        "load in the dtype of the files, to the GPU directly",
    ),
    new_check(
        "C-62",
        Plan,
        "fail, warn",
        "the training's peak fits the memory",
        "what the finding says",
    ),
    new_check(
        "C-63",
        Plan,
        "warn",
        "activations of 3B and more are recomputed",
        "gradient_checkpointing",
    ),
    new_check(
        "C-64",
        Plan,
        "warn",
        "every example is padded to the longest allowed",
        "pad to the longest of a batch; group_by_length",
    ),
    new_check("C-65", Plan, "by design", "an eval is a process of its own", ""),
    new_check(
        "C-66",
        Gpu,
        "warn",
        "GGML_CUDA_ENABLE_UNIFIED_MEMORY corrupts llama.cpp's HIP build",
        "unset it",
    ),
    new_check(
        "C-67",
        Torch,
        "info",
        "torch is the one that is known to work on this card",
        "flotilla stack install",
    ),
];

pub(super) fn checked_part(id: &str) -> CheckedPart {
    CHECKS.iter().find(|check| check.id == id).map_or(CheckedPart::Gpu, |check| check.part)
}

/// Renders the table of docs/DOCTOR.md.
pub fn render_page() -> String {
    let mut page = "| id | what it is about | how bad | remedy |\n|---|---|---|---|\n".to_owned();
    for DoctorCheck { id, how, about, remedy, .. } in CHECKS {
        let [about, how, remedy] = [about, how, remedy].map(|cell| cell.replace('|', "\\|"));
        page.push_str(&format!("| {id} | {about} | {how} | {remedy} |\n"));
    }
    page
}
