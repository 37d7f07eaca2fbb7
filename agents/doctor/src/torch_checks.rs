//! The findings about a Python environment. Pure.

use hardware::{
    HardwareProfile,
    torch_environment::{TorchBuild, TorchEnvironment},
};

use crate::{
    DoctorFinding, Severity,
    environment::{check_allocator, check_gfx_override},
    parse_major_minor, sort_findings,
};

/// The oldest torch with which transformers reads an optimizer's state.
const TORCH_MIN: (u64, u64) = (2, 6);

/// The oldest package versions that the training program supports.
const PACKAGE_MINIMUMS: [(&str, (u64, u64)); 3] =
    [("transformers", (4, 57)), ("peft", (0, 17)), ("accelerate", (1, 12))];

/// Returns all findings about a Python environment, the worst first.
pub fn check_torch_environment(
    snapshot: &TorchEnvironment,
    profile: &HardwareProfile,
) -> Vec<DoctorFinding> {
    let mut findings = check_torch_stack(snapshot, profile);
    if let (Some(torch), true) = (&snapshot.torch, is_amd(profile)) {
        let (environment, cards) = (&snapshot.environment, [profile.name.as_str()]);
        findings.extend(check_gfx_override(environment, &cards));
        findings.extend(check_allocator(environment, &cards, Some(&torch.version)));
    }
    sort_findings(findings)
}

pub(crate) fn check_torch_stack(
    snapshot: &TorchEnvironment,
    profile: &HardwareProfile,
) -> Vec<DoctorFinding> {
    let Some(torch) = &snapshot.torch else {
        let seen = format!("torch is not installed beside {}", snapshot.interpreter.display());
        let remedy = "install torch, transformers, peft and accelerate there, or pass another \
                      --python, or put uv on PATH";
        return vec![new_finding("C-41", Severity::Fail, seen, remedy)];
    };
    let mut findings = check_packages(snapshot, torch);
    findings.extend(check_python(snapshot, profile));
    if is_amd(profile) {
        findings.extend(check_wheel(snapshot, torch, profile));
        findings.extend(check_mixed_rocm(snapshot, torch));
    } else if profile.is_cuda() && torch.cuda.is_none() {
        let seen = format!("torch {} is not built for CUDA", torch.version);
        findings.push(new_finding("C-44", Severity::Fail, seen, "install torch from PyPI"));
    }
    findings
}

fn is_amd(profile: &HardwareProfile) -> bool {
    !profile.is_cpu() && !profile.is_cuda()
}

fn new_finding(
    id: &'static str,
    severity: Severity,
    seen: impl Into<String>,
    remedy: impl Into<String>,
) -> DoctorFinding {
    let (why, source) = match id {
        "C-41" => (
            "libraries of two ROCm versions in one process end in illegal memory accesses, late",
            "an R9700's post-mortem: ROCm 7.12 beside a wheel of 7.11",
        ),
        "C-43" => ("torch has no wheels for it", "AMD's and PyTorch's indices of wheels"),
        "C-44" => (
            "the first kernel ends with: no kernel image is available",
            "what is in torch/lib/rocblas/library",
        ),
        "C-55" => (
            "importing torchao fails: module 'torch' has no attribute 'int1'",
            "torchao, which needs torch 2.6",
        ),
        _ => ("the training program is written for newer ones", "their release notes"),
    };
    let (seen, remedy) = (seen.into(), remedy.into());
    DoctorFinding { id, severity, seen, why, remedy, source }
}

fn check_packages(snapshot: &TorchEnvironment, torch: &TorchBuild) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    for (name, floor) in PACKAGE_MINIMUMS {
        let wanted = format!("{name} {}.{} or newer", floor.0, floor.1);
        let (severity, seen) = match snapshot.packages.get(name) {
            None => (Severity::Fail, format!("{name} is not installed")),
            Some(version) if parse_major_minor(version) < Some(floor) => {
                (Severity::Fail, format!("{name} is {version}"))
            }
            Some(_) => continue,
        };
        findings.push(new_finding("C-56", severity, seen, format!("install {wanted}")));
    }
    if parse_major_minor(&torch.version) < Some(TORCH_MIN) {
        let seen = format!("torch is {}", torch.version);
        let remedy = "transformers reads no optimizer state with it, so interrupted trainings \
                      start over; install 2.6 or newer";
        findings.push(new_finding("C-56", Severity::Warn, seen, remedy));
        if let Some(torchao) = snapshot.packages.get("torchao") {
            let seen = format!("torchao {torchao} beside torch {}", torch.version);
            findings.push(new_finding("C-55", Severity::Fail, seen, "uninstall torchao"));
        }
    }
    findings
}

fn check_python(snapshot: &TorchEnvironment, profile: &HardwareProfile) -> Option<DoctorFinding> {
    let range = &profile.python;
    let version = snapshot.python.as_ref()?;
    let fits = (parse_major_minor(&range.min)..=parse_major_minor(&range.max))
        .contains(&parse_major_minor(version));
    // The last wheels for this card are old, so no newer version can be installed.
    let severity = if profile.name == "gfx906" { Severity::Fail } else { Severity::Warn };
    let remedy = format!(
        "make the environment with Python {} to {}: uv venv --python {}",
        range.min, range.max, range.max
    );
    (!fits).then(|| new_finding("C-43", severity, format!("Python is {version}"), remedy))
}

