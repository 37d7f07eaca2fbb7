//! Bounds the requests to models that are open, in all and of each member.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Requests that are answered or wait, in all.
pub(super) const REQUESTS_MAX: usize = 1024;
/// Those of one member of a closed fleet.
pub(super) const MEMBER_REQUESTS_MAX: usize = 256;

/// Counts open requests. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestLimit(Arc<Mutex<OpenRequests>>);

#[derive(Debug, Default)]
struct OpenRequests {
    all: usize,
    /// Without those of nobody; has members with open requests alone.
    by_member: BTreeMap<String, usize>,
}

/// The place of an open request, until it is dropped.
#[derive(Debug)]
pub(super) struct RequestPermit {
    limit: RequestLimit,
    member: Option<String>,
}

/// The reason why a request is not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestsOpen {
    #[error("{REQUESTS_MAX} requests are open already; try again later (G104)")]
    InAll,
    #[error("you have {MEMBER_REQUESTS_MAX} open requests already; wait for their answers (G104)")]
    OfMember,
}

impl RequestLimit {
    /// Opens a request of a member; `None` in an open fleet, which knows no members.
    pub(super) fn open_request(
        &self,
        member: Option<String>,
    ) -> Result<RequestPermit, RequestsOpen> {
        let mut open = self.lock();
        if open.all >= REQUESTS_MAX {
            return Err(RequestsOpen::InAll);
        }
        if let Some(member) = &member {
            let own = open.by_member.get(member).copied().unwrap_or(0);
            if own >= MEMBER_REQUESTS_MAX {
                return Err(RequestsOpen::OfMember);
            }
            open.by_member.insert(member.clone(), own + 1);
        }
        open.all += 1;
        drop(open);
        Ok(RequestPermit { limit: self.clone(), member })
    }

    fn lock(&self) -> MutexGuard<'_, OpenRequests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        let mut open = self.limit.lock();
        open.all = open.all.saturating_sub(1);
        let Some(member) = &self.member else { return };
        match open.by_member.get_mut(member) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(open.by_member.remove(member)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_leaves_room_for_others_and_all_together_have_a_bound() {
        let limit = RequestLimit::default();
        let open = |member: &str| limit.open_request(Some(member.to_owned()));
        let mut eve: Vec<RequestPermit> =
            (0..MEMBER_REQUESTS_MAX).map(|_| open("eve").unwrap()).collect();
        assert_eq!(open("eve").unwrap_err(), RequestsOpen::OfMember);
        let bob = open("bob").unwrap();
        eve.pop();
        eve.push(open("eve").unwrap());
        drop(bob);
        assert_eq!(limit.lock().by_member.len(), 1, "bob is forgotten");

        let rest = REQUESTS_MAX - MEMBER_REQUESTS_MAX;
        let unknown: Vec<RequestPermit> =
            (0..rest).map(|_| limit.open_request(None).unwrap()).collect();
        assert_eq!(open("bob").unwrap_err(), RequestsOpen::InAll);
        assert_eq!(limit.open_request(None).unwrap_err(), RequestsOpen::InAll);
        drop((unknown, eve));
        let open = limit.lock();
        assert_eq!((open.all, open.by_member.len()), (0, 0));
    }
}
