//! The subjects that each member may publish and receive on the bus.
//!
//! NATS checks subjects. Every message that only one member may publish therefore has that member's
//! name in its subject.
//!
//! A member's account imports the same subjects and no others. The user's permissions report what
//! is denied; a message that circumvented them would stay in an account without other members.
//!
//! The subjects are those of the crate `bus`, whose tests try each of them with real clients.

use std::collections::BTreeSet;

use wire::{AgentId, Pool, WorkKind};

use crate::{Member, MemberKind, MemberRole, UserScope};

const LOG: &str = "FLOTILLA";
const FLEET: &str = "FLOTILLA_FLEET";
/// Kept requests to served models, and feedback.
const EXCHANGES: &str = "FLOTILLA_EXCHANGES";
/// Requests to served models, and their answers.
const SERVING: &str = "flotilla-serving";

/// Inboxes are private to the member's account. `_INBOX_NAME` is that of Flotilla's own programs.
const INBOX: &str = "_INBOX";

/// The subjects of one member; all others are denied. No subject contains another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubjectPermissions {
    pub publish: Vec<String>,
    pub subscribe: Vec<String>,
}

impl SubjectPermissions {
    /// Returns the permissions of a member.
    pub(crate) fn for_member(member: &Member) -> Self {
        let name = &member.name;
        let mut all = match &member.standing {
            standing if standing.uses_fleet_account() => {
                let everything = || vec![">".to_owned()];
                return Self { publish: everything(), subscribe: everything() };
            }
            MemberKind::User { scope } => Self::for_user(name, *scope),
            MemberKind::Agent { roles, pool } => {
                let mut all = Self::for_reader(name);
                all.allow_agent(name);
                for role in roles {
                    all.allow_role(*role, name, pool);
                }
                all
            }
            MemberKind::Coordinator => Self::default(),
        };
        all.publish = remove_covered(all.publish);
        all
    }

