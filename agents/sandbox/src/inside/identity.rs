//! The user of contained programs: one that owns nothing, also outside the namespace if the agent
//! is root.

use std::io;

use rustix::{
    process::{
        DumpableBehavior, Gid, Pid, Signal, Uid, getegid, geteuid, set_dumpable_behavior,
        set_parent_process_death_signal,
    },
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

/// Inside the namespace, for user and group.
pub(crate) const ID: u32 = 1000;

/// Outside, if the agent is root.
const NOBODY_ID: u32 = 65534;

/// The user and group of a contained program outside its namespace: those of this process, or
/// `nobody` if it is root.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutsideIdentity {
    pub user: u32,
    pub group: u32,
    is_nobody: bool,
}

impl OutsideIdentity {
    /// Fails for real root without a user `nobody` to map to.
    pub(crate) fn choose_identity() -> io::Result<Self> {
        let (mine, group) = (geteuid().as_raw(), getegid().as_raw());
        let known = std::fs::read_to_string("/proc/self/uid_map")?;
        let is_nobody = mine == 0 && outside_user(&known, NOBODY_ID).is_some();
        if mine == 0 && !is_nobody && outside_user(&known, mine) == Some(0) {
            return Err(io::Error::other("this is root, and there is no user to become"));
        }
        let (user, group) = if is_nobody { (NOBODY_ID, NOBODY_ID) } else { (mine, group) };
        Ok(Self { user, group, is_nobody })
    }

    /// Maps a user and a group of a new user namespace to this identity.
    pub(crate) fn write_maps(self, inner: Pid, (user, group): (u32, u32)) -> io::Result<()> {
        let path = |file: &str| format!("/proc/{inner}/{file}", inner = inner.as_raw_nonzero());
        if !self.is_nobody {
            std::fs::write(path("setgroups"), "deny")?;
        }
        std::fs::write(path("uid_map"), format!("{user} {} 1\n", self.user))?;
        std::fs::write(path("gid_map"), format!("{group} {} 1\n", self.group))
    }
}

/// Maps [`ID`] of a new user namespace to this process's user, or to `nobody`.
pub(crate) fn map_inner(inner: Pid) -> io::Result<()> {
    OutsideIdentity::choose_identity()?.write_maps(inner, (ID, ID))
}

/// Reads a `uid_map`, whose columns are first inside, first outside, count.
fn outside_user(map: &str, user: u32) -> Option<u64> {
    let user = u64::from(user);
    map.lines().find_map(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let [first, outside, count] = numbers[..] else { return None };
        (first..first.saturating_add(count)).contains(&user).then(|| outside + (user - first))
    })
}

/// Becomes [`ID`] permanently. Capabilities within the namespaces are kept.
pub(crate) fn become_contained() -> io::Result<()> {
    become_user(ID, ID)
}

/// Becomes a user permanently. Capabilities within the namespaces are kept.
pub(crate) fn become_user(user: u32, group: u32) -> io::Result<()> {
    // Fails in a process of an ordinary user, which then keeps its groups.
    let _ = set_thread_groups(&[]);
    let group = Gid::from_raw(group);
    set_thread_res_gid(group, group, group)?;
    let user = Uid::from_raw(user);
    set_thread_res_uid(user, user, user)?;
    // A change of the user resets both.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_namespace_knows_only_what_is_mapped() {
        assert_eq!(outside_user("         0          0 4294967295\n", NOBODY_ID), Some(65534));
        assert_eq!(outside_user("0 1000 1\n1 100000 65536\n", NOBODY_ID), Some(165_533));
        assert_eq!(outside_user("0 1000 1\n", NOBODY_ID), None);
        assert_eq!(outside_user("0 1000 1\n", 0), Some(1000));
        assert_eq!(outside_user("nonsense", 0), None);
    }
}
