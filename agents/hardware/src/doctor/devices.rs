//! Whether there is a GPU, which one, and whether this user may use it.

use super::{Finding, Severity, gib};
use crate::snapshot::{Access, GpuSeen, Snapshot};

pub(super) fn check(box_: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    if box_.gpus.is_empty() {
        findings.extend(no_gpu(box_));
        return findings;
    }
    findings.extend(device("C-07", "/dev/kfd", &box_.kfd, box_));
    for gpu in &box_.gpus {
        let path = format!("/dev/dri/renderD{}", gpu.render_minor);
        findings.extend(device("C-08", &path, &gpu.render, box_));
        findings.extend(wrong_identity(gpu));
    }
    findings.extend(rootless(box_));
    findings.extend(several(box_));
    findings.extend(two_filters(box_));
    findings.extend(visible(box_));
    findings.extend(open_rules(box_));
    findings.extend(selinux(box_));
    findings.extend(virtual_machine(box_));
    findings.extend(strangers(box_));
    findings.extend(box_.gpus.iter().filter_map(asleep));
    findings
}

fn no_gpu(box_: &Snapshot) -> Option<Finding> {
    if box_.amdgpu.is_none() {
        return Some(Finding {
            id: "C-01",
            severity: Severity::Info,
            seen: "no AMD GPU: the amdgpu driver is not loaded".into(),
            why: "models run on the CPU here",
            remedy: "if there is a card: modprobe amdgpu, then look at `dmesg | grep -i kfd`"
                .into(),
            source: "Linux, drivers/gpu/drm/amd/amdkfd",
        });
    }
    Some(Finding {
        id: "C-01",
        severity: Severity::Fail,
        seen: "amdgpu is loaded, and its compute driver (KFD) knows no GPU".into(),
        why: "neither ROCm nor HIP can see the card",
        remedy: "look at `dmesg | grep -i kfd`; the firmware may be missing (linux-firmware), \
                 or PCIe atomics be off in the BIOS"
            .into(),
        source: "Linux, drivers/gpu/drm/amd/amdkfd",
    })
}

fn device(id: &'static str, path: &str, access: &Access, box_: &Snapshot) -> Option<Finding> {
    let in_container = box_.kernel.container.is_some();
    let (seen, remedy) = match access {
        Access::Usable => return None,
        Access::Absent if in_container => (
            format!("{path} is not in this container, though sysfs shows the host's GPU"),
            format!("pass the devices: --device /dev/kfd --device {path} --group-add keep-groups"),
        ),
        Access::Absent => (
            format!("{path} does not exist"),
            "modprobe amdgpu; reinstall udev's rules; look at `dmesg | grep -i amdgpu`".into(),
        ),
        Access::Denied => (format!("{path} may not be opened by this user"), groups(box_)),
        Access::Failed(error) => (
            format!("{path} cannot be opened: {error}"),
            "look at `dmesg | grep -iE 'amdgpu|kfd'`; after a GPU reset only a reboot may help"
                .into(),
        ),
    };
    Some(Finding {
        id,
        severity: Severity::Fail,
        seen,
        why: "every GPU program opens it first",
        remedy,
        source: "ROCm's installation notes; hal0 #1790 for containers",
    })
}

fn groups(box_: &Snapshot) -> String {
    let missing: Vec<&str> = box_
        .gpu_groups
        .iter()
        .filter(|(_, number)| !box_.groups.contains(number))
        .map(|(name, _)| name.as_str())
        .collect();
    let names = if missing.is_empty() { "render,video".into() } else { missing.join(",") };
    if box_.kernel.container.is_some() {
        return "start the container with --group-add and the host's numeric ids of render and video"
            .into();
    }
    format!(
        "usermod -aG {names} $USER and log in again; for a service: SupplementaryGroups=render video"
    )
}

/// PCI ids that can only be one target.
const IDENTITIES: [(u32, &str); 7] = [
    (0x1586, "gfx1151"),
    (0x150e, "gfx1150"),
    (0x7550, "gfx1201"),
    (0x7551, "gfx1201"),
    (0x66a0, "gfx906"),
    (0x66a1, "gfx906"),
    (0x66af, "gfx906"),
];

/// Of a group that was not passed into a user's own container.
const NOBODY: u32 = 65_534;

fn rootless(box_: &Snapshot) -> Option<Finding> {
    let is_podman = box_.kernel.container.as_deref() == Some("podman");
    let dropped = box_.kfd == Access::Denied && !box_.groups.contains(&NOBODY);
    (is_podman && dropped).then(|| Finding {
        id: "C-11",
        severity: Severity::Warn,
        seen: "a podman container without its user's supplementary groups".into(),
        why: "rootless podman drops them, and with them the right to open the GPU",
        remedy: "podman run --group-add keep-groups".into(),
        source: "podman-run(1)",
    })
}

fn asleep(gpu: &GpuSeen) -> Option<Finding> {
    gpu.suspended.then(|| Finding {
        id: "C-36",
        severity: Severity::Info,
        seen: format!("{} is powered down", gpu.gfx),
        why: "what its memory holds was not read: that would wake it",
        remedy: "nothing to do; amdgpu.runpm=0 on the kernel's command line keeps it awake".into(),
        source: "Linux, amdgpu's runtime power management",
    })
}

