//! Checks of the GPUs: presence, identity and access by this user.

use super::{DoctorFinding, Severity, format_gib};
use hardware::host_snapshot::{DeviceAccess, GpuInfo, HostSnapshot};

pub(super) fn check_devices(box_: &HostSnapshot) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    if box_.gpus.is_empty() {
        findings.extend(check_missing_gpu(box_));
        return findings;
    }
    findings.extend(check_device("C-07", "/dev/kfd", &box_.kfd, box_));
    for gpu in &box_.gpus {
        let path = format!("/dev/dri/renderD{}", gpu.render_minor);
        findings.extend(check_device("C-08", &path, &gpu.render, box_));
        findings.extend(check_identity(gpu));
    }
    findings.extend(check_rootless_podman(box_));
    findings.extend(check_several_gpus(box_));
    findings.extend(check_device_filters(box_));
    findings.extend(check_visible_devices(box_));
    findings.extend(check_udev_rules(box_));
    findings.extend(check_selinux(box_));
    findings.extend(check_virtual_machine(box_));
    findings.extend(check_foreign_processes(box_));
    findings.extend(box_.gpus.iter().filter_map(check_suspended));
    findings
}

fn check_missing_gpu(box_: &HostSnapshot) -> Option<DoctorFinding> {
    if box_.amdgpu.is_none() {
        return Some(DoctorFinding {
            id: "C-01",
            severity: Severity::Info,
            seen: "no AMD GPU: the amdgpu driver is not loaded".into(),
            why: "models run on the CPU here",
            remedy: "if there is a card: modprobe amdgpu, then look at `dmesg | grep -i kfd`"
                .into(),
            source: "Linux, drivers/gpu/drm/amd/amdkfd",
        });
    }
    Some(DoctorFinding {
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

fn check_device(
    id: &'static str,
    path: &str,
    access: &DeviceAccess,
    box_: &HostSnapshot,
) -> Option<DoctorFinding> {
    let in_container = box_.kernel.container.is_some();
    let (seen, remedy) = match access {
        DeviceAccess::Usable => return None,
        DeviceAccess::Absent if in_container => (
            format!("{path} is not in this container, though sysfs shows the host's GPU"),
            format!("pass the devices: --device /dev/kfd --device {path} --group-add keep-groups"),
        ),
        DeviceAccess::Absent => (
            format!("{path} does not exist"),
            "modprobe amdgpu; reinstall udev's rules; look at `dmesg | grep -i amdgpu`".into(),
        ),
        DeviceAccess::Denied => {
            (format!("{path} may not be opened by this user"), group_remedy(box_))
        }
        DeviceAccess::Failed(error) => (
            format!("{path} cannot be opened: {error}"),
            "look at `dmesg | grep -iE 'amdgpu|kfd'`; after a GPU reset only a reboot may help"
                .into(),
        ),
    };
    Some(DoctorFinding {
        id,
        severity: Severity::Fail,
        seen,
        why: "every GPU program opens it first",
        remedy,
        source: "ROCm's installation notes; hal0 #1790 for containers",
    })
}

fn group_remedy(box_: &HostSnapshot) -> String {
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

/// PCI device ids and their only possible target.
const KNOWN_DEVICES: [(u32, &str); 7] = [
    (0x1586, "gfx1151"),
    (0x150e, "gfx1150"),
    (0x7550, "gfx1201"),
    (0x7551, "gfx1201"),
    (0x66a0, "gfx906"),
    (0x66a1, "gfx906"),
    (0x66af, "gfx906"),
];

/// The group id that unmapped groups have in a user's own container.
const OVERFLOW_GROUP: u32 = 65_534;

fn check_rootless_podman(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let is_podman = box_.kernel.container.as_deref() == Some("podman");
    let dropped = box_.kfd == DeviceAccess::Denied && !box_.groups.contains(&OVERFLOW_GROUP);
    (is_podman && dropped).then(|| DoctorFinding {
        id: "C-11",
        severity: Severity::Warn,
        seen: "a podman container without its user's supplementary groups".into(),
        why: "rootless podman drops them, and with them the right to open the GPU",
        remedy: "podman run --group-add keep-groups".into(),
        source: "podman-run(1)",
    })
}

fn check_suspended(gpu: &GpuInfo) -> Option<DoctorFinding> {
    gpu.suspended.then(|| DoctorFinding {
        id: "C-36",
        severity: Severity::Info,
        seen: format!("{} is powered down", gpu.gfx),
        why: "what its memory holds was not read: that would wake it",
        remedy: "nothing to do; amdgpu.runpm=0 on the kernel's command line keeps it awake".into(),
        source: "Linux, amdgpu's runtime power management",
    })
}

fn check_unknown_device(gpu: &GpuInfo) -> Option<DoctorFinding> {
    let is_known = |(id, gfx): &(u32, &str)| *gfx == gpu.gfx && *id == gpu.device_id;
    let has_target = KNOWN_DEVICES.iter().any(|(_, gfx)| *gfx == gpu.gfx);
    (has_target && !KNOWN_DEVICES.iter().any(is_known)).then(|| DoctorFinding {
        id: "C-02",
        severity: Severity::Info,
        seen: format!("{} with a PCI id not known here, {:#06x}", gpu.gfx, gpu.device_id),
        why: "a new card of a known target: its settings here may not fit",
        remedy: "report it with a capture: flotilla doctor --capture box.tar.gz".into(),
        source: "the list of PCI ids here",
    })
}

fn check_identity(gpu: &GpuInfo) -> Option<DoctorFinding> {
    let Some((_, expected)) = KNOWN_DEVICES.iter().find(|(id, _)| *id == gpu.device_id) else {
        return check_unknown_device(gpu);
    };
    (gpu.gfx != *expected).then(|| DoctorFinding {
        id: "C-02",
        severity: Severity::Warn,
        seen: format!(
            "PCI id {:#06x} is {expected}, the compute driver reports {}",
            gpu.device_id, gpu.gfx
        ),
        why: "a driver that names the wrong target runs the wrong kernels",
        remedy: "update the kernel or the amdgpu-dkms package".into(),
        source: "rocm-systems #5409",
    })
}

fn check_several_gpus(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let integrated = box_.gpus.iter().find(|gpu| gpu.unified_memory)?;
    let card = box_.main_gpu().filter(|gpu| !gpu.unified_memory)?;
    Some(DoctorFinding {
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

fn check_visible_devices(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let value = box_.environment.get("HIP_VISIBLE_DEVICES")?;
    let known = |one: &str| {
        one.trim().parse::<usize>().is_ok_and(|ordinal| ordinal < box_.gpus.len())
            || one.trim().starts_with("GPU-")
    };
    (!value.split(',').all(known)).then(|| DoctorFinding {
        id: "C-05",
        severity: Severity::Warn,
        seen: format!("HIP_VISIBLE_DEVICES={value}, and there are {} GPUs", box_.gpus.len()),
        why: "HIP then sees no GPU, and programs fall back to the CPU",
        remedy: "unset it; the agent sets it for its children".into(),
        source: "HIP's documentation",
    })
}

fn check_device_filters(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let get = |name: &str| box_.environment.get(name);
    let (hip, rocr) = (get("HIP_VISIBLE_DEVICES")?, get("ROCR_VISIBLE_DEVICES")?);
    (hip != rocr).then(|| DoctorFinding {
        id: "C-05",
        severity: Severity::Warn,
        seen: format!("HIP_VISIBLE_DEVICES={hip} and ROCR_VISIBLE_DEVICES={rocr}"),
        why: "ROCR_VISIBLE_DEVICES is applied first, so HIP_VISIBLE_DEVICES counts only the GPUs \
              that it leaves",
        remedy: "unset ROCR_VISIBLE_DEVICES".into(),
        source: "HIP's documentation",
    })
}

fn check_udev_rules(box_: &HostSnapshot) -> Option<DoctorFinding> {
    (!box_.open_udev_rules.is_empty()).then(|| DoctorFinding {
        id: "C-09",
        severity: Severity::Info,
        seen: format!("/dev/kfd is open to all users through {}", box_.open_udev_rules.join(", ")),
        why: "any program of any user can then use the GPU, and fill its memory",
        remedy: "delete the rule and use the groups render and video".into(),
        source: "systemd's 50-udev-default.rules",
    })
}

fn check_selinux(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let denied = box_.selinux_container_devices == Some(false);
    (denied && box_.kernel.container.is_some()).then(|| DoctorFinding {
        id: "C-10",
        severity: Severity::Warn,
        seen: "SELinux keeps containers from devices (container_use_devices is off)".into(),
        why: "opening /dev/kfd fails in a container, regardless of its groups",
        remedy: "setsebool -P container_use_devices on".into(),
        source: "container-selinux",
    })
}

fn check_virtual_machine(box_: &HostSnapshot) -> Option<DoctorFinding> {
    box_.kernel.virtual_machine.as_ref().map(|name| DoctorFinding {
        id: "C-12",
        severity: Severity::Warn,
        seen: format!("this is a virtual machine ({name})"),
        why: "passed-through GPUs reset badly, and memory figures are the guest's",
        remedy: "run the agent on the host".into(),
        source: "ROCm's support matrix",
    })
}

/// The GPU memory above which another process is reported.
const FOREIGN_VRAM_BYTES: u64 = 1 << 30;

fn check_foreign_processes(box_: &HostSnapshot) -> Vec<DoctorFinding> {
    let large = box_.gpu_processes.iter().filter(|process| process.vram_bytes > FOREIGN_VRAM_BYTES);
    let finding = |process: &hardware::host_snapshot::GpuProcess| DoctorFinding {
        id: "C-34",
        severity: Severity::Warn,
        seen: format!(
            "process {} ({}) holds {} on the GPU",
            process.pid,
            process.name,
            format_gib(process.vram_bytes)
        ),
        why: "this memory is missing for training, and the process slows every step",
        remedy: format!("end it if it is a leftover: kill {}", process.pid),
        source: "KFD's sysfs",
    };
    large.map(finding).collect()
}
