//! Why a box cannot contain programs, and what its owner can do about it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What containment consists of. A box lacks one of these, or has all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layer {
    /// What the kernel must have at least.
    Kernel,
    /// The cell's process itself.
    Cell,
    /// A user namespace, in which the others can be made without being root.
    Namespaces,
    /// The identity of nobody in particular.
    Identity,
    /// A read-only view of the system.
    View,
    /// A `/proc` with nothing in it but the program's own processes.
    Proc,
    /// The filter of system calls.
    Seccomp,
    /// What the self-test of a contained program found.
    SelfTest,
}

impl fmt::Display for Layer {
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

/// This box cannot contain programs, and must not run any that a model wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot contain programs on this box: {layer}: {problem}; {remedy} (V102)")]
pub struct Unfit {
    pub layer: Layer,
    pub problem: String,
    /// What the box's owner can do.
    pub remedy: String,
}

impl Unfit {
    pub(crate) fn new(layer: Layer, problem: impl fmt::Display) -> Self {
        Self { layer, problem: problem.to_string(), remedy: plain_remedy(layer).to_owned() }
    }

    /// What the kernel refused may be due to a setting of the box.
    pub(crate) fn refused(layer: Layer, problem: impl fmt::Display) -> Self {
        let remedy = setting(&Surroundings::look()).unwrap_or_else(|| plain_remedy(layer));
        Self { layer, problem: problem.to_string(), remedy: remedy.to_owned() }
    }
}

/// What of the box decides whether namespaces are to be had.
#[derive(Debug, Default)]
struct Surroundings {
    root: bool,
    container: bool,
    apparmor_restricts: bool,
    debian_forbids: bool,
    none_allowed: bool,
}

impl Surroundings {
    fn look() -> Self {
        let value = |name: &str| std::fs::read_to_string(format!("/proc/sys/{name}"));
        let is = |name, wanted| value(name).is_ok_and(|value| value.trim() == wanted);
        let exists = |path: &str| std::path::Path::new(path).exists();
        Self {
            root: rustix::process::geteuid().is_root(),
            container: exists("/.dockerenv") || exists("/run/.containerenv"),
            apparmor_restricts: is("kernel/apparmor_restrict_unprivileged_userns", "1"),
            debian_forbids: is("kernel/unprivileged_userns_clone", "0"),
            none_allowed: is("user/max_user_namespaces", "0"),
        }
    }
}

/// What is known to forbid namespaces and mounts here, and how to allow them.
fn setting(around: &Surroundings) -> Option<&'static str> {
    if around.none_allowed {
        return Some("no user namespaces are allowed: sysctl -w user.max_user_namespaces=10000");
    }
    if around.debian_forbids && !around.root {
        return Some("users may not have namespaces: sysctl -w kernel.unprivileged_userns_clone=1");
    }
    if around.apparmor_restricts && !around.root {
        return Some(
            "AppArmor restricts user namespaces (Ubuntu 23.10 and later): give this program a \
             profile that allows them, or sysctl -w \
             kernel.apparmor_restrict_unprivileged_userns=0; see docs/SANDBOX.md",
        );
    }
    around.container.then_some(
        "this is a container whose runtime forbids it: run the agent outside, or start the \
         container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
         --security-opt systempaths=unconfined",
    )
}

fn plain_remedy(layer: Layer) -> &'static str {
    match layer {
        Layer::Kernel => "a kernel of at least 5.14 is needed",
        Layer::Cell => "look at this process's limits and log",
        Layer::Namespaces | Layer::Identity => {
            "the kernel must have user, pid, mount, net, ipc, uts and cgroup namespaces, and \
             whatever runs this agent must not forbid them (systemd: RestrictNamespaces=no)"
        }
        Layer::View => "the paths to be shown must exist, and the agent must be able to reach them",
        Layer::Proc => "something hides parts of /proc here, and then the kernel gives no other",
        Layer::Seccomp => "the kernel must have CONFIG_SECCOMP_FILTER; x86_64 or aarch64",
        Layer::SelfTest => "see docs/SANDBOX.md",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_own_remedy() {
        let ubuntu = Surroundings { apparmor_restricts: true, ..Surroundings::default() };
        assert!(setting(&ubuntu).unwrap().contains("AppArmor"));
        let root = Surroundings { root: true, ..ubuntu };
        assert_eq!(setting(&root), None, "root is not restricted");
        let debian = Surroundings { debian_forbids: true, ..Surroundings::default() };
        assert!(setting(&debian).unwrap().contains("unprivileged_userns_clone"));
        let docker = Surroundings { container: true, ..Surroundings::default() };
        assert!(setting(&docker).unwrap().contains("systempaths=unconfined"));
        let hardened = Surroundings { none_allowed: true, ..docker };
        assert!(setting(&hardened).unwrap().contains("max_user_namespaces"));
    }

    #[test]
    fn it_names_the_layer_the_problem_and_the_remedy() {
        let unfit = Unfit::new(Layer::Seccomp, "EINVAL").to_string();
        assert!(unfit.contains("seccomp: EINVAL; the kernel must have"), "{unfit}");
    }
}