fn check_wheel(
    snapshot: &TorchEnvironment,
    torch: &TorchBuild,
    profile: &HardwareProfile,
) -> Option<DoctorFinding> {
    let index = profile.python.index.as_deref().unwrap_or("the index of this card's wheels");
    let remedy = format!("install torch from {index}");
    if torch.hip.is_none() {
        let built = torch.cuda.as_ref().map_or("the CPU".into(), |cuda| format!("CUDA {cuda}"));
        let seen = format!("torch {} is built for {built}, not for ROCm", torch.version);
        return Some(new_finding("C-44", Severity::Fail, seen, remedy));
    }
    let is_target = profile.name.starts_with("gfx");
    if !is_target || snapshot.targets.is_empty() || snapshot.targets.contains(&profile.name) {
        return None;
    }
    let has: Vec<&str> = snapshot.targets.iter().map(String::as_str).collect();
    let seen = format!(
        "torch {} has kernels for {}, not for {}",
        torch.version,
        has.join(", "),
        profile.name
    );
    Some(new_finding("C-44", Severity::Fail, seen, remedy))
}

/// A driver of another version is harmless.
fn check_mixed_rocm(snapshot: &TorchEnvironment, torch: &TorchBuild) -> Option<DoctorFinding> {
    let hip = torch.hip.as_ref()?;
    let system = snapshot.system_rocm.as_ref();
    let differs = system.is_some_and(|system| parse_major_minor(system) != parse_major_minor(hip));
    let found = system.map_or("none".into(), |system| format!("{system} in /opt/rocm"));
    let versions = format!("torch's HIP is {hip}, the system's ROCm {found}");
    if !snapshot.bundles_hip && (differs || system.is_none()) {
        let seen = format!("{versions}, and torch brings no HIP of its own");
        let remedy = "install a wheel that bundles ROCm, or the system's ROCm of that version";
        return Some(new_finding("C-41", Severity::Fail, seen, remedy));
    }
    if let Some(leak) = snapshot.leaking_variables().first() {
        let severity = if differs { Severity::Fail } else { Severity::Warn };
        let seen = format!("{versions}, and {leak} puts the system's first");
        return Some(new_finding("C-41", severity, seen, "unset it for the agent"));
    }
    // The wheel's own path precedes the loader's files, but not for all libraries that are loaded
    // later.
    let path = snapshot.loader_paths.first().filter(|_| differs)?;
    let seen = format!("{versions}, and {} lets the loader find it", path.display());
    let remedy = "remove that file if libraries of both turn up in one process (/proc/PID/maps)";
    Some(new_finding("C-41", Severity::Warn, seen, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hardware::host_snapshot::GFX_OVERRIDE;

    const ALLOCATOR: [&str; 3] =
        ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

    fn healthy(profile: &HardwareProfile) -> TorchEnvironment {
        let hip = is_amd(profile).then(|| "7.1.25424-4179531dcd".to_owned());
        let cuda = profile.is_cuda().then(|| "13.0".to_owned());
        let versions = [("transformers", "5.23.0"), ("peft", "0.21.2"), ("accelerate", "1.15.0")];
        let torch = TorchBuild { version: "2.10.0+rocm7.1".into(), hip, cuda };
        TorchEnvironment {
            interpreter: "/venv/bin/python".into(),
            python: Some("3.12".into()),
            torch: Some(torch),
            packages: versions.map(|(name, version)| (name.into(), version.into())).into(),
            bundles_hip: true,
            targets: ["gfx906", "gfx1151", "gfx1201"].map(str::to_owned).into(),
            system_rocm: Some("7.1.0-7".into()),
            environment: profile.child_variables(),
            ..TorchEnvironment::default()
        }
    }

    fn found(
        profile: &str,
        change: impl FnOnce(&mut TorchEnvironment),
    ) -> Vec<(&'static str, Severity)> {
        let profile = HardwareProfile::load_named(profile).unwrap();
        let mut snapshot = healthy(&profile);
        change(&mut snapshot);
        check_torch_environment(&snapshot, &profile)
            .into_iter()
            .map(|it| (it.id, it.severity))
            .collect()
    }

    fn set(snapshot: &mut TorchEnvironment, name: &str, value: &str) {
        snapshot.environment.insert(name.into(), value.into());
    }

    #[test]
    fn a_healthy_environment_is_left_alone_on_every_profile() {
        for profile in ["cpu", "cuda", "gfx906", "gfx1151", "gfx1201", "rocm"] {
            assert_eq!(found(profile, |_| {}), [], "{profile}");
        }
    }

    #[test]
    fn a_gpu_of_nvidia_needs_a_torch_for_cuda_and_none_of_amd_s_checks() {
        let of_rocm_alone = |snapshot: &mut TorchEnvironment| {
            set(snapshot, "PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512");
        };
        assert_eq!(found("cuda", of_rocm_alone), []);
        let for_the_cpu = |snapshot: &mut TorchEnvironment| {
            snapshot.torch.as_mut().unwrap().cuda = None;
        };
        assert_eq!(found("cuda", for_the_cpu), [("C-44", Severity::Fail)]);
    }

    #[test]
    fn libraries_of_two_rocms_in_one_process_fail() {
        let leak = |snapshot: &mut TorchEnvironment| {
            set(snapshot, "LD_LIBRARY_PATH", "/opt/rocm/lib");
        };
        assert_eq!(found("gfx1201", leak), [("C-41", Severity::Warn)], "the same version");
        let post_mortem = |snapshot: &mut TorchEnvironment| {
            snapshot.torch.as_mut().unwrap().hip = Some("7.11.26091".into());
            snapshot.system_rocm = Some("7.12.0".into());
        };
        assert_eq!(found("gfx1201", post_mortem), [], "a driver of another version is fine");
        let leaking = |snapshot: &mut TorchEnvironment| {
            post_mortem(snapshot);
            leak(snapshot);
        };
        assert_eq!(found("gfx1201", leaking), [("C-41", Severity::Fail)]);
        let unbundled = |snapshot: &mut TorchEnvironment| {
            post_mortem(snapshot);
            snapshot.bundles_hip = false;
        };
        assert_eq!(found("gfx1201", unbundled), [("C-41", Severity::Fail)]);
        let loader = |snapshot: &mut TorchEnvironment| {
            post_mortem(snapshot);
            snapshot.loader_paths = vec!["/etc/ld.so.conf.d/rocm.conf".into()];
        };
        assert_eq!(found("gfx1201", loader), [("C-41", Severity::Warn)]);
    }

    #[test]
    fn a_wheel_for_something_else_fails_by_name() {
        let cuda = |snapshot: &mut TorchEnvironment| {
            let torch = snapshot.torch.as_mut().unwrap();
            (torch.hip, torch.cuda) = (None, Some("13.2".into()));
        };
        assert_eq!(found("gfx1151", cuda), [("C-44", Severity::Fail)]);
        assert_eq!(found("cpu", cuda), [], "where there is no AMD GPU any torch does");
        let targets =
            |snapshot: &mut TorchEnvironment| snapshot.targets = ["gfx1100".into()].into();
        assert_eq!(found("gfx906", targets), [("C-44", Severity::Fail)]);
        assert_eq!(found("rocm", targets), []);
        assert_eq!(found("cpu", |snapshot| snapshot.torch = None), [("C-41", Severity::Fail)]);
    }

    #[test]
    fn packages_and_interpreters_out_of_range_are_named() {
        let python = |snapshot: &mut TorchEnvironment| snapshot.python = Some("3.13".into());
        assert_eq!(found("gfx906", python), [("C-43", Severity::Fail)]);
        assert_eq!(found("gfx1151", python), []);
        let old = |snapshot: &mut TorchEnvironment| {
            snapshot.python = Some("3.10".into());
        };
        assert_eq!(found("gfx1151", old), [("C-43", Severity::Warn)]);
        let old = |snapshot: &mut TorchEnvironment| {
            snapshot.torch.as_mut().unwrap().version = "2.4.1+rocm6.0".into();
            snapshot.packages.remove("peft");
            snapshot.packages.insert("transformers".into(), "4.44.2".into());
            snapshot.packages.insert("torchao".into(), "0.9.0".into());
        };
        let fail = Severity::Fail;
        let expected = [("C-55", fail), ("C-56", fail), ("C-56", fail), ("C-56", Severity::Warn)];
        assert_eq!(found("cpu", old), expected);
    }

    #[test]
    fn an_environment_that_corrupts_fails() {
        let overridden = |value: &'static str| {
            move |snapshot: &mut TorchEnvironment| set(snapshot, GFX_OVERRIDE, value)
        };
        assert_eq!(found("gfx906", overridden("9.0.6")), [("C-45", Severity::Warn)]);
        assert_eq!(found("gfx1151", overridden("11.0.0")), [("C-45", Severity::Fail)]);
        assert_eq!(found("gfx1151", overridden("nonsense")), [("C-45", Severity::Fail)]);
        let all = |value: &'static str| {
            move |snapshot: &mut TorchEnvironment| {
                ALLOCATOR.iter().for_each(|name| set(snapshot, name, value));
            }
        };
        let zeros = "expandable_segments:True,max_split_size_mb:512";
        assert_eq!(found("rocm", all(zeros)), [("C-46", Severity::Fail)]);
        assert_eq!(found("gfx1201", all("expandable_segments:True")), [("C-46", Severity::Fail)]);
        let expandable = all("expandable_segments:True");
        assert_eq!(found("rocm", expandable), [("C-46", Severity::Warn)], "before torch 2.11");
        let unequal =
            |snapshot: &mut TorchEnvironment| set(snapshot, ALLOCATOR[0], "max_split_size_mb:64");
        assert_eq!(found("gfx1151", unequal), [("C-46", Severity::Warn)]);
    }
}
