//! What of a box's findings matters to which role. A broken GPU does not keep a verifier from its
//! work, and only training needs torch.

use super::{Finding, catalogue::part, check};
use crate::{Profile, snapshot::Snapshot};

/// What in a box a check looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Gpu,
    Torch,
    Disk,
    /// What a job asks for, rather than what the box has.
    Plan,
}

/// What was found that touches a role, as the agent's children would meet it: they get the
/// profile's variables and none of the box's own. A failure means that the role, with an engine
/// that uses the GPU, cannot be done here.
pub fn for_role(box_: &Snapshot, role: &str) -> Vec<Finding> {
    // The profiles that come with the program can all be read.
    let Ok(profile) = Profile::of(box_) else { return Vec::new() };
    let environment = profile.variables();
    let mut seen = Snapshot { environment, settings: Vec::new(), ..box_.clone() };
    // How another's process was started is not how ours will be.
    seen.gpu_processes.iter_mut().for_each(|process| process.runtimes.clear());
    of_role(check(&seen, &profile), role)
}

/// Those of the findings that touch a role.
pub fn of_role(mut findings: Vec<Finding>, role: &str) -> Vec<Finding> {
    findings.retain(|finding| touches(part(finding.id), role));
    findings
}

fn touches(part: Part, role: &str) -> bool {
    match part {
        Part::Gpu => matches!(role, "trainer" | "generator" | "evaluator"),
        Part::Torch | Part::Plan => role == "trainer",
        Part::Disk => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doctor::{Severity, worst},
        snapshot::{Access, GpuSeen},
        torch,
    };

    const ROLES: [&str; 4] = ["trainer", "generator", "verifier", "evaluator"];

    /// Roles that a box cannot do.
    fn withheld(box_: &Snapshot) -> Vec<&'static str> {
        let failing = |role: &&str| worst(&for_role(box_, role)) == Some(Severity::Fail);
        ROLES.into_iter().filter(failing).collect()
    }

    fn card() -> Snapshot {
        let gpu = GpuSeen {
            gfx: "gfx1201".into(),
            render: Access::Usable,
            vram_total: 32 << 30,
            ..GpuSeen::default()
        };
        Snapshot { kfd: Access::Usable, gpus: vec![gpu], ..Snapshot::default() }
    }

    #[test]
    fn a_failure_withholds_the_roles_it_touches_and_no_other() {
        assert_eq!(withheld(&Snapshot::default()), [""; 0], "a CPU does everything");
        assert_eq!(withheld(&card()), [""; 0]);
        let denied = Snapshot { kfd: Access::Denied, ..card() };
        assert_eq!(withheld(&denied), ["trainer", "generator", "evaluator"]);
        assert_eq!(for_role(&denied, "trainer")[0].id, "C-07");
        // An environment was named, and there is no torch in it.
        let python = Some(torch::Snapshot::default());
        assert_eq!(withheld(&Snapshot { python, ..card() }), ["trainer"]);
    }

    #[test]
    fn what_children_do_not_get_withholds_nothing() {
        let mut overridden = card();
        overridden.environment = [("HSA_OVERRIDE_GFX_VERSION".into(), "11.0.0".into())].into();
        let profile = Profile::of(&overridden).unwrap();
        assert_eq!(check(&overridden, &profile)[0].severity, Severity::Fail);
        assert_eq!(withheld(&overridden), [""; 0]);
    }
}
