//! Kernel, firmware and processor.

use super::{Finding, Severity};
use crate::snapshot::Snapshot;

pub(super) fn check(box_: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    if box_.gpus.iter().any(|gpu| gpu.gfx == "gfx1151") {
        findings.extend(too_old(box_));
    }
    findings.extend(bad_firmware(box_));
    findings.extend(iommu(box_));
    findings.extend(foreign_module(box_));
    if box_.is_unified() {
        findings.extend(no_broadcast(box_));
    }
    findings
}

/// `6.17.0-19-generic`: three numbers, the distribution's own, and the flavour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Release {
    pub(super) version: (u32, u32, u32),
    build: u32,
    flavour: String,
}

pub(super) fn parse(release: &str) -> Option<Release> {
    let (version, rest) = release.split_once('-').unwrap_or((release, ""));
    let mut numbers = version.split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    let version =
        (numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or_default());
    let (build, flavour) = rest.split_once('-').unwrap_or((rest, ""));
    Some(Release { version, build: build.parse().unwrap_or(0), flavour: flavour.to_owned() })
}

/// Kernels whose compute driver saves gfx1151's registers whole.
pub(super) fn is_fixed(release: &Release) -> bool {
    let Release { version, build, flavour } = release;
    *version >= (6, 18, 4)
        || (*version == (6, 17, 0) && *build >= 19 && flavour == "generic")
        || (*version == (6, 14, 0) && *build >= 1018 && flavour == "oem")
}

/// Below it the card is not supported at all.
const OLDEST: (u32, u32, u32) = (6, 14, 0);

fn too_old(box_: &Snapshot) -> Option<Finding> {
    let release = parse(&box_.kernel.release)?;
    // What the driver can do says more than its number.
    let has_feature = box_.gpus.iter().any(|gpu| gpu.saves_wave_state);
    if is_fixed(&release) || (has_feature && release.version >= OLDEST) {
        return None;
    }
    let severity = if release.version < OLDEST { Severity::Fail } else { Severity::Warn };
    Some(Finding {
        id: "C-20",
        severity,
        seen: format!("kernel {}", box_.kernel.release),
        why: "on gfx1151 its compute driver saves too few registers when a wave is preempted: \
              hangs and wrong results under load",
        remedy: "use 6.18.4 or newer, Ubuntu's 6.17.0-19 (HWE) or its 6.14.0-1018 (OEM) kernel"
            .into(),
        source: "AMD's RDNA 3.5 kernel notes; TheRock #2991",
    })
}

/// Of the scheduler in the GPU, version 0x83 breaks gfx1151.
const BAD_MES: u32 = 0x83;

fn bad_firmware(box_: &Snapshot) -> Option<Finding> {
    let gpu = box_.gpus.iter().find(|gpu| gpu.gfx == "gfx1151")?;
    let firmware = gpu.mes_firmware.filter(|version| version & 0xff == BAD_MES)?;
    Some(Finding {
        id: "C-28",
        severity: Severity::Fail,
        seen: format!("MES firmware {firmware:#04x}"),
        why: "linux-firmware 20251125 shipped it; compute jobs on gfx1151 hang or fault",
        remedy: "update linux-firmware to 20260110 or newer, rebuild the initramfs, reboot".into(),
        source: "ROCm legacy-rocm-build #5724",
    })
}

fn iommu(box_: &Snapshot) -> Option<Finding> {
    let off = box_.kernel.command_line.split_whitespace().any(|word| word == "amd_iommu=off");
    off.then(|| Finding {
        id: "C-24",
        severity: Severity::Info,
        seen: "amd_iommu=off".into(),
        why: "measured 5 to 12 % faster, and any device can then write to any memory",
        remedy: "iommu=pt is nearly as fast and keeps the protection".into(),
        source: "kyuz0's toolboxes",
    })
}

/// One that a package built, beside the kernel's own.
fn foreign_module(box_: &Snapshot) -> Option<Finding> {
    let version = box_.amdgpu.as_ref()?.version.as_ref()?;
    Some(Finding {
        id: "C-29",
        severity: Severity::Info,
        seen: format!("amdgpu {version} from amdgpu-dkms"),
        why: "its faults are not those of the kernel's version, and it is built anew with each",
        remedy: "nothing to do; name it in bug reports".into(),
        source: "/sys/module/amdgpu/version",
    })
}

fn no_broadcast(box_: &Snapshot) -> Option<Finding> {
    (!box_.cpu.invlpgb).then(|| Finding {
        id: "C-30",
        severity: Severity::Info,
        seen: format!("{} has no INVLPGB", box_.cpu.model),
        why: "every TLB invalidation interrupts every core: an eval inside the training process \
              becomes a storm of a million interrupts a second and freezes the box. No client \
              Zen 5 has the instruction, so no kernel will bring it",
        remedy: "nothing to do: evals run in processes of their own here".into(),
        source: "ROCm legacy-rocm-build #6297; CPUID dumps of InstLatx64",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_fixed_kernels_are_known_by_their_own_numbers() {
        let fixed = |release| is_fixed(&parse(release).unwrap());
        for good in ["6.18.4", "7.0.0-29-generic", "6.17.0-19-generic", "6.14.0-1018-oem"] {
            assert!(fixed(good), "{good}");
        }
        for bad in ["6.18.3-arch1-1", "6.17.0-18-generic", "6.14.0-1017-oem", "6.17.4-2-pve"] {
            assert!(!fixed(bad), "{bad}");
        }
        assert_eq!(parse("garbage"), None);
        assert_eq!(parse("6"), None);
        assert_eq!(parse("6.8.0+").unwrap().version, (6, 8, 0));
    }
}
