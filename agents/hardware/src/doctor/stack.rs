//! Kernel, driver and the Python environment that trains, as far as they must go together.

use super::{Finding, Severity, kernel, number};
use crate::{
    Profile,
    snapshot::{GpuProcess, Snapshot},
    torch::{self, Torch},
};

/// Little where no environment was named: whether one is needed depends on the engine.
pub(super) fn check(box_: &Snapshot, profile: &Profile) -> Vec<Finding> {
    let mut findings: Vec<Finding> = box_.gpu_processes.iter().filter_map(mixed).collect();
    let Some(python) = &box_.python else { return findings };
    let environment = box_.environment.clone();
    let python = torch::Snapshot { environment, ..python.clone() };
    findings.extend(torch::of_stack(&python, profile));
    if box_.gpus.iter().any(|gpu| gpu.gfx == "gfx1151") {
        findings.extend(python.torch.as_ref().and_then(|torch| kernel_pair(box_, torch)));
    }
    findings
}

/// The proof of it: one process, two installations.
fn mixed(process: &GpuProcess) -> Option<Finding> {
    let found: Vec<&str> = process.runtimes.iter().map(String::as_str).collect();
    (found.len() > 1).then(|| Finding {
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

/// On gfx1151 kernel and ROCm agree on how a wave's registers are saved, or nothing works.
fn kernel_pair(box_: &Snapshot, torch: &Torch) -> Option<Finding> {
    let rocm = rocm(torch)?;
    let release = kernel::parse(&box_.kernel.release)?;
    let is_fixed = kernel::is_fixed(&release) || box_.gpus.iter().any(|gpu| gpu.saves_wave_state);
    let (severity, remedy) = match rocm {
        (7, 2, Some(0)) if !is_fixed => {
            (Severity::Fail, "upgrade the kernel to 6.18.4 or newer, and torch to ROCm 7.2.1's")
        }
        // What an old kernel does to the others is C-20's to say.
        _ if !is_fixed => return None,
        (7, 2, Some(0)) | (7, 9 | 10, _) => (Severity::Fail, UPGRADE),
        (major, minor, _) if (major, minor) < (7, 2) => (Severity::Fail, UPGRADE),
        // Its name does not tell 7.2.0 from 7.2.1.
        (7, 2, None) => (Severity::Info, "make sure that it is 7.2.1 or newer"),
        _ => return None,
    };
    Some(Finding {
        id: "C-21",
        severity,
        seen: format!("torch {} on kernel {}", torch.version, box_.kernel.release),
        why: "a ROCm that saves gfx1151's registers otherwise than the kernel dies of SIGSEGV in \
              its first kernel",
        remedy: remedy.into(),
        source: "AMD's RDNA 3.5 kernel notes; TheRock #2991",
    })
}

const UPGRADE: &str = "install torch for ROCm 7.2.1 or newer, of 7.11 or newer of TheRock's";

/// `2.10.0+rocm7.2.1` says it; the version of HIP alone has no patch level of ROCm's.
fn rocm(torch: &Torch) -> Option<(u64, u64, Option<u64>)> {
    if let Some((_, local)) = torch.version.split_once("+rocm") {
        let (major, minor) = number(local)?;
        let patch = local.split('.').nth(2).map(|part| {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap_or(0)
        });
        return Some((major, minor, patch));
    }
    let (major, minor) = number(torch.hip.as_ref()?)?;
    Some((major, minor, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::GpuSeen;

    fn severity(kernel: &str, version: &str) -> Option<Severity> {
        let gpu = GpuSeen { gfx: "gfx1151".into(), ..GpuSeen::default() };
        let mut box_ = Snapshot { gpus: vec![gpu], ..Snapshot::default() };
        box_.kernel.release = kernel.into();
        let torch = Torch { version: version.into(), ..Torch::default() };
        kernel_pair(&box_, &torch).map(|finding| finding.severity)
    }

    #[test]
    fn kernel_and_rocm_go_together_as_amd_says() {
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