    /// Returns the permissions of a leaf node: all messages of its site's members, except those
    /// that only the coordinator and admins send to the bus itself.
    pub(crate) fn for_leaf_node() -> Self {
        let mut publish = vec![
            "flotilla.>".to_owned(),
            format!("$KV.{FLEET}.agent.*"),
            format!("{SERVING}.answer.>"),
        ];
        publish.extend(read_subjects());
        publish.extend([
            format!("$JS.API.CONSUMER.INFO.{LOG}.*"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{LOG}.*"),
            format!("$JS.ACK.{LOG}.>"),
            format!("$JS.ACK.*.*.{LOG}.>"),
        ]);
        Self { publish, subscribe: vec![">".to_owned()] }
    }

    pub(crate) fn fleet_subscriptions(&self) -> impl Iterator<Item = &String> {
        self.subscribe.iter().filter(|subject| !subject.starts_with(INBOX))
    }

    /// Allows reading everything. Consumers are excluded, because a consumer could be set to
    /// deliver to any subject of the fleet.
    fn for_reader(name: &AgentId) -> Self {
        let subscribe = vec![format!("{INBOX}_{name}.>"), "flotilla.>".to_owned()];
        Self { publish: read_subjects().collect(), subscribe }
    }

    fn for_user(name: &AgentId, scope: UserScope) -> Self {
        if scope < UserScope::Reader {
            // Models are asked through the gateway. NATS takes an empty list as everything.
            let subscribe = vec![format!("{INBOX}_{name}.>")];
            return Self { publish: vec!["$JS.API.INFO".to_owned()], subscribe };
        }
        let mut all = Self::for_reader(name);
        // Where other NATS clients expect their answers.
        all.subscribe.push(format!("{INBOX}.>"));
        if scope >= UserScope::Operator {
            all.publish.extend([
                format!("flotilla.*.spec.{name}"),
                format!("flotilla.*.control.*.{name}"),
                format!("flotilla.*.channel.*.{name}"),
                "flotilla.agent.command.*".to_owned(),
            ]);
            all.publish.extend(stream_read_subjects(EXCHANGES));
        }
        all
    }

    fn allow_agent(&mut self, name: &AgentId) {
        self.publish.extend([
            format!("flotilla.agent.status.{name}"),
            format!("flotilla.agent.answer.{name}"),
            format!("$KV.{FLEET}.agent.{name}"),
        ]);
    }

    fn allow_role(&mut self, role: MemberRole, name: &AgentId, pool: &Pool) {
        let results: &[&str] = match role {
            MemberRole::Trainer => {
                &["checkpoint.*.*", "delta.*.*.*", "merge.*.*", "failure.train.*.*"]
            }
            MemberRole::Generator => &["samples.*.*", "failure.generate.*.*"],
            MemberRole::Verifier => &["verdicts.*.*", "failure.verify.*.*"],
            MemberRole::Scorer => &["scores.*.*", "failure.score.*.*"],
            MemberRole::Evaluator => &["eval.*.*.*", "failure.eval.*.*"],
            // Subjects that only watched runs have: `wire` refuses any other spec there, and the
            // log counts checkpoints of a watched run only from the author of its spec.
            MemberRole::Watcher => &["watched", "checkpoint.watched.*"],
            MemberRole::Server => &[],
        };
        self.publish.extend(results.iter().map(|result| format!("flotilla.*.{result}.{name}")));
        if role == MemberRole::Generator {
            // An agent declines orders for itself only.
            self.publish.push(format!("flotilla.*.declined.*.*.*.{name}.{name}"));
        }
        if role == MemberRole::Server {
            // Outside of `flotilla.>`, which all members hear: requests contain what users write.
            self.publish.push(format!("{SERVING}.answer.{name}.>"));
            self.subscribe.push(format!("{SERVING}.request.{name}"));
        }
        if let Some(kind) = role.work_kind() {
            self.allow_work_queue(kind, pool);
        }
    }

    fn allow_work_queue(&mut self, kind: WorkKind, pool: &Pool) {
        let queue = kind.queue_name(pool);
        self.publish.extend([
            format!("$JS.API.CONSUMER.INFO.{LOG}.{queue}"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{LOG}.{queue}"),
            format!("$JS.ACK.{LOG}.{queue}.*.*.*.*.*"),
            // Newer servers add domain and account to the acknowledgement subject. The number of
            // tokens ensures that the subject matches no other queue.
            format!("$JS.ACK.*.*.{LOG}.{queue}.*.*.*.*.>"),
        ]);
    }
}

/// Returns the subjects for reading without a consumer.
fn read_subjects() -> impl Iterator<Item = String> {
    let all = [LOG, &format!("KV_{FLEET}")].map(stream_read_subjects).into_iter().flatten();
    all.chain(["$JS.API.INFO".to_owned()])
}

fn stream_read_subjects(stream: &str) -> [String; 3] {
    let verbs = ["STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET"];
    verbs.map(|verb| format!("$JS.API.{verb}.{stream}"))
}

/// Removes subjects that others contain; a server refuses an account that imports one twice.
fn remove_covered(subjects: Vec<String>) -> Vec<String> {
    let unique: BTreeSet<String> = subjects.into_iter().collect();
    let within =
        |one: &String| unique.iter().any(|other| one != other && covers_subject(other, one));
    unique.iter().filter(|one| !within(one)).cloned().collect()
}

/// Returns true if every subject that matches `narrow` also matches `wide`.
fn covers_subject(wide: &str, narrow: &str) -> bool {
    let (mut wide, mut narrow) = (wide.split('.'), narrow.split('.'));
    loop {
        match (wide.next(), narrow.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some("*"), Some(token)) if token != ">" => {}
            (Some(one), Some(other)) if one == other => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemberRole;

    #[test]
    fn a_subject_contains_what_is_narrower() {
        for (wide, narrow, expected) in [
            ("a.*.c", "a.b.c", true),
            ("a.>", "a.b.c", true),
            ("a.>", "a", false),
            ("a.*", "a.>", false),
            ("a.b", "a.b.c", false),
            ("a.*.c", "a.*.c", true),
            ("a.b.c", "a.*.c", false),
            ("a.>", "a.>", true),
        ] {
            assert_eq!(covers_subject(wide, narrow), expected, "{wide} contains {narrow}");
        }
    }

    #[test]
    fn roles_that_overlap_give_each_subject_once() {
        let roles = [MemberRole::Trainer, MemberRole::Watcher].into();
        let standing = MemberKind::Agent { roles, pool: "default".parse().unwrap() };
        let member = Member { name: "me".parse().unwrap(), standing };
        let SubjectPermissions { publish, .. } = SubjectPermissions::for_member(&member);
        let checkpoints: Vec<_> = publish.iter().filter(|s| s.contains("checkpoint")).collect();
        assert_eq!(checkpoints, ["flotilla.*.checkpoint.*.*.me"]);
    }
}