/// The other way round: a target of which all devices are known has this one too.
fn unknown_identity(gpu: &GpuSeen) -> Option<Finding> {
    let is_known = |(id, gfx): &(u32, &str)| *gfx == gpu.gfx && *id == gpu.device_id;
    let has_target = IDENTITIES.iter().any(|(_, gfx)| *gfx == gpu.gfx);
    (has_target && !IDENTITIES.iter().any(is_known)).then(|| Finding {
        id: "C-02",
        severity: Severity::Info,
        seen: format!("{} with a PCI id not known here, {:#06x}", gpu.gfx, gpu.device_id),
        why: "a new card of a known target: what is known of it may not hold",
        remedy: "tell us: flotilla doctor --capture box.tar.zst".into(),
        source: "the list of PCI ids here",
    })
}

fn wrong_identity(gpu: &GpuSeen) -> Option<Finding> {
    let Some((_, expected)) = IDENTITIES.iter().find(|(id, _)| *id == gpu.device_id) else {
        return unknown_identity(gpu);
    };
    (gpu.gfx != *expected).then(|| Finding {
        id: "C-02",
        severity: Severity::Warn,
        seen: format!(
            "PCI id {:#06x} is {expected}, the compute driver says {}",
            gpu.device_id, gpu.gfx
        ),
        why: "a driver that names the wrong target runs the wrong kernels",
        remedy: "update the kernel or the amdgpu-dkms package".into(),
        source: "rocm-systems #5409",
    })
}

fn several(box_: &Snapshot) -> Option<Finding> {
    let integrated = box_.gpus.iter().find(|gpu| gpu.unified_memory)?;
    let card = box_.main_gpu().filter(|gpu| !gpu.unified_memory)?;
    Some(Finding {
        id: "C-05",
        severity: Severity::Info,
        seen: format!(
            "{} (HIP device {}) beside an integrated {} (HIP device {})",
            card.gfx, card.ordinal, integrated.gfx, integrated.ordinal
        ),
        why: "programs that see both crash or take the wrong one",
        remedy: format!(
            "children of the agent get HIP_VISIBLE_DEVICES={}; set it for other programs, or turn \
             the integrated GPU off in the BIOS",
            card.ordinal
        ),
        source: "lemonade #1921, rocm-systems #11549",
    })
}

fn visible(box_: &Snapshot) -> Option<Finding> {
    let value = box_.environment.get("HIP_VISIBLE_DEVICES")?;
    let known = |one: &str| {
        one.trim().parse::<usize>().is_ok_and(|ordinal| ordinal < box_.gpus.len())
            || one.trim().starts_with("GPU-")
    };
    (!value.split(',').all(known)).then(|| Finding {
        id: "C-05",
        severity: Severity::Warn,
        seen: format!("HIP_VISIBLE_DEVICES={value}, and there are {} GPUs", box_.gpus.len()),
        why: "HIP then sees no GPU, and programs fall back to the CPU",
        remedy: "unset it; the agent sets it for its children".into(),
        source: "HIP's documentation",
    })
}

fn two_filters(box_: &Snapshot) -> Option<Finding> {
    let get = |name: &str| box_.environment.get(name);
    let (hip, rocr) = (get("HIP_VISIBLE_DEVICES")?, get("ROCR_VISIBLE_DEVICES")?);
    (hip != rocr).then(|| Finding {
        id: "C-05",
        severity: Severity::Warn,
        seen: format!("HIP_VISIBLE_DEVICES={hip} and ROCR_VISIBLE_DEVICES={rocr}"),
        why: "the second is applied first, so the first counts among what that one left",
        remedy: "unset ROCR_VISIBLE_DEVICES".into(),
        source: "HIP's documentation",
    })
}

fn open_rules(box_: &Snapshot) -> Option<Finding> {
    (!box_.open_udev_rules.is_empty()).then(|| Finding {
        id: "C-09",
        severity: Severity::Info,
        seen: format!("/dev/kfd is open to everybody by {}", box_.open_udev_rules.join(", ")),
        why: "any program of any user can then use the GPU, and fill its memory",
        remedy: "delete the rule and use the groups render and video".into(),
        source: "systemd's 50-udev-default.rules",
    })
}

fn selinux(box_: &Snapshot) -> Option<Finding> {
    let denied = box_.selinux_container_devices == Some(false);
    (denied && box_.kernel.container.is_some()).then(|| Finding {
        id: "C-10",
        severity: Severity::Warn,
        seen: "SELinux keeps containers from devices (container_use_devices is off)".into(),
        why: "opening /dev/kfd fails in a container whatever its groups",
        remedy: "setsebool -P container_use_devices on".into(),
        source: "container-selinux",
    })
}

fn virtual_machine(box_: &Snapshot) -> Option<Finding> {
    box_.kernel.virtual_machine.as_ref().map(|name| Finding {
        id: "C-12",
        severity: Severity::Warn,
        seen: format!("this is a virtual machine ({name})"),
        why: "passed-through GPUs reset badly, and memory figures are the guest's",
        remedy: "run the agent on the host".into(),
        source: "ROCm's support matrix",
    })
}

/// A compute process that holds more is somebody's work.
const STRANGER_BYTES: u64 = 1 << 30;

fn strangers(box_: &Snapshot) -> Vec<Finding> {
    let large = box_.gpu_processes.iter().filter(|process| process.vram_bytes > STRANGER_BYTES);
    let finding = |process: &crate::snapshot::GpuProcess| Finding {
        id: "C-34",
        severity: Severity::Warn,
        seen: format!(
            "process {} ({}) holds {} on the GPU",
            process.pid,
            process.name,
            gib(process.vram_bytes)
        ),
        why: "what it holds is missing for training, and it slows every step",
        remedy: format!("end it if it is a leftover: kill {}", process.pid),
        source: "KFD's sysfs",
    };
    large.map(finding).collect()
}
