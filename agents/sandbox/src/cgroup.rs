//! The control groups of cells, where systemd has delegated a group to the agent.
//!
//! That is so in a service with `Delegate=yes` and `DelegateSubgroup=agent`: processes and groups
//! below cannot be in one group (cgroup v2), so the agent must have been put aside.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

const ROOT: &str = "/sys/fs/cgroup";
const NAME: &str = "flotilla-cell-";
const CONTROLLERS: [&str; 2] = ["memory", "pids"];

/// The kernel takes a moment to forget processes that have ended.
const REMOVAL_TRIES: u32 = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(2);

/// A group that is ours to divide.
#[derive(Debug, Clone)]
pub(crate) struct Parent(PathBuf);

impl Parent {
    /// The one this process is in, or the one above that.
    pub(crate) fn find() -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = Path::new(ROOT).join(own_path(&groups)?);
        let found = [own.parent()?, &own].into_iter().find(|path| is_usable(path))?;
        sweep(found);
        Some(Self(found.to_owned()))
    }

    /// A new group, for one cell.
    pub(crate) fn group(&self) -> io::Result<Group> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.0.join(format!("{NAME}{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Group(path))
    }
}

/// The path below the root of the unified hierarchy, from `/proc/self/cgroup`.
fn own_path(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

fn is_usable(group: &Path) -> bool {
    is_delegated(group) && has_controllers(group).unwrap_or(false)
}

/// systemd marks what it has delegated; without the mark root would divide everybody's groups.
fn is_delegated(group: &Path) -> bool {
    let mut value = [0; 8];
    let has =
        |name| rustix::fs::getxattr(group, name, &mut value[..]).is_ok_and(|_| value[0] == b'1');
    ["user.delegate", "trusted.delegate"].into_iter().any(has)
}

/// Whether groups below have what is needed, if need be after asking for it.
fn has_controllers(group: &Path) -> io::Result<bool> {
    let control = group.join("cgroup.subtree_control");
    let has =
        |text: &str| CONTROLLERS.iter().all(|wanted| text.split_whitespace().any(|c| c == *wanted));
    if !has(&fs::read_to_string(&control)?) {
        fs::write(&control, CONTROLLERS.map(|name| format!("+{name}")).join(" "))?;
    }
    Ok(has(&fs::read_to_string(&control)?))
}

/// Removes groups of cells whose agent was killed. Those in use cannot be removed.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(NAME) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// One cell's group. Must be dropped after the cell's process has ended.
#[derive(Debug)]
pub(crate) struct Group(PathBuf);

impl Group {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..REMOVAL_TRIES {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(REMOVAL_PAUSE);
                }
                // The next sandbox to be opened here tries again.
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
        assert_eq!(own_path(text), Some("system.slice/flotilla.service/agent"));
        assert_eq!(own_path("4:memory:/old\n"), None);
    }

    #[test]
    fn controllers_must_be_on_for_groups_below() {
        let group = tempfile::tempdir().unwrap();
        let control = group.path().join("cgroup.subtree_control");
        assert!(has_controllers(group.path()).is_err(), "no group at all");
        fs::write(&control, "cpu memory pids\n").unwrap();
        assert!(has_controllers(group.path()).unwrap());
        assert!(!is_delegated(group.path()), "nobody has marked it");
    }

    #[test]
    fn what_a_killed_agent_left_is_swept_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        for name in ["flotilla-cell-1-0", "flotilla-cell-1-1", "other"] {
            fs::create_dir(path(name)).unwrap();
        }
        // As if it had a process.
        fs::create_dir(path("flotilla-cell-1-1/busy")).unwrap();
        sweep(parent.path());
        assert!(!path("flotilla-cell-1-0").exists());
        assert!(path("flotilla-cell-1-1").exists() && path("other").exists());
        let group = Parent(parent.path().to_owned()).group().unwrap();
        let made = group.path().to_owned();
        assert!(made.exists());
        drop(group);
        assert!(!made.exists());
    }
}
