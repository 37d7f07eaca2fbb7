//! A closed fleet's bus: the rights of each member, tested with real clients one by one.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bus::{
    Bus, ConnectError, ConnectOptions, LogEvent, PublishError, PublishOutcome, ReadError,
    server::{self, ManagedServer, ServerOptions},
    system_account::{PushScope, SystemAccountUser, push_accounts},
};
use futures::StreamExt;
use identity::{
    CredentialFiles, FleetAuthority, Member, MemberAccess, MemberIdentity, MemberKind, MemberRole,
    UserScope,
};
use tempfile::TempDir;
use wire::{AgentId, Fact, FactBody, FactKey, Pool, RunId, STREAM_SUBJECTS, Subject, WorkKind, v1};

use crate::rig::{control, order, until};

const LEASE: Duration = Duration::from_secs(5);

struct Closed {
    authority: FleetAuthority,
    server: ManagedServer,
    /// The fleet's operator.
    coordinator: Bus,
    directory: TempDir,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

impl Closed {
    async fn start() -> Self {
        let directory = TempDir::new().unwrap();
        let keys = directory.path().join("keys");
        let (authority, _) = FleetAuthority::create_or_open(&keys, "test", &[], now()).unwrap();
        let nats = directory.path().join("nats");
        let mut options = ServerOptions::new(&nats);
        let config = authority.nats_config(&nats.join("accounts"), now()).unwrap();
        options.closed_fleet =
            Some(server::ClosedFleetConfig { config, account: authority.account_public_key() });
        let server = ManagedServer::start(&options).await.unwrap();
        let member = member("coordinator", MemberKind::Coordinator);
        let identity = create_credentials(&authority, directory.path(), &member, None);
        let coordinator = Bus::connect(&reach(&server, identity)).await.unwrap();
        coordinator.prepare_log(1).await.unwrap();
        coordinator.prepare_members(1).await.unwrap();
        let pool = Pool::new("default").unwrap();
        for kind in WorkKind::ALL {
            coordinator.prepare_work_queue(kind, &pool, LEASE).await.unwrap();
        }
        Self { authority, server, coordinator, directory }
    }

    /// Admits a member as a coordinator does.
    async fn admit(&self, member: &Member, expires_at: Option<u64>) -> MemberIdentity {
        let identity =
            create_credentials(&self.authority, self.directory.path(), member, expires_at);
        self.tell(member, &identity, MemberAccess::Granted { at: now() }).await;
        identity
    }

    async fn tell(&self, member: &Member, identity: &MemberIdentity, access: MemberAccess) {
        let key = identity.ensure_public_key().unwrap();
        let account = self.authority.member_account_jwt(member, &key, access).unwrap();
        let (seed, jwt) = self.authority.create_system_user(now()).unwrap();
        let tls = identity::fleet_client_config(self.authority.ca_pem().as_bytes()).unwrap();
        let (urls, user) = ([self.server.client_url()], SystemAccountUser { seed, jwt });
        push_accounts(&urls, tls, &user, &[account], PushScope::AllServers).await.unwrap();
    }

    async fn bus(&self, member: &Member) -> Bus {
        let identity = self.admit(member, None).await;
        Bus::connect(&reach(&self.server, identity)).await.unwrap()
    }

