//! Bounds what is open or held at a time, in all and of each member.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Counts what is open or held. Clones share the counts.
#[derive(Debug, Clone)]
pub(crate) struct MemberLimit {
    what: &'static str,
    most: usize,
    member_most: usize,
    open: Arc<Mutex<OpenCounts>>,
}

#[derive(Debug, Default)]
struct OpenCounts {
    all: usize,
    /// Only members with a count above 0; callers of an open fleet have no entry.
    by_member: BTreeMap<String, usize>,
}

/// The share of a member in a limit, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemberPermit {
    limit: MemberLimit,
    member: Option<String>,
    count: usize,
}

/// The reason why nothing more is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LimitReached {
    #[error("{most} {what} are open already; try again later (G104)")]
    InAll { what: &'static str, most: usize },
    #[error("you have {most} {what} open already; wait until one ends (G104)")]
    OfMember { what: &'static str, most: usize },
}

impl MemberLimit {
    /// Creates a limit. `what` names the counted things in errors, in the plural.
    pub(crate) fn new(what: &'static str, most: usize, member_most: usize) -> Self {
        Self { what, most, member_most, open: Arc::default() }
    }

    /// Takes a place for a member; `None` in an open fleet, which knows no members.
    pub(crate) fn take_place(&self, member: Option<String>) -> Result<MemberPermit, LimitReached> {
        let mut permit = self.take_nothing(member);
        permit.resize(1)?;
        Ok(permit)
    }

    /// Returns a permit that is resized later.
    pub(crate) fn take_nothing(&self, member: Option<String>) -> MemberPermit {
        MemberPermit { limit: self.clone(), member, count: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, OpenCounts> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemberPermit {
    /// Replaces the permit's count.
    ///
    /// # Errors
    /// The new count is too large; the old one stays.
    pub(crate) fn resize(&mut self, count: usize) -> Result<(), LimitReached> {
        let MemberLimit { what, most, member_most, .. } = self.limit;
        let mut open = self.limit.lock();
        let all = open.all.saturating_sub(self.count) + count;
        if count > self.count && all > most {
            return Err(LimitReached::InAll { what, most });
        }
        if let Some(member) = &self.member {
            let own = open.by_member.get(member).copied().unwrap_or(0);
            let own = own.saturating_sub(self.count) + count;
            if count > self.count && own > member_most {
                return Err(LimitReached::OfMember { what, most: member_most });
            }
            match own {
                0 => drop(open.by_member.remove(member)),
                _ => drop(open.by_member.insert(member.clone(), own)),
            }
        }
        open.all = all;
        drop(open);
        self.count = count;
        Ok(())
    }
}

impl Drop for MemberPermit {
    fn drop(&mut self) {
        // A smaller count is always possible.
        let _ = self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_leaves_room_for_others_and_all_together_have_a_bound() {
        let limit = MemberLimit::new("streams", 9, 4);
        let open = |member: &str| limit.take_place(Some(member.to_owned()));
        let mut eve: Vec<MemberPermit> = (0..4).map(|_| open("eve").unwrap()).collect();
        let refused = open("eve").unwrap_err().to_string();
        assert_eq!(refused, "you have 4 streams open already; wait until one ends (G104)");
        let bob = open("bob").unwrap();
        eve.pop();
        eve.push(open("eve").unwrap());
        drop(bob);
        assert_eq!(limit.lock().by_member.len(), 1, "bob is forgotten");

        let unknown: Vec<MemberPermit> = (0..5).map(|_| limit.take_place(None).unwrap()).collect();
        let full = LimitReached::InAll { what: "streams", most: 9 };
        assert_eq!(open("bob").unwrap_err(), full);
        assert_eq!(limit.take_place(None).unwrap_err(), full);
        drop((unknown, eve));
        let open = limit.lock();
        assert_eq!((open.all, open.by_member.len()), (0, 0));
    }
}
