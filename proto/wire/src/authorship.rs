//! Which author's facts count in a run, beyond what the NATS server enforces by subject.
//!
//! The server lets a watcher write specs and checkpoints of watched runs, in any run, because a
//! subject cannot name the author of another subject. Readers close that gap with
//! [`check_checkpoint_author`]: the coordinator, the audit, and agents before they work.

use crate::{AgentId, FactKey, v1};

/// The coordinator's name; members cannot take it.
const COORDINATOR_NAME: &str = "coordinator";

/// The facts about a run's spec that decide who may publish its checkpoints.
#[derive(Debug, Clone, Copy)]
pub struct SpecOrigin<'a> {
    pub is_watched: bool,
    /// `None` in an open fleet.
    pub author: Option<&'a AgentId>,
}

/// Checks that a checkpoint at `place` by `author` may count in a run.
///
/// Checkpoints of a watched run count only from the agent that wrote its spec, and only at
/// [`FactKey::WatchedCheckpoint`]; every other run has none there. Other places pass.
pub fn check_checkpoint_author(
    place: &FactKey,
    author: Option<&AgentId>,
    spec: SpecOrigin<'_>,
) -> Result<(), &'static str> {
    match place {
        FactKey::WatchedCheckpoint { .. } if !spec.is_watched => {
            Err("a watcher's checkpoint in a run that is not watched")
        }
        FactKey::WatchedCheckpoint { .. } if spec.author.is_some() && author != spec.author => {
            Err("a checkpoint by another agent than the author of the watched run's spec")
        }
        FactKey::Checkpoint { .. } if spec.is_watched => {
            Err("a trainer's checkpoint in a watched run")
        }
        _ => Ok(()),
    }
}

/// Returns the user who paused, resumed or cancelled a run, if known.
///
/// The gateway writes as the coordinator, and names the caller in the fact. Other authors act for
/// themselves, whatever their fact names.
pub fn control_user(control: &v1::Control, author: Option<&AgentId>) -> Option<AgentId> {
    let named = || AgentId::new(control.user.as_str()).ok();
    match author {
        None => named(),
        Some(author) if author.as_str() == COORDINATOR_NAME => {
            named().or_else(|| Some(author.clone()))
        }
        Some(author) => Some(author.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_coordinator_can_name_the_user_of_a_control() {
        let control = |user: &str| v1::Control { user: user.into(), ..v1::Control::default() };
        for (author, named, user) in [
            (Some("coordinator"), "ann", Some("ann")),
            (Some("coordinator"), "", Some("coordinator")),
            (Some("coordinator"), "no name", Some("coordinator")),
            (Some("bob"), "ann", Some("bob")),
            (None, "ann", Some("ann")),
            (None, "", None),
        ] {
            let author = author.map(|name| AgentId::new(name).unwrap());
            let found = control_user(&control(named), author.as_ref());
            assert_eq!(found.as_ref().map(AgentId::as_str), user, "{author:?} names {named:?}");
        }
    }

    #[test]
    fn only_the_author_of_a_watched_spec_adds_checkpoints() {
        let [mine, other] = ["w1", "w2"].map(|name| AgentId::new(name).unwrap());
        let watched = FactKey::WatchedCheckpoint { step: 4 };
        let trained = FactKey::Checkpoint { cycle: 0, step: 4 };
        let run = |is_watched, author| SpecOrigin { is_watched, author };
        for (place, author, spec, counts) in [
            (&watched, Some(&mine), run(true, Some(&mine)), true),
            (&watched, Some(&other), run(true, Some(&mine)), false),
            (&watched, None, run(true, Some(&mine)), false),
            (&watched, None, run(true, None), true),
            (&watched, Some(&mine), run(false, Some(&mine)), false),
            (&trained, Some(&mine), run(true, Some(&mine)), false),
            (&trained, Some(&other), run(false, Some(&mine)), true),
        ] {
            let checked = check_checkpoint_author(place, author, spec);
            assert_eq!(checked.is_ok(), counts, "{place:?} by {author:?} in {spec:?}");
        }
    }
}
