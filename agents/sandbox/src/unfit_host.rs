//! The reason why a host cannot contain programs, with advice for its owner.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A layer of the containment. A sandbox needs all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxLayer {
    Kernel,
    Cell,
    /// Lets an ordinary user create the other namespaces.
    Namespaces,
    /// A user that owns nothing.
    Identity,
    /// A read-only view of the system.
    View,
    /// Contains only the program's own processes.
    Proc,
    Seccomp,
    SelfTest,
}

impl fmt::Display for SandboxLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Cell => "cell process",
            Self::Namespaces => "namespaces",
            Self::Identity => "user mapping",
            Self::View => "read-only view",
            Self::Proc => "private /proc",
            Self::Seccomp => "seccomp",
            Self::SelfTest => "self-test",
        })
    }
}

/// A host that cannot contain programs and must not run programs that a model wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot contain programs on this box: {layer}: {problem}; {remedy} (V102)")]
pub struct UnfitHost {
    pub layer: SandboxLayer,
    pub problem: String,
    /// Advice for the host's owner.
    pub remedy: String,
}

impl UnfitHost {
    pub(crate) fn new(layer: SandboxLayer, problem: impl fmt::Display) -> Self {
        Self { layer, problem: problem.to_string(), remedy: general_remedy(layer).to_owned() }
    }

    /// Names the host's setting if one is known to cause the refusal.
    pub(crate) fn refused_by_kernel(layer: SandboxLayer, problem: impl fmt::Display) -> Self {
        let remedy = restriction_remedy(&HostRestrictions::read_settings())
            .unwrap_or_else(|| general_remedy(layer));
        Self { layer, problem: problem.to_string(), remedy: remedy.to_owned() }
    }
}

#[derive(Debug, Default)]
struct HostRestrictions {
    is_root: bool,
    in_container: bool,
    apparmor_restricts: bool,
    debian_forbids: bool,
    none_allowed: bool,
}

impl HostRestrictions {
    fn read_settings() -> Self {
        let value = |name: &str| std::fs::read_to_string(format!("/proc/sys/{name}"));
        let is = |name, wanted| value(name).is_ok_and(|value| value.trim() == wanted);
        let exists = |path: &str| std::path::Path::new(path).exists();
        Self {
            is_root: rustix::process::geteuid().is_root(),
            in_container: exists("/.dockerenv") || exists("/run/.containerenv"),
            apparmor_restricts: is("kernel/apparmor_restrict_unprivileged_userns", "1"),
            debian_forbids: is("kernel/unprivileged_userns_clone", "0"),
            none_allowed: is("user/max_user_namespaces", "0"),
        }
    }
}

/// Returns advice on the setting that is known to forbid namespaces and mounts.
fn restriction_remedy(around: &HostRestrictions) -> Option<&'static str> {
    if around.none_allowed {
        return Some("no user namespaces are allowed: sysctl -w user.max_user_namespaces=10000");
    }
    if around.debian_forbids && !around.is_root {
        return Some("users may not have namespaces: sysctl -w kernel.unprivileged_userns_clone=1");
    }
    if around.apparmor_restricts && !around.is_root {
        return Some(
            "AppArmor restricts user namespaces (Ubuntu 23.10 and later): give this program a \
             profile that allows them, or sysctl -w \
             kernel.apparmor_restrict_unprivileged_userns=0; see docs/SANDBOX.md",
        );
    }
    around.in_container.then_some(
        "this is a container whose runtime forbids it: run the agent outside, or start the \
         container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
         --security-opt systempaths=unconfined",
    )
}

fn general_remedy(layer: SandboxLayer) -> &'static str {
    match layer {
        SandboxLayer::Kernel => "a kernel of at least 5.14 is needed",
        SandboxLayer::Cell => "look at this process's limits and log",
        SandboxLayer::Namespaces | SandboxLayer::Identity => {
            "the kernel must have user, pid, mount, net, ipc, uts and cgroup namespaces, and the \
             service or container that runs this agent must not forbid them (systemd: \
             RestrictNamespaces=no)"
        }
        SandboxLayer::View => {
            "the paths to be shown must exist, and the agent must be able to reach them"
        }
        SandboxLayer::Proc => {
            "parts of /proc are hidden here, so the kernel refuses a private one; run the agent \
             outside the container"
        }
        SandboxLayer::Seccomp => "the kernel must have CONFIG_SECCOMP_FILTER; x86_64 or aarch64",
        SandboxLayer::SelfTest => "see docs/SANDBOX.md",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_own_remedy() {
        let ubuntu = HostRestrictions { apparmor_restricts: true, ..HostRestrictions::default() };
        assert!(restriction_remedy(&ubuntu).unwrap().contains("AppArmor"));
        let root = HostRestrictions { is_root: true, ..ubuntu };
        assert_eq!(restriction_remedy(&root), None, "root is not restricted");
        let debian = HostRestrictions { debian_forbids: true, ..HostRestrictions::default() };
        assert!(restriction_remedy(&debian).unwrap().contains("unprivileged_userns_clone"));
        let docker = HostRestrictions { in_container: true, ..HostRestrictions::default() };
        assert!(restriction_remedy(&docker).unwrap().contains("systempaths=unconfined"));
        let hardened = HostRestrictions { none_allowed: true, ..docker };
        assert!(restriction_remedy(&hardened).unwrap().contains("max_user_namespaces"));
    }

    #[test]
    fn it_names_the_layer_the_problem_and_the_remedy() {
        let unfit = UnfitHost::new(SandboxLayer::Seccomp, "EINVAL").to_string();
        assert!(unfit.contains("seccomp: EINVAL; the kernel must have"), "{unfit}");
    }
}