    async fn agent(&self, name: &str, roles: &[MemberRole]) -> Bus {
        self.bus(&agent(name, roles)).await
    }
}

fn reach(server: &ManagedServer, identity: MemberIdentity) -> ConnectOptions {
    ConnectOptions {
        urls: vec![server.client_url()],
        identity: Some(identity),
        ..Default::default()
    }
}

fn member(name: &str, standing: MemberKind) -> Member {
    Member { name: AgentId::new(name).unwrap(), standing }
}

fn agent(name: &str, roles: &[MemberRole]) -> Member {
    let pool = Pool::new("default").unwrap();
    member(name, MemberKind::Agent { roles: roles.iter().copied().collect(), pool })
}

fn create_credentials(
    authority: &FleetAuthority,
    at: &Path,
    member: &Member,
    expires_at: Option<u64>,
) -> MemberIdentity {
    let identity = MemberIdentity::with_default_files(member.name.as_str())
        .resolve_in(&at.join("credentials").join(member.name.as_str()));
    let key = identity.ensure_public_key().unwrap();
    let admitted = authority.issue_tokens(member, &key, now(), expires_at).unwrap();
    identity
        .write_files(&CredentialFiles { jwt: &admitted.jwt, bearer: "", ca: authority.ca_pem() })
        .unwrap();
    identity
}

fn samples(job: &str, agent: &str) -> Fact {
    let body = v1::Samples { job: job.into(), agent: agent.into(), ..Default::default() };
    Fact {
        subject: format!("flotilla.r1.samples.1.{job}").parse().unwrap(),
        body: FactBody::Samples(body),
    }
}

/// A client without the checks of `Bus`, which records what it is denied.
struct Rogue {
    client: async_nats::Client,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Rogue {
    async fn of(closed: &Closed, member: &Member) -> Self {
        let identity = closed.admit(member, None).await;
        let tls = identity::fleet_client_config(closed.authority.ca_pem().as_bytes()).unwrap();
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let hearing = heard.clone();
        let signing = identity.clone();
        let prove = move |nonce: Vec<u8>| {
            let mut auth = async_nats::Auth::new();
            auth.jwt = signing.read_jwt().ok();
            auth.signature = signing.sign_bytes(&nonce).ok();
            std::future::ready(Ok(auth))
        };
        let client = async_nats::ConnectOptions::with_auth_callback(prove)
            .custom_inbox_prefix(format!("_INBOX_{}", identity.name))
            .tls_client_config(tls)
            .require_tls(true)
            .event_callback(move |event| {
                if let async_nats::Event::ServerError(error) = event {
                    hearing.lock().unwrap().push(error.to_string());
                }
                std::future::ready(())
            })
            .connect(closed.server.client_url())
            .await
            .unwrap();
        Self { client, heard }
    }

    /// Returns true if the server reports a denial before an answer that arrives in any case.
    async fn denied(&self, subject: &str) -> bool {
        let info = self.client.request("$JS.API.INFO", "".into()).await;
        info.expect("everybody may ask for it");
        let said = format!("\"{subject}\"");
        self.heard.lock().unwrap().iter().any(|heard| heard.contains(&said))
    }

    async fn may_say(&self, subject: &str) -> bool {
        self.client.publish(subject.to_owned(), "{}".into()).await.unwrap();
        self.client.flush().await.unwrap();
        !self.denied(subject).await
    }

    async fn may_hear(&self, subject: &str) -> bool {
        let _hearing = self.client.subscribe(subject.to_owned()).await.unwrap();
        self.client.flush().await.unwrap();
        !self.denied(subject).await
    }
}

const FACTS: [&str; 31] = [
    "flotilla.r1.spec",
    "flotilla.r1.watched",
    "flotilla.r1.control.1",
    "flotilla.stable.channel.1",
    "flotilla.r1.cycle.1.plan",
    "flotilla.r1.cycle.1.done",
    "flotilla.r1.cycle.1.archived",
    "flotilla.r1.order.generate.default.1.j1.1",
    "flotilla.r1.order.train.default.1.1",
    "flotilla.r1.samples.1.j1",
    "flotilla.r1.declined.1.j1.1.me",
    "flotilla.r1.verdicts.1.j1",
    "flotilla.r1.scores.1.j1",
    "flotilla.r1.selection.1",
    "flotilla.r1.order.train.default.1.2.merge.1",
    "flotilla.r1.slices.1.2",
    "flotilla.r1.delta.1.2.3",
    "flotilla.r1.close.1.2",
    "flotilla.r1.merge.1.2",
    "flotilla.r1.checkpoint.1.8",
    "flotilla.r1.checkpoint.0.8",
    "flotilla.r1.checkpoint.watched.8",
    "flotilla.r1.eval.1.8.held",
    "flotilla.r1.eval.1.pass-rates",
    "flotilla.r1.failure.generate.1-j1.1",
    "flotilla.r1.failure.verify.1-j1.1",
    "flotilla.r1.failure.score.1-j1.1",
    "flotilla.r1.failure.train.1.1",
    "flotilla.r1.failure.eval.1-8.1",
    "flotilla.r1.quarantine.box.1",
    "flotilla.r1.done",
];

/// Returns the roles that may write a kind of fact in their own name. A new kind does not compile
/// without its row.
fn writers(place: &FactKey) -> &'static [Who] {
    match place {
        FactKey::Spec | FactKey::Control { .. } | FactKey::Channel { .. } => &[Who::Operator],
        FactKey::WatchedSpec => &[Who::Watcher],
        FactKey::Samples { .. } | FactKey::Declined { .. } => &[Who::Generator],
        FactKey::Verdicts { .. } => &[Who::Verifier],
        FactKey::Scores { .. } => &[Who::Scorer],
        FactKey::Checkpoint { .. } | FactKey::Delta { .. } | FactKey::Merge { .. } => {
            &[Who::Trainer]
        }
        // Readers refuse a trainer's: it did not write the run's spec.
        FactKey::WatchedCheckpoint { .. } => &[Who::Trainer, Who::Watcher],
        FactKey::Eval { .. } => &[Who::Evaluator],
        FactKey::Failure { kind, .. } => match kind {
            WorkKind::Generate => &[Who::Generator],
            WorkKind::Verify => &[Who::Verifier],
            WorkKind::Score => &[Who::Scorer],
            WorkKind::Train => &[Who::Trainer],
            WorkKind::Eval => &[Who::Evaluator],
        },
        FactKey::Plan { .. }
        | FactKey::GenerateOrder { .. }
        | FactKey::Quarantine { .. }
        | FactKey::Selection { .. }
        | FactKey::TrainOrder { .. }
        | FactKey::TrainPartOrder { .. }
        | FactKey::SlicePlan { .. }
        | FactKey::SliceClose { .. }
        | FactKey::PassRates { .. }
        | FactKey::CycleDone { .. }
        | FactKey::Archived { .. }
        | FactKey::Done => &[],
    }
}

const ANNOUNCEMENTS: [&str; 2] = ["flotilla.agent.status", "flotilla.agent.answer"];

/// Subjects that only the coordinator and admins may publish to.
const NOBODYS: [&str; 19] = [
    "flotilla-serving.kept.stable.a1.answer",
    "flotilla.r1.declined.1.j1.1.other.me",
    "flotilla.r1.samples.1.j1",
    "$KV.FLOTILLA_FLEET.config",
    "$KV.FLOTILLA_FLEET.leader",
    "$KV.FLOTILLA_FLEET.agent.somebody",
    "$KV.FLOTILLA_MEMBERS.member.somebody",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.STREAM.UPDATE.FLOTILLA",
    "$JS.API.STREAM.DELETE.FLOTILLA",
    "$JS.API.STREAM.PURGE.FLOTILLA",
    "$JS.API.STREAM.MSG.DELETE.FLOTILLA",
    "$JS.API.STREAM.MSG.GET.KV_FLOTILLA_MEMBERS",
    "$JS.API.CONSUMER.CREATE.FLOTILLA.mine",
    "$JS.API.CONSUMER.CREATE.FLOTILLA.generate-default",
    "$JS.API.CONSUMER.DURABLE.CREATE.FLOTILLA.mine",
    "flotilla.agent.answer.somebody",
    "$JS.API.CONSUMER.DELETE.FLOTILLA.verify",
    "$SYS.REQ.CLAIMS.UPDATE",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Trainer,
    Generator,
    Verifier,
    Scorer,
    Evaluator,
    Watcher,
    Reader,
    Operator,
}

impl Who {
    const AGENTS: [Self; 6] = [
        Self::Trainer,
        Self::Generator,
        Self::Verifier,
        Self::Scorer,
        Self::Evaluator,
        Self::Watcher,
    ];

