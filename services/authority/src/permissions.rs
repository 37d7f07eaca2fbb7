//! What each member may say and hear on the bus. NATS checks subjects, so everything that must
//! not be said by others has its sayer's name in its subject.
//!
//! The same subjects are all that a member's account imports of the fleet's: what it is denied is
//! told by its own permissions, and what it could do around them ends in an account where nobody
//! else is.
//!
//! The subjects are those of `bus`, whose tests try every one of these with real clients.

use std::collections::BTreeSet;

use wire::{AgentId, Pool, WorkKind};

use crate::{Member, Role, Scope, Standing};

const LOG: &str = "FLOTILLA";
const FLEET: &str = "FLOTILLA_FLEET";

/// How the subjects begin at which a member hears its answers.
const INBOX: &str = "_INBOX_";

/// Subjects of one member; everything else is refused. No subject lies within another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Permissions {
    pub publish: Vec<String>,
    pub subscribe: Vec<String>,
}

impl Permissions {
    pub fn of(member: &Member) -> Self {
        let name = &member.name;
        let mut all = match &member.standing {
            standing if standing.runs_the_fleet() => {
                let everything = || vec![">".to_owned()];
                return Self { publish: everything(), subscribe: everything() };
            }
            Standing::User { scope } => Self::user(name, *scope),
            Standing::Agent { roles, pool } => {
                let mut all = Self::reader(name);
                all.agent(name);
                for role in roles {
                    all.role(*role, name, pool);
                }
                all
            }
            Standing::Coordinator => Self::default(),
        };
        all.publish = widest(all.publish);
        all
    }

    /// Of a leaf node, which carries what members of its site say, whoever they are, and nothing
    /// that only the coordinator and admins say to the bus itself.
    pub(crate) fn carrier() -> Self {
        let mut publish = vec!["flotilla.>".to_owned(), format!("$KV.{FLEET}.agent.*")];
        publish.extend(reads());
        publish.extend([
            format!("$JS.API.CONSUMER.INFO.{LOG}.*"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{LOG}.*"),
            format!("$JS.ACK.{LOG}.>"),
            format!("$JS.ACK.*.*.{LOG}.>"),
        ]);
        Self { publish, subscribe: vec![">".to_owned()] }
    }

    /// What it hears that others say.
    pub(crate) fn heard_of_fleet(&self) -> impl Iterator<Item = &String> {
        self.subscribe.iter().filter(|subject| !subject.starts_with(INBOX))
    }

    /// Reads everything, hears everything, and its own answers. It makes no consumers: one could be
    /// told to deliver to any subject of the fleet.
    fn reader(name: &AgentId) -> Self {
        let subscribe = vec![format!("{INBOX}{name}.>"), "flotilla.>".to_owned()];
        Self { publish: reads().collect(), subscribe }
    }

    fn user(name: &AgentId, scope: Scope) -> Self {
        let mut all = Self::reader(name);
        if scope >= Scope::Operator {
            all.publish.extend([
                format!("flotilla.*.spec.{name}"),
                format!("flotilla.*.control.*.{name}"),
                "flotilla.agent.command.*".to_owned(),
            ]);
        }
        all
    }

    /// Says that it is there, and obeys.
    fn agent(&mut self, name: &AgentId) {
        self.publish.extend([
            format!("flotilla.agent.status.{name}"),
            format!("flotilla.agent.answer.{name}"),
            format!("$KV.{FLEET}.agent.{name}"),
        ]);
    }

    fn role(&mut self, role: Role, name: &AgentId, pool: &Pool) {
        let results: &[&str] = match role {
            Role::Trainer => &["checkpoint.*.*", "failure.train.*.*"],
            Role::Generator => &["samples.*.*", "failure.generate.*.*"],
            Role::Verifier => &["verdicts.*.*", "failure.verify.*.*"],
            Role::Evaluator => &["eval.*.*.*", "failure.eval.*.*"],
            // Runs of its own, which have cycle 0 alone.
            Role::Watcher => &["spec", "checkpoint.0.*"],
        };
        self.publish.extend(results.iter().map(|result| format!("flotilla.*.{result}.{name}")));
        if let Some(kind) = role.work() {
            self.work(kind, pool);
        }
    }

    /// Takes work of a kind from the queue it shares with its like.
    fn work(&mut self, kind: WorkKind, pool: &Pool) {
        let queue = kind.queue(pool);
        self.publish.extend([
            format!("$JS.API.CONSUMER.INFO.{LOG}.{queue}"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{LOG}.{queue}"),
            format!("$JS.ACK.{LOG}.{queue}.*.*.*.*.*"),
            // As newer servers name deliveries: with domain and account, and so many tokens that no
            // other queue's can be meant.
            format!("$JS.ACK.*.*.{LOG}.{queue}.*.*.*.*.>"),
        ]);
    }
}

/// How a stream is read without a consumer.
fn reads() -> impl Iterator<Item = String> {
    let bucket = format!("KV_{FLEET}");
    let of = |stream: &str| {
        let verbs = ["STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET"];
        verbs.map(|verb| format!("$JS.API.{verb}.{stream}"))
    };
    let all = [of(LOG), of(&bucket)].into_iter().flatten();
    all.chain(["$JS.API.INFO".to_owned()])
}

/// Without those that others contain: a server refuses an account that imports a subject twice.
fn widest(subjects: Vec<String>) -> Vec<String> {
    let unique: BTreeSet<String> = subjects.into_iter().collect();
    let within = |one: &String| unique.iter().any(|other| one != other && contains(other, one));
    unique.iter().filter(|one| !within(one)).cloned().collect()
}

/// Whether every subject that matches `narrow` matches `wide`.
fn contains(wide: &str, narrow: &str) -> bool {
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
    use crate::Role;

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
            assert_eq!(contains(wide, narrow), expected, "{wide} contains {narrow}");
        }
    }

    #[test]
    fn roles_that_overlap_give_each_subject_once() {
        let roles = [Role::Trainer, Role::Watcher].into();
        let standing = Standing::Agent { roles, pool: "default".parse().unwrap() };
        let member = Member { name: "me".parse().unwrap(), standing };
        let Permissions { publish, .. } = Permissions::of(&member);
        let checkpoints: Vec<_> = publish.iter().filter(|s| s.contains("checkpoint")).collect();
        assert_eq!(checkpoints, ["flotilla.*.checkpoint.*.*.me"]);
    }
}
