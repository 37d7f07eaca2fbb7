//! Who programs are: a user that owns nothing, outside as well where the agent is root.

use std::io;

use rustix::{
    process::{
        DumpableBehavior, Gid, Pid, Signal, Uid, getegid, geteuid, set_dumpable_behavior,
        set_parent_process_death_signal,
    },
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

/// Inside.
pub(crate) const ID: u32 = 1000;

/// Outside, when the agent is root: nobody.
const NOBODY: u32 = 65534;

/// Maps [`ID`] to this process's user, or to nobody, for a process in a new user namespace.
pub(crate) fn map(inner: Pid) -> io::Result<()> {
    let path = |file: &str| format!("/proc/{inner}/{file}", inner = inner.as_raw_nonzero());
    let (mine, group) = (geteuid().as_raw(), getegid().as_raw());
    let known = std::fs::read_to_string("/proc/self/uid_map")?;
    let nobody = mine == 0 && outside(&known, NOBODY).is_some();
    if mine == 0 && !nobody && outside(&known, mine) == Some(0) {
        return Err(io::Error::other("this is root, and there is no user to become"));
    }
    let (user, group) = if nobody { (NOBODY, NOBODY) } else { (mine, group) };
    if !nobody {
        std::fs::write(path("setgroups"), "deny")?;
    }
    std::fs::write(path("uid_map"), format!("{ID} {user} 1\n"))?;
    std::fs::write(path("gid_map"), format!("{ID} {group} 1\n"))
}

/// Who a user is outside, by a `uid_map`: lines of first inside, first outside and how many.
fn outside(map: &str, user: u32) -> Option<u64> {
    let user = u64::from(user);
    map.lines().find_map(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let [first, outside, count] = numbers[..] else { return None };
        (first..first.saturating_add(count)).contains(&user).then(|| outside + (user - first))
    })
}

/// Becomes [`ID`] for good. Capabilities within the namespaces stay.
pub(crate) fn take() -> io::Result<()> {
    // A user's own process may not; then its groups, which give it nothing here, stay.
    let _ = set_thread_groups(&[]);
    let group = Gid::from_raw(ID);
    set_thread_res_gid(group, group, group)?;
    let user = Uid::from_raw(ID);
    set_thread_res_uid(user, user, user)?;
    // Both are undone by a change of user.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_namespace_knows_only_what_is_mapped() {
        assert_eq!(outside("         0          0 4294967295\n", NOBODY), Some(65534));
        assert_eq!(outside("0 1000 1\n1 100000 65536\n", NOBODY), Some(165_533));
        assert_eq!(outside("0 1000 1\n", NOBODY), None);
        assert_eq!(outside("0 1000 1\n", 0), Some(1000));
        assert_eq!(outside("nonsense", 0), None);
    }
}
