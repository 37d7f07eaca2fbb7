//! Which author's facts count in a run, beyond what the NATS server enforces by subject.
//!
//! The server lets a watcher write specs and checkpoints of watched runs, in any run, because a
//! subject cannot name the author of another subject. Readers close that gap with
//! [`check_checkpoint_author`]: the coordinator, the audit, and agents before they work.

use crate::{AgentId, FactKey};

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

#[cfg(test)]
mod tests {
    use super::*;

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
