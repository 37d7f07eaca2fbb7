//! What each member may say and hear on the bus. NATS checks subjects, so everything that must
//! not be said by others has its sayer's name in its subject.
//!
//! The subjects are those of `bus`, whose tests try every one of these with real clients.

use wire::{AgentId, Pool, WorkKind};

use crate::{Member, Role, Scope, Standing};

/// Reads of the log and of the fleet's bucket that one member can have open at a time, in all its
/// processes. Each is a consumer, which must have a name the member may use.
pub const READ_SLOTS: u32 = 8;

const LOG: &str = "FLOTILLA";
const BUCKET: &str = "KV_FLOTILLA_FLEET";

/// Subjects of one member; everything else is refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Permissions {
    pub publish: Vec<String>,
    pub subscribe: Vec<String>,
    /// Whether it may answer what it is asked.
    pub answer: bool,
}

/// What the consumer of one of a member's reads is called.
pub fn reader_name(member: &AgentId, slot: u32) -> String {
    format!("read-{member}-{slot}")
}

impl Permissions {
    pub fn of(member: &Member) -> Self {
        let name = &member.name;
        match &member.standing {
            // The account is the fleet: these two run it.
            Standing::Coordinator | Standing::User { scope: Scope::Admin } => Self {
                publish: vec![">".to_owned()],
                subscribe: vec![">".to_owned()],
                answer: false,
            },
            Standing::User { scope } => Self::user(name, *scope),
            Standing::Agent { roles, pool } => {
                let mut all = Self::reader(name);
                all.agent(name);
                for role in roles {
                    all.role(*role, name, pool);
                }
                all
            }
        }
    }

    /// Reads everything, hears its own answers.
    fn reader(name: &AgentId) -> Self {
        let mut publish = vec!["$JS.API.INFO".to_owned()];
        for stream in [LOG, BUCKET] {
            publish.push(format!("$JS.API.STREAM.INFO.{stream}"));
            publish.push(format!("$JS.API.STREAM.MSG.GET.{stream}"));
            for slot in 0..READ_SLOTS {
                let reader = reader_name(name, slot);
                // CREATE and DELETE, but not the names of others.
                publish.push(format!("$JS.API.CONSUMER.*.{stream}.{reader}"));
                publish.push(format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{reader}"));
            }
        }
        Self { publish, subscribe: vec![format!("_INBOX_{name}.>")], answer: false }
    }

    fn user(name: &AgentId, scope: Scope) -> Self {
        let mut all = Self::reader(name);
        all.subscribe.push("flotilla.>".to_owned());
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
            format!("$KV.FLOTILLA_FLEET.agent.{name}"),
        ]);
        self.subscribe.push(format!("flotilla.agent.command.{name}"));
        self.answer = true;
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
        let filter = kind.filter(pool);
        self.publish.extend([
            format!("$JS.API.CONSUMER.CREATE.{LOG}.{queue}.{filter}"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{LOG}.{queue}"),
            format!("$JS.ACK.{LOG}.{queue}.>"),
            // As newer servers name deliveries: with domain and account.
            format!("$JS.ACK.*.*.{LOG}.{queue}.>"),
        ]);
    }
}
