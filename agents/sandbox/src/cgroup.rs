//! The control groups of cells, if systemd has delegated a group to the agent.
//!
//! This needs a service with `Delegate=yes` and `DelegateSubgroup=agent`: a group cannot contain
//! both processes and subgroups (cgroup v2), so the agent must be in a subgroup of its own.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

const CGROUP_ROOT: &str = "/sys/fs/cgroup";
const NAME: &str = "flotilla-cell-";
const CONTROLLERS: [&str; 2] = ["memory", "pids"];

/// The kernel takes a moment to release ended processes.
const REMOVAL_TRIES: u32 = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(2);

/// A delegated group in which this process may create subgroups.
#[derive(Debug, Clone)]
pub(crate) struct CgroupParent(PathBuf);

impl CgroupParent {
    /// Finds the group above this process's group, or that group itself. Removes leftover cell
    /// groups.
    pub(crate) fn find_delegated() -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = Path::new(CGROUP_ROOT).join(own_cgroup_path(&groups)?);
        let found = [own.parent()?, &own].into_iter().find(|path| is_usable(path))?;
        remove_leftover_groups(found);
        Some(Self(found.to_owned()))
    }

    pub(crate) fn create_group(&self) -> io::Result<CellCgroup> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.0.join(format!("{NAME}{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(CellCgroup(path))
    }
}

/// Parses `/proc/self/cgroup` for the path in the unified hierarchy.
fn own_cgroup_path(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

fn is_usable(group: &Path) -> bool {
    is_delegated(group) && enable_controllers(group).unwrap_or(false)
}

/// Checks systemd's mark, without which root would divide the groups of other services.
fn is_delegated(group: &Path) -> bool {
    let mut value = [0; 8];
    let has =
        |name| rustix::fs::getxattr(group, name, &mut value[..]).is_ok_and(|_| value[0] == b'1');
    ["user.delegate", "trusted.delegate"].into_iter().any(has)
}

/// Returns true if subgroups have the needed controllers; enables them if possible.
fn enable_controllers(group: &Path) -> io::Result<bool> {
    let control = group.join("cgroup.subtree_control");
    let has =
        |text: &str| CONTROLLERS.iter().all(|wanted| text.split_whitespace().any(|c| c == *wanted));
    if !has(&fs::read_to_string(&control)?) {
        fs::write(&control, CONTROLLERS.map(|name| format!("+{name}")).join(" "))?;
    }
    Ok(has(&fs::read_to_string(&control)?))
}

/// Skips groups in use, which cannot be removed.
fn remove_leftover_groups(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(NAME) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The group of one cell. It must be dropped after the cell's process has ended.
#[derive(Debug)]
pub(crate) struct CellCgroup(PathBuf);

impl CellCgroup {
    pub(crate) fn group_path(&self) -> &Path {
        &self.0
    }
}

impl Drop for CellCgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVAL_TRIES {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(REMOVAL_PAUSE);
                }
                // The next sandbox that is opened on this host tries again.
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unified_hierarchy_counts() {
        let text = "4:memory:/old\n0::/system.slice/flotilla.service/agent\n";
        assert_eq!(own_cgroup_path(text), Some("system.slice/flotilla.service/agent"));
        assert_eq!(own_cgroup_path("4:memory:/old\n"), None);
    }

    #[test]
    fn controllers_must_be_on_for_groups_below() {
        let group = tempfile::tempdir().unwrap();
        let control = group.path().join("cgroup.subtree_control");
        assert!(enable_controllers(group.path()).is_err(), "no group at all");
        fs::write(&control, "cpu memory pids\n").unwrap();
        assert!(enable_controllers(group.path()).unwrap());
        assert!(!is_delegated(group.path()), "nobody has marked it");
    }

    #[test]
    fn what_a_killed_agent_left_is_swept_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        for name in ["flotilla-cell-1-0", "flotilla-cell-1-1", "other"] {
            fs::create_dir(path(name)).unwrap();
        }
        // A subdirectory keeps the group as a process would.
        fs::create_dir(path("flotilla-cell-1-1/busy")).unwrap();
        remove_leftover_groups(parent.path());
        assert!(!path("flotilla-cell-1-0").exists());
        assert!(path("flotilla-cell-1-1").exists() && path("other").exists());
        let group = CgroupParent(parent.path().to_owned()).create_group().unwrap();
        let made = group.group_path().to_owned();
        assert!(made.exists());
        drop(group);
        assert!(!made.exists());
    }
}
