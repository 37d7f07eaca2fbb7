//! Checks of the compatibility of kernel, driver and the Python environment that trains.

use super::{DoctorFinding, Severity, kernel, parse_major_minor};
use crate::torch_checks;
use hardware::torch_environment::{TorchBuild, TorchEnvironment};
use hardware::{
    HardwareProfile, StackVersions,
    host_snapshot::{GpuProcess, HostSnapshot},
};

/// Few findings if no Python environment was named, because not every engine needs one.
pub(super) fn check_stack(box_: &HostSnapshot, profile: &HardwareProfile) -> Vec<DoctorFinding> {
    let mut findings: Vec<DoctorFinding> =
        box_.gpu_processes.iter().filter_map(check_mixed_runtimes).collect();
    let Some(python) = &box_.python else { return findings };
    let environment = box_.environment.clone();
    let python = TorchEnvironment { environment, ..python.clone() };
    findings.extend(torch_checks::check_torch_stack(&python, profile));
    findings.extend(python.torch.as_ref().and_then(|torch| check_known_torch(torch, profile)));
    if box_.gpus.iter().any(|gpu| gpu.gfx == "gfx1151") {
        findings.extend(python.torch.as_ref().and_then(|torch| check_kernel_pair(box_, torch)));
    }
    findings
}

fn check_mixed_runtimes(process: &GpuProcess) -> Option<DoctorFinding> {
    let found: Vec<&str> = process.runtimes.iter().map(String::as_str).collect();
    (found.len() > 1).then(|| DoctorFinding {
        id: "C-41",
        severity: Severity::Fail,
        seen: format!(
            "process {} ({}) runs ROCm of {} at once",
            process.pid,
            process.name,
            found.join(" and ")
        ),
        why: "libraries of two ROCm versions in one process end in illegal memory accesses, late",
        remedy: "end it, and start it without LD_LIBRARY_PATH and LD_PRELOAD".into(),
        source: "/proc/PID/maps; an R9700's post-mortem",
    })
}

fn check_known_torch(torch: &TorchBuild, profile: &HardwareProfile) -> Option<DoctorFinding> {
    let known = profile.stack.as_ref()?;
    let found = StackVersions { torch: torch.version.clone(), ..StackVersions::default() };
    let difference = known.list_differences(&found).into_iter().next()?;
    Some(DoctorFinding {
        id: "C-67",
        severity: Severity::Info,
        seen: difference,
        why: "other versions may work as well, and fewer people run them on this card",
        remedy: "flotilla doctor --fix --python installs the known one as a stack and burns the \
                 box in with it"
            .into(),
        source: "the stack of the hardware profile: flotilla doctor profile",
    })
}

/// Torch's ROCm and the kernel must save the registers of gfx1151 in the same way.
fn check_kernel_pair(box_: &HostSnapshot, torch: &TorchBuild) -> Option<DoctorFinding> {
    let rocm = rocm_version(torch)?;
    let release = kernel::parse_release(&box_.kernel.release)?;
    let is_fixed =
        kernel::saves_all_registers(&release) || box_.gpus.iter().any(|gpu| gpu.saves_wave_state);
    let (severity, remedy) = match rocm {
        (7, 2, Some(0)) if !is_fixed => {
            (Severity::Fail, "upgrade the kernel to 6.18.4 or newer, and torch to ROCm 7.2.1's")
        }
        // Check C-20 covers an old kernel with other versions.
        _ if !is_fixed => return None,
        (7, 2, Some(0)) | (7, 9 | 10, _) => (Severity::Fail, UPGRADE_REMEDY),
        (major, minor, _) if (major, minor) < (7, 2) => (Severity::Fail, UPGRADE_REMEDY),
        // The version does not distinguish 7.2.0 from 7.2.1.
        (7, 2, None) => (Severity::Info, "make sure that it is 7.2.1 or newer"),
        _ => return None,
    };
    Some(DoctorFinding {
        id: "C-21",
        severity,
        seen: format!("torch {} on kernel {}", torch.version, box_.kernel.release),
        why: "a ROCm that saves gfx1151's registers differently than the kernel dies of SIGSEGV in \
              its first GPU kernel",
        remedy: remedy.into(),
        source: "AMD's RDNA 3.5 kernel notes; TheRock #2991",
    })
}

const UPGRADE_REMEDY: &str = "install torch for ROCm 7.2.1 or newer, of 7.11 or newer of TheRock's";

/// `2.10.0+rocm7.2.1` contains the version; the version of HIP alone has no patch number.
fn rocm_version(torch: &TorchBuild) -> Option<(u64, u64, Option<u64>)> {
    if let Some((_, local)) = torch.version.split_once("+rocm") {
        let (major, minor) = parse_major_minor(local)?;
        let patch = local.split('.').nth(2).map(|part| {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap_or(0)
        });
        return Some((major, minor, patch));
    }
    let (major, minor) = parse_major_minor(torch.hip.as_ref()?)?;
    Some((major, minor, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hardware::host_snapshot::GpuInfo;

    fn severity(kernel: &str, version: &str) -> Option<Severity> {
        let gpu = GpuInfo { gfx: "gfx1151".into(), ..GpuInfo::default() };
        let mut box_ = HostSnapshot { gpus: vec![gpu], ..HostSnapshot::default() };
        box_.kernel.release = kernel.into();
        let torch = TorchBuild { version: version.into(), ..TorchBuild::default() };
        check_kernel_pair(&box_, &torch).map(|finding| finding.severity)
    }

    #[test]
    fn kernel_and_rocm_must_match_as_amd_documents() {
        let (fixed, old) = ("6.18.4", "6.17.0-14-generic");
        for good in ["2.11.0+rocm7.2.1", "2.11.0+rocm7.13.0", "2.12.0+rocm10.0.0"] {
            assert_eq!(severity(fixed, good), None, "{good}");
        }
        for bad in ["2.10.0+rocm7.0", "2.9.1+rocm6.4", "2.11.0+rocm7.2.0", "2.11.0+rocm7.10.0a2"] {
            assert_eq!(severity(fixed, bad), Some(Severity::Fail), "{bad}");
        }
        assert_eq!(severity(fixed, "2.11.0+rocm7.2"), Some(Severity::Info));
        assert_eq!(severity(old, "2.11.0+rocm7.2.0"), Some(Severity::Fail));
        assert_eq!(severity(old, "2.9.1+rocm6.4"), None);
        assert_eq!(severity(fixed, "2.11.0+cpu"), None);
    }
}