    fn member(self) -> Member {
        match self {
            Self::Trainer => agent("me", &[MemberRole::Trainer]),
            Self::Generator => agent("me", &[MemberRole::Generator]),
            Self::Verifier => agent("me", &[MemberRole::Verifier]),
            Self::Scorer => agent("me", &[MemberRole::Scorer]),
            Self::Evaluator => agent("me", &[MemberRole::Evaluator]),
            Self::Watcher => agent("me", &[MemberRole::Watcher]),
            Self::Reader => member("me", MemberKind::User { scope: UserScope::Reader }),
            Self::Operator => member("me", MemberKind::User { scope: UserScope::Operator }),
        }
    }
}

async fn tries(who: Who) {
    let closed = Closed::start().await;
    let rogue = Rogue::of(&closed, &who.member()).await;
    let facts = FACTS.map(|subject| (subject, writers(&subject.parse::<Subject>().unwrap().key)));
    let announcements = ANNOUNCEMENTS.map(|subject| (subject, &Who::AGENTS[..]));
    for (subject, writers) in facts.into_iter().chain(announcements) {
        let own = format!("{subject}.me");
        assert_eq!(rogue.may_say(&own).await, writers.contains(&who), "{who:?} writes {own}");
        let others = format!("{subject}.somebody");
        assert!(!rogue.may_say(&others).await, "{who:?} writes {others}");
    }
    for word in NOBODYS {
        assert!(!rogue.may_say(word).await, "{who:?} says {word}");
    }
    let commands = matches!(who, Who::Operator);
    assert_eq!(rogue.may_say("flotilla.agent.command.somebody").await, commands, "{who:?}");
    for (kind, takes) in [
        (WorkKind::Generate, Who::Generator),
        (WorkKind::Verify, Who::Verifier),
        (WorkKind::Score, Who::Scorer),
        (WorkKind::Train, Who::Trainer),
        (WorkKind::Eval, Who::Evaluator),
    ] {
        let queue = kind.queue_name(&Pool::new("default").unwrap());
        let pull = format!("$JS.API.CONSUMER.MSG.NEXT.FLOTILLA.{queue}");
        assert_eq!(rogue.may_say(&pull).await, who == takes, "{who:?} takes {kind} work");
        let ack = format!("$JS.ACK.FLOTILLA.{queue}.1.1.1.1.0");
        assert_eq!(rogue.may_say(&ack).await, who == takes, "{who:?} acknowledges {kind} work");
        let ack = format!("$JS.ACK._.hash.FLOTILLA.{queue}.1.1.1.1.0.token");
        assert_eq!(rogue.may_say(&ack).await, who == takes, "{who:?} acknowledges {kind} work");
        // The acknowledgement subject of another queue.
        let ack = format!("$JS.ACK.FLOTILLA.another.FLOTILLA.{queue}.1.1.1");
        assert!(!rogue.may_say(&ack).await, "{who:?} acknowledges another's work");
    }
    assert!(!rogue.may_hear("_INBOX_somebody.>").await, "{who:?} hears others' answers");
    assert!(!rogue.may_hear("$KV.>").await, "{who:?} hears the buckets");
    assert!(!rogue.may_hear("$JS.>").await, "{who:?} hears what is asked");
    assert!(rogue.may_hear("flotilla.*.eval.>").await, "{who:?} hears facts");
    assert!(rogue.may_hear("flotilla.agent.command.me").await, "{who:?} hears commands");
}

#[test]
fn each_subject_of_the_stream_is_tried() {
    let matches = |filter: &str, subject: &str| {
        let (filter, subject): (Vec<_>, Vec<_>) =
            (filter.split('.').collect(), subject.split('.').collect());
        let same = filter.iter().zip(&subject).all(|(one, other)| *one == "*" || one == other);
        same && (filter.len() == subject.len())
    };
    for filter in STREAM_SUBJECTS.iter().filter(|filter| !filter.ends_with('>')) {
        let tried = FACTS
            .iter()
            .any(|subject| matches(filter, subject) || matches(filter, &format!("{subject}.me")));
        assert!(tried, "no row for {filter}");
    }
}

#[tokio::test]
async fn a_trainer_says_what_a_trainer_may() {
    tries(Who::Trainer).await;
}

#[tokio::test]
async fn a_generator_says_what_a_generator_may() {
    tries(Who::Generator).await;
}

#[tokio::test]
async fn a_verifier_says_what_a_verifier_may() {
    tries(Who::Verifier).await;
}

#[tokio::test]
async fn an_evaluator_says_what_an_evaluator_may() {
    tries(Who::Evaluator).await;
}

#[tokio::test]
async fn a_watcher_says_what_a_watcher_may() {
    tries(Who::Watcher).await;
}

#[tokio::test]
async fn a_reader_says_nothing() {
    tries(Who::Reader).await;
}

#[tokio::test]
async fn an_operator_steers_in_its_own_name() {
    tries(Who::Operator).await;
}

#[tokio::test]
async fn a_denied_fact_is_told_at_once_and_names_its_subject() {
    let closed = Closed::start().await;
    let evaluator = closed.agent("e1", &[MemberRole::Evaluator]).await;
    let began = std::time::Instant::now();
    let error = evaluator.publish_fact(&order(1)).await.unwrap_err();
    let said = format!("{error:?}");
    assert!(matches!(error, PublishError::Refused { .. }), "{error}");
    assert!(said.contains("Permissions Violation"), "{said}");
    assert!(said.contains("order.generate.default.1.j1.1.e1"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(2), "as a denial, not as a time-out");
}

#[tokio::test]
async fn a_place_is_written_once_whoever_writes() {
    let closed = Closed::start().await;
    let (a, b) = (
        closed.agent("a", &[MemberRole::Generator]).await,
        closed.agent("b", &[MemberRole::Generator]).await,
    );
    for round in 0..20 {
        let job = format!("j{round}");
        let (first, second) = (samples(&job, "a"), samples(&job, "b"));
        let written = tokio::join!(a.publish_fact(&first), b.publish_fact(&second));
        let new = |published: &PublishOutcome| matches!(published, PublishOutcome::New { .. });
        let both = [written.0.unwrap(), written.1.unwrap()];
        assert_eq!(both.iter().filter(|one| new(one)).count(), 1, "{job}: {both:?}");
        assert_eq!(both[0].log_sequence(), both[1].log_sequence(), "{job}: {both:?}");
        let winner = if new(&both[0]) { "a" } else { "b" };
        let found = closed.coordinator.get_fact(&first.subject.to_string()).await.unwrap().unwrap();
        assert_eq!(found.author.unwrap().as_str(), winner);
        assert_eq!(found.fact.subject, first.subject, "the place does not name its author");
    }
    let again = a.publish_fact(&samples("j0", "a")).await.unwrap();
    assert!(matches!(again, PublishOutcome::AlreadyWritten { .. }), "{again:?}");
}

#[tokio::test]
async fn agents_find_each_other_and_nobody_can_pose_as_another() {
    let closed = Closed::start().await;
    let trainer = closed.agent("box-1", &[MemberRole::Trainer]).await;
    let generator = closed.agent("box-2", &[MemberRole::Generator]).await;
    let exchange = |key: &str| v1::Exchange {
        key: key.into(),
        addresses: vec!["[::1]:1".into()],
        ..Default::default()
    };
    let status = |agent: &str, key: &str| v1::AgentStatus {
        agent: agent.into(),
        exchange: Some(exchange(key)),
        ..Default::default()
    };
    trainer.record_status(&status("box-1", "its own")).await.unwrap();
    let found = generator.sample_recent_statuses(8, 0).await.unwrap();
    assert_eq!(found, [status("box-1", "its own")]);
    generator.record_status(&status("box-1", "another's")).await.unwrap_err();
    let named = AgentId::new("box-1").unwrap();
    let known = generator.read_recent_status(&named).await.unwrap();
    assert_eq!(known, Some(status("box-1", "its own")));
}

#[tokio::test]
async fn nobody_is_believed_in_anothers_name() {
    let closed = Closed::start().await;
    let a = closed.agent("a", &[MemberRole::Generator]).await;
    a.publish_fact(&samples("j1", "b")).await.unwrap();
    let mut facts = closed.coordinator.follow_facts(vec!["flotilla.r1.samples.1.*".into()], 0);
    match facts.next().await.unwrap().unwrap() {
        LogEvent::Unreadable { error, .. } => {
            assert!(error.to_string().contains("a wrote it, in the name of b"), "{error}");
        }
        other => panic!("it was read: {other:?}"),
    }
    let error = closed.coordinator.get_fact("flotilla.r1.samples.1.j1").await.unwrap_err();
    assert!(matches!(error, ReadError::Unreadable { .. }), "{error:?}");
}

#[tokio::test]
async fn an_agent_takes_work_and_follows_the_log_as_ever() {
    let closed = Closed::start().await;
    let generator = closed.agent("g1", &[MemberRole::Generator]).await;
    let pool = Pool::new("default").unwrap();
    let mut queue = generator.join_work_queue(WorkKind::Generate, &pool, LEASE).await.unwrap();
    closed.coordinator.publish_fact(&order(1)).await.unwrap();
    let taken = queue.next(Duration::from_secs(10)).await.unwrap().expect("an order");
    assert_eq!(taken.record.as_ref().unwrap().fact, order(1));
    generator.publish_fact(&samples("j1", "g1")).await.unwrap();
    taken.renew_lease().await.unwrap();
    taken.ack().await.unwrap();
    closed.coordinator.publish_fact(&control(1, "enough")).await.unwrap();
    let mut facts = generator.follow_facts(vec!["flotilla.*.control.*".into()], 0);
    let LogEvent::Record(record) = facts.next().await.unwrap().unwrap() else { panic!("a fact") };
    assert_eq!(record.fact, control(1, "enough"));
    assert_eq!(record.author.unwrap().as_str(), "coordinator");
}

#[tokio::test]
async fn a_member_reads_in_the_order_of_the_log_and_on_as_it_grows() {
    const FACTS: u32 = 600;
    let closed = Closed::start().await;
    for number in 0..FACTS {
        closed.coordinator.publish_fact(&control(number.into(), "go")).await.unwrap();
        if number % 3 == 0 {
            let fact = samples(&format!("j{number}"), "coordinator");
            closed.coordinator.publish_fact(&fact).await.unwrap();
        }
    }
    let reader = closed.bus(&member("ann", MemberKind::User { scope: UserScope::Reader })).await;
    let filters = || vec!["flotilla.*.control.*".to_owned(), "flotilla.*.samples.*.*".to_owned()];
    let expected = sequences(&closed.coordinator, filters()).await;
    assert_eq!(expected.len(), FACTS as usize + 200);
    assert_eq!(sequences(&reader, filters()).await, expected);
    assert_eq!(sequences(&reader, Vec::new()).await, expected);
    assert_eq!(sequences(&reader, vec!["flotilla.*.done".to_owned()]).await, [0_u64; 0]);
    let mut all: Vec<_> = Vec::new();
    for _ in 0..20 {
        all.push(
            reader.follow_facts(vec!["flotilla.*.control.*".into()], *expected.last().unwrap()),
        );
    }
    for (number, facts) in all.iter_mut().enumerate() {
        let caught_up = facts.next().await.unwrap().unwrap();
        assert!(matches!(caught_up, LogEvent::CaughtUp), "{number}: {caught_up:?}");
    }
    let began = std::time::Instant::now();
    let fact = control(FACTS.into(), "enough");
    closed.coordinator.publish_fact(&fact).await.unwrap();
    for facts in &mut all {
        let LogEvent::Record(record) = facts.next().await.unwrap().unwrap() else {
            panic!("a fact")
        };
        assert_eq!(record.fact, fact);
    }
    assert!(began.elapsed() < Duration::from_secs(5), "heard, not looked for");
}

#[tokio::test]
async fn a_member_reads_each_fact_once_though_others_write_meanwhile() {
    const FACTS: u32 = 300;
    let closed = Closed::start().await;
    let reader = closed.bus(&member("ann", MemberKind::User { scope: UserScope::Reader })).await;
    let filters = vec!["flotilla.*.control.*".to_owned(), "flotilla.*.samples.*.*".to_owned()];
    let mut read = Vec::new();
    let writing = async {
        for number in 0..FACTS {
            closed.coordinator.publish_fact(&control(number.into(), "go")).await.unwrap();
            let fact = samples(&format!("j{number}"), "coordinator");
            closed.coordinator.publish_fact(&fact).await.unwrap();
        }
    };
    let reading = async {
        let mut facts = reader.follow_facts(filters, 0);
        while read.len() < 2 * FACTS as usize {
            match facts.next().await.unwrap().unwrap() {
                LogEvent::Record(record) => read.push(record.sequence),
                LogEvent::CaughtUp => {}
                other => panic!("{other:?}"),
            }
        }
    };
    let both = async { tokio::join!(writing, reading) };
    tokio::time::timeout(Duration::from_secs(60), both).await.expect("it gets on");
    assert_eq!(read, (1..=2 * u64::from(FACTS)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_member_is_told_that_the_log_went_back() {
    let closed = Closed::start().await;
    for number in 0..5 {
        closed.coordinator.publish_fact(&control(number, "go")).await.unwrap();
    }
    let reader = closed.bus(&member("ann", MemberKind::User { scope: UserScope::Reader })).await;
    let mut facts = reader.follow_facts(vec!["flotilla.*.control.*".into()], 0);
    for _ in 0..6 {
        facts.next().await.unwrap().unwrap();
    }
    let rogue = Rogue::of(&closed, &member("coordinator", MemberKind::Coordinator)).await;
    let gone = rogue.client.request("$JS.API.STREAM.DELETE.FLOTILLA", "".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&gone.payload).contains("true"), "{gone:?}");
    closed.coordinator.prepare_log(1).await.unwrap();
    closed.coordinator.publish_fact(&control(1, "again")).await.unwrap();
    let told = tokio::time::timeout(Duration::from_secs(10), facts.next()).await.unwrap().unwrap();
    assert!(matches!(told, Err(ReadError::Truncated { after: 5, last: 1 })), "{told:?}");
}

#[tokio::test]
async fn a_coordinator_writes_several_facts_at_once_in_its_own_name() {
    let closed = Closed::start().await;
    let facts = [1, 2, 3].map(|number| control(number, "at once"));
    let published = closed.coordinator.publish_all(&facts).await.unwrap();
    let first = published[0].log_sequence();
    assert_eq!(published, [0, 1, 2].map(|n| PublishOutcome::New { sequence: first + n }));
    let found = closed.coordinator.get_fact(&facts[1].subject.to_string()).await.unwrap().unwrap();
    assert_eq!(found.author.map(|author| author.to_string()).as_deref(), Some("coordinator"));
    let again = closed.coordinator.publish_all(&facts).await.unwrap();
    let there = |n| PublishOutcome::AlreadyWritten { sequence: first + n, same: true };
    assert_eq!(again, [0, 1, 2].map(there));
}

/// Returns the sequences of all facts that match the filters.
async fn sequences(bus: &Bus, filters: Vec<String>) -> Vec<u64> {
    let mut facts = bus.follow_facts(filters, 0);
    let mut sequences = Vec::new();
    loop {
        match facts.next().await.unwrap().unwrap() {
            LogEvent::Record(record) => sequences.push(record.sequence),
            LogEvent::CaughtUp => return sequences,
            other => panic!("{other:?}"),
        }
    }
}

/// Requests that some or all members may send, and that are answered.
const QUESTIONS: [(&str, &str); 7] = [
    ("$JS.API.INFO", ""),
    ("$JS.API.STREAM.INFO.FLOTILLA", ""),
    ("$JS.API.STREAM.MSG.GET.FLOTILLA", r#"{"seq":1}"#),
    ("$JS.API.DIRECT.GET.FLOTILLA", r#"{"seq":1,"next_by_subj":">","batch":9}"#),
    ("$JS.API.CONSUMER.INFO.FLOTILLA.generate-default", ""),
    ("$JS.API.CONSUMER.MSG.NEXT.FLOTILLA.generate-default", r#"{"batch":1,"no_wait":true}"#),
    ("flotilla.r9.samples.1.j9.me", "{}"),
];

/// Requests whose answer does harm.
const HARMFUL: [&str; 9] = [
    "$JS.API.STREAM.PURGE.FLOTILLA",
    "$JS.API.STREAM.DELETE.FLOTILLA",
    "$JS.API.STREAM.DELETE.KV_FLOTILLA_MEMBERS",
    "$JS.API.CONSUMER.DELETE.FLOTILLA.generate-default",
    "$KV.FLOTILLA_FLEET.leader",
    "$KV.FLOTILLA_MEMBERS.member.somebody",
    "flotilla.r1.done.coordinator",
    "flotilla.r1.samples.1.j1.somebody",
    "flotilla.agent.command.somebody",
];

#[tokio::test]
async fn an_answer_goes_to_who_asked_wherever_it_is_wanted() {
    let closed = Closed::start().await;
    closed.coordinator.publish_fact(&order(1)).await.unwrap();
    let before = closed.everything().await;
    let heard = closed.listen("flotilla.agent.command.>").await;
    for who in [Who::Generator, Who::Reader, Who::Operator] {
        let rogue = Rogue::of(&closed, &who.member()).await;
        for (question, body) in QUESTIONS {
            for reply in HARMFUL {
                let asked = rogue.client.publish_with_reply(question, reply, body.into());
                asked.await.unwrap();
            }
        }
        rogue.client.flush().await.unwrap();
        // Answered after all of them.
        rogue.client.request("$JS.API.INFO", "".into()).await.unwrap();
    }
    assert_eq!(closed.everything().await, before);
    assert_eq!(heard.borrow().clone(), [""; 0], "an agent was told something");
}

/// Headers with which a message instructs its stream (nats-server, `stream.go`).
const HEADERS: [(&str, &str); 9] = [
    ("Nats-Rollup", "all"),
    ("Nats-Rollup", "sub"),
    ("Nats-TTL", "1s"),
    ("Nats-Msg-Id", "1"),
    ("Nats-Incr", "1"),
    ("Nats-Batch-Id", "b1"),
    ("Nats-Schedule", "@every 1s"),
    ("Nats-Schedule-Target", "flotilla.r1.done.coordinator"),
    ("KV-Operation", "PURGE"),
];

#[tokio::test]
async fn a_header_changes_nothing_that_is_anothers() {
    let closed = Closed::start().await;
    closed.coordinator.publish_fact(&order(1)).await.unwrap();
    let status = |agent: &str| v1::AgentStatus { agent: agent.into(), ..Default::default() };
    closed.coordinator.record_status(&status("somebody")).await.unwrap();
    let before = closed.everything().await;
    let rogue = Rogue::of(&closed, &Who::Generator.member()).await;
    for (name, value) in HEADERS {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(name, value);
        if name.starts_with("Nats-Schedule") {
            headers.insert("Nats-Schedule", "@every 1s");
        }
        if name == "Nats-Batch-Id" {
            headers.insert("Nats-Batch-Sequence", "1");
            headers.insert("Nats-Batch-Commit", "1");
        }
        for subject in ["$KV.FLOTILLA_FLEET.agent.me", "flotilla.r1.samples.1.j1.me"] {
            // Accepted or refused.
            let asked =
                rogue.client.request_with_headers(subject, headers.clone(), "{}".into()).await;
            asked.unwrap_or_else(|error| panic!("{subject} {name}: {error}"));
        }
    }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(closed.everything().await, before);
}

#[tokio::test]
async fn an_answer_can_be_no_acknowledgement_of_anothers_work() {
    let closed = Closed::start().await;
    closed.coordinator.publish_fact(&order(1)).await.unwrap();
    let (honest, pool) =
        (closed.agent("g1", &[MemberRole::Generator]).await, Pool::new("default").unwrap());
    let mut queue = honest.join_work_queue(WorkKind::Generate, &pool, LEASE).await.unwrap();
    let taken = queue.next(Duration::from_secs(10)).await.unwrap().expect("an order");
    let rogue = Rogue::of(&closed, &Who::Evaluator.member()).await;
    let delivery = taken.ack_subject_name().to_owned();
    for (question, body) in QUESTIONS
        .into_iter()
        .chain([("$JS.API.CONSUMER.MSG.NEXT.FLOTILLA.eval", r#"{"batch":1,"no_wait":true}"#)])
    {
        let asked = rogue.client.publish_with_reply(question, delivery.clone(), body.into());
        asked.await.unwrap();
    }
    rogue.client.request("$JS.API.INFO", "".into()).await.unwrap();
    drop(taken);
    let again = queue.next(LEASE * 3).await.unwrap();
    assert!(again.is_some(), "the order is handed out again, for nobody acknowledged it");
}

impl Closed {
    /// Returns every subject of the log and of the fleet's buckets with its entries, except those
    /// that a member may write in its own name.
    async fn everything(&self) -> Vec<String> {
        let rogue = Rogue::of(self, &member("coordinator", MemberKind::Coordinator)).await;
        let mut everything = Vec::new();
        for stream in ["FLOTILLA", "KV_FLOTILLA_FLEET", "KV_FLOTILLA_MEMBERS"] {
            let asked = r#"{"subjects_filter":">"}"#;
            let verb = format!("$JS.API.STREAM.INFO.{stream}");
            let info = rogue.client.request(verb, asked.into()).await.unwrap();
            let info: serde_json::Value = serde_json::from_slice(&info.payload).unwrap();
            let state = &info["state"];
            everything.push(format!("{stream} has {} consumers", state["consumer_count"]));
            let subjects = state["subjects"].as_object().cloned().unwrap_or_default();
            let subjects = subjects.iter().filter(|(subject, _)| !subject.ends_with(".me"));
            everything.extend(subjects.map(|(subject, entries)| format!("{subject}: {entries}")));
        }
        everything
    }

    /// Collects the messages of a subject.
    async fn listen(&self, subject: &'static str) -> tokio::sync::watch::Receiver<Vec<String>> {
        let rogue = Rogue::of(self, &member("coordinator", MemberKind::Coordinator)).await;
        let mut messages = rogue.client.subscribe(subject).await.unwrap();
        rogue.client.flush().await.unwrap();
        let (told, heard) = tokio::sync::watch::channel(Vec::new());
        tokio::spawn(async move {
            let _connected = rogue;
            while let Some(message) = messages.next().await {
                told.send_modify(|told: &mut Vec<String>| told.push(message.subject.to_string()));
            }
        });
        heard
    }
}

#[tokio::test]
async fn a_member_goes_on_with_its_renewed_token() {
    let closed = Closed::start().await;
    let generator = agent("g1", &[MemberRole::Generator]);
    let short = Some(now() + 6);
    let identity = closed.admit(&generator, short).await;
    let bus = Bus::connect(&reach(&closed.server, identity)).await.unwrap();
    create_credentials(&closed.authority, closed.directory.path(), &generator, None);
    tokio::time::sleep(Duration::from_millis(6500)).await;
    until("it is back", async || bus.is_connected()).await;
    let written = bus.publish_fact(&samples("j1", "g1")).await.unwrap();
    assert!(matches!(written, PublishOutcome::New { .. }), "{written:?}");
}

#[tokio::test]
async fn strangers_stay_outside() {
    let closed = Closed::start().await;
    let stranger = ConnectOptions { urls: vec![closed.server.client_url()], ..Default::default() };
    let error = Bus::connect(&stranger).await.unwrap_err();
    assert!(matches!(error, ConnectError::Tls { .. }), "{error:?}");
    // The right subject, with another fleet's token.
    let other = TempDir::new().unwrap();
    let (stranger, _) =
        FleetAuthority::create_or_open(&other.path().join("keys"), "other", &[], now()).unwrap();
    let g1 = agent("g1", &[MemberRole::Generator]);
    let identity = create_credentials(&stranger, other.path(), &g1, None);
    let error = Bus::connect(&reach(&closed.server, identity.clone())).await.unwrap_err();
    assert!(matches!(error, ConnectError::Tls { .. }), "another authority: {error:?}");
    std::fs::write(&identity.ca, closed.authority.ca_pem()).unwrap();
    let error = Bus::connect(&reach(&closed.server, identity)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "another signature: {error:?}");
}

#[tokio::test]
async fn roles_of_one_agent_add_up() {
    let closed = Closed::start().await;
    let all: BTreeSet<MemberRole> = MemberRole::ALL.into_iter().collect();
    let all: Vec<MemberRole> = all.into_iter().collect();
    let rogue = Rogue::of(&closed, &agent("me", &all)).await;
    for subject in FACTS {
        let place = subject.parse::<Subject>().unwrap().key;
        let expected = writers(&place).iter().any(|who| Who::AGENTS.contains(who));
        let own = format!("{subject}.me");
        assert_eq!(rogue.may_say(&own).await, expected, "{own}");
    }
}

#[tokio::test]
async fn a_watcher_starts_no_run_that_runs_programs() {
    let closed = Closed::start().await;
    let rogue = Rogue::of(&closed, &Who::Watcher.member()).await;
    let raft = r#"{"run":"x-1","raft":{"verifier":{"command":{"argv":["sh","-c","id"]}}}}"#;
    let write = async |subject: &str| {
        let stream = async_nats::jetstream::new(rogue.client.clone());
        let sent = stream.publish(subject.to_owned(), raft.into()).await;
        tokio::time::timeout(Duration::from_secs(1), async { sent.ok()?.await.ok() }).await
    };
    assert!(!matches!(write("flotilla.x-1.spec.me").await, Ok(Some(_))), "the server refuses it");
    assert!(matches!(write("flotilla.x-1.watched.me").await, Ok(Some(_))), "the log takes it");
    let run = RunId::new("x-1").unwrap();
    let error = closed.coordinator.find_spec(&run).await.unwrap_err();
    assert!(matches!(error, ReadError::Unreadable { .. }), "no reader does: {error}");
    let mut log = closed.coordinator.follow_facts(vec!["flotilla.>".to_owned()], 0);
    let first = log.next().await.unwrap().unwrap();
    assert!(matches!(first, LogEvent::Unreadable { .. }), "nor a coordinator: {first:?}");
}
