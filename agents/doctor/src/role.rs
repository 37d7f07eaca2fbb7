//! The findings that concern a role. A broken GPU does not stop a verifier, and only training needs
//! torch.

use super::{
    DoctorFinding,
    catalogue::{CheckedPart, checked_part},
    check_host,
};
use hardware::{HardwareProfile, host_snapshot::HostSnapshot};

/// Checks a host for a role, as the agent's children see it: with the profile's variables and none
/// of the host's own. A failure means that this host cannot take the role with an engine that uses
/// the GPU.
pub fn findings_for_role(box_: &HostSnapshot, role: &str) -> Vec<DoctorFinding> {
    // The built-in profiles are always readable.
    let Ok(profile) = HardwareProfile::for_host(box_) else { return Vec::new() };
    let environment = profile.child_variables();
    let mut seen = HostSnapshot { environment, settings: Vec::new(), ..box_.clone() };
    // Libraries of other processes do not affect the agent's children.
    seen.gpu_processes.iter_mut().for_each(|process| process.runtimes.clear());
    filter_by_role(check_host(&seen, &profile), role)
}

/// Returns the findings that concern a role.
pub fn filter_by_role(mut findings: Vec<DoctorFinding>, role: &str) -> Vec<DoctorFinding> {
    findings.retain(|finding| concerns_role(checked_part(finding.id), role));
    findings
}

fn concerns_role(part: CheckedPart, role: &str) -> bool {
    match part {
        CheckedPart::Gpu => {
            matches!(role, "trainer" | "generator" | "scorer" | "evaluator" | "server")
        }
        CheckedPart::Torch | CheckedPart::Plan => role == "trainer",
        CheckedPart::Disk => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Severity, worst_severity};
    use hardware::host_snapshot::{DeviceAccess, GpuInfo};
    use hardware::torch_environment;

    const ROLES: [&str; 5] = ["trainer", "generator", "verifier", "scorer", "evaluator"];

    /// The roles that a host cannot take.
    fn withheld(box_: &HostSnapshot) -> Vec<&'static str> {
        let failing =
            |role: &&str| worst_severity(&findings_for_role(box_, role)) == Some(Severity::Fail);
        ROLES.into_iter().filter(failing).collect()
    }

    fn card() -> HostSnapshot {
        let gpu = GpuInfo {
            gfx: "gfx1201".into(),
            render: DeviceAccess::Usable,
            vram_total: 32 << 30,
            ..GpuInfo::default()
        };
        HostSnapshot { kfd: DeviceAccess::Usable, gpus: vec![gpu], ..HostSnapshot::default() }
    }

    #[test]
    fn a_failure_withholds_the_roles_it_touches_and_no_other() {
        assert_eq!(withheld(&HostSnapshot::default()), [""; 0], "a CPU does everything");
        assert_eq!(withheld(&card()), [""; 0]);
        let denied = HostSnapshot { kfd: DeviceAccess::Denied, ..card() };
        assert_eq!(withheld(&denied), ["trainer", "generator", "scorer", "evaluator"]);
        assert_eq!(findings_for_role(&denied, "trainer")[0].id, "C-07");
        // An environment was named, but it has no torch.
        let python = Some(torch_environment::TorchEnvironment::default());
        assert_eq!(withheld(&HostSnapshot { python, ..card() }), ["trainer"]);
    }

    #[test]
    fn variables_that_children_do_not_get_withhold_no_role() {
        let mut overridden = card();
        overridden.environment = [("HSA_OVERRIDE_GFX_VERSION".into(), "11.0.0".into())].into();
        let profile = HardwareProfile::for_host(&overridden).unwrap();
        assert_eq!(check_host(&overridden, &profile)[0].severity, Severity::Fail);
        assert_eq!(withheld(&overridden), [""; 0]);
    }
}
