//! Bounds the requests to models that are open and the memory of their answers.

use crate::member_limit::{LimitReached, MemberLimit, MemberPermit};

/// Requests that are answered or wait, in all.
const REQUESTS_MAX: usize = 1024;
/// Those of one member of a closed fleet.
const MEMBER_REQUESTS_MAX: usize = 256;
/// Memory of all answers that are held whole until their clients have taken them.
pub(super) const ANSWERS_MIB_MAX: usize = 1024;
/// That of one member of a closed fleet.
const MEMBER_ANSWERS_MIB_MAX: usize = 256;

/// Counts open requests, and the memory of whole answers. Clones share the counts.
#[derive(Debug, Clone)]
pub(super) struct RequestLimit {
    requests: MemberLimit,
    answers: MemberLimit,
}

/// The place of an open request, and the memory of its answer.
#[derive(Debug)]
pub(super) struct RequestPermit {
    _place: MemberPermit,
    answer: MemberPermit,
}

impl Default for RequestLimit {
    fn default() -> Self {
        let (all, each) = (ANSWERS_MIB_MAX, MEMBER_ANSWERS_MIB_MAX);
        Self {
            requests: MemberLimit::new("requests", REQUESTS_MAX, MEMBER_REQUESTS_MAX),
            answers: MemberLimit::new("MiB of answers", all, each),
        }
    }
}

impl RequestLimit {
    /// Opens a request of a member; `None` in an open fleet, which knows no members.
    pub(super) fn open_request(
        &self,
        member: Option<String>,
    ) -> Result<RequestPermit, LimitReached> {
        let place = self.requests.take_place(member.clone())?;
        Ok(RequestPermit { _place: place, answer: self.answers.take_nothing(member) })
    }
}

impl RequestPermit {
    /// Counts the begun MiB of the answer that is held, in place of those counted before.
    ///
    /// # Errors
    /// Answers take too much memory; the count stays.
    pub(super) fn hold_bytes(&mut self, bytes: usize) -> Result<(), LimitReached> {
        self.answer.resize(bytes.div_ceil(1 << 20))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answers_of_one_member_and_of_all_together_have_a_bound() {
        const MEMBER_BYTES_MAX: usize = MEMBER_ANSWERS_MIB_MAX << 20;
        const BYTES_MAX: usize = ANSWERS_MIB_MAX << 20;
        let limit = RequestLimit::default();
        let open = |member: &str| limit.open_request(Some(member.to_owned())).unwrap();
        let (mut large, mut small) = (open("eve"), open("eve"));
        large.hold_bytes(1).unwrap();
        large.hold_bytes(MEMBER_BYTES_MAX).unwrap();
        let refused = small.hold_bytes(1).unwrap_err().to_string();
        assert_eq!(refused, "you have 256 MiB of answers open already; wait until one ends (G104)");
        // Another agent is asked, and its answer is shorter.
        large.hold_bytes(MEMBER_BYTES_MAX - (1 << 20)).unwrap();
        small.hold_bytes(1).unwrap();
        let mut unknown = limit.open_request(None).unwrap();
        let rest = BYTES_MAX - MEMBER_BYTES_MAX;
        unknown.hold_bytes(rest).unwrap();
        assert!(unknown.hold_bytes(rest + 1).is_err());
        assert!(open("bob").hold_bytes(1).is_err());
        drop(large);
        open("bob").hold_bytes(1).unwrap();
    }
}
