//! Measures the cost of a closed fleet.
//!
//! It compares facts and connections with TLS and member tokens against an open server, measures
//! how fast a revoked member is disconnected, and runs a thousand idle agents on one server.

use std::time::{Duration, Instant};

use anyhow::Context;
use bus::{
    Bus, ConnectOptions, FactProducer,
    server::{ClosedFleetConfig, ManagedServer, ServerOptions},
    system_account::{PushScope, SystemAccountUser, push_accounts},
};
use cli::{output, work_directory::WorkDirectory};
use futures::{StreamExt, TryStreamExt, stream};
use identity::{
    CredentialFiles, FleetAuthority, Member, MemberAccess, MemberIdentity, MemberKind, MemberRole,
};
use wire::{
    AgentId, Fact, FactBody, FactKey, Pool, RunId, Subject, WorkKind, clock::unix_seconds, v1,
};

use super::{BenchFigure, procfs};

/// Rounds, which alternate between both servers so that they share the machine's conditions.
const ROUNDS: u32 = 10;
/// Facts of a round on each server.
const FACTS: u32 = 100;
/// Connections to each server.
const CONNECTIONS: usize = 20;
/// Members that are revoked, one after the other.
const CUTS: usize = 10;

/// Idle agents on one server.
const AGENTS: u32 = 1000;
/// Agents that connect at the same time.
const CONNECTING_MAX: usize = 32;
/// Settling time of the idle fleet, and then the time over which the server's CPU is measured.
const OBSERVE_TIME: Duration = Duration::from_secs(10);

/// Accepted time of a fact, relative to an open server.
const FACT_RATIO: f64 = 1.5;
/// Accepted time from a revocation to the end of the connection, in milliseconds.
const CUT_LIMIT_MS: f64 = 1000.0;

/// Lease of the jobs in the work queue.
const LEASE: Duration = Duration::from_secs(30);

struct ClosedFleetFixture {
    authority: FleetAuthority,
    server: ManagedServer,
    directory: WorkDirectory,
}

impl ClosedFleetFixture {
    async fn start() -> anyhow::Result<Self> {
        let directory = WorkDirectory::open_or_create(None, "bench-closed")?;
        let keys = directory.as_path().join("keys");
        let (authority, _) = FleetAuthority::create_or_open(&keys, "bench", &[], unix_seconds())?;
        let nats = directory.as_path().join("nats");
        let config = authority.nats_config(&nats.join("accounts"), unix_seconds())?;
        let closed = Some(ClosedFleetConfig { config, account: authority.account_public_key() });
        let options = ServerOptions { closed_fleet: closed, ..ServerOptions::new(nats) };
        let server = ManagedServer::start(&options).await?;
        Ok(Self { authority, server, directory })
    }

    fn admit_member(
        &self,
        name: &str,
        standing: MemberKind,
    ) -> anyhow::Result<(ConnectOptions, String)> {
        let member = Member { name: AgentId::new(name)?, standing };
        let identity = MemberIdentity::with_default_files(name)
            .resolve_in(&self.directory.as_path().join("credentials").join(name));
        let admitted = self.authority.issue_tokens(
            &member,
            &identity.ensure_public_key()?,
            unix_seconds(),
            None,
        )?;
        identity.write_files(&CredentialFiles {
            jwt: &admitted.jwt,
            bearer: &admitted.bearer,
            ca: self.authority.ca_pem(),
        })?;
        let key = identity.ensure_public_key()?;
        let account = self.authority.member_account_jwt(
            &member,
            &key,
            MemberAccess::Granted { at: unix_seconds() },
        )?;
        let options = open_options(&self.server.client_url(), name);
        Ok((ConnectOptions { identity: Some(identity), ..options }, account))
    }

    fn admit_generator(&self, name: &str) -> anyhow::Result<(ConnectOptions, String)> {
        let (roles, pool) = ([MemberRole::Generator].into(), Pool::new("default")?);
        self.admit_member(name, MemberKind::Agent { roles, pool })
    }

    async fn push_member_accounts(
        &self,
        accounts: &[String],
        scope: PushScope,
    ) -> anyhow::Result<()> {
        let (seed, jwt) = self.authority.create_system_user(unix_seconds())?;
        let tls = identity::fleet_client_config(self.authority.ca_pem().as_bytes())?;
        let user = SystemAccountUser { seed, jwt };
        Ok(push_accounts(&[self.server.client_url()], tls, &user, accounts, scope).await?)
    }
}

fn open_options(url: &str, name: &str) -> ConnectOptions {
    let producer = FactProducer { name: name.to_owned(), role: "bench".to_owned() };
    ConnectOptions { urls: vec![url.to_owned()], producer, ..ConnectOptions::default() }
}

pub(super) async fn measure_closed_fleet() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message("closed: facts, connections and cuts, beside an open server …");
    let mut closed = ClosedFleetFixture::start().await?;
    let plain = WorkDirectory::open_or_create(None, "bench-open")?;
    let mut server =
        ManagedServer::start(&ServerOptions::new(plain.as_path().join("nats"))).await?;
    let (coordinator, _) = closed.admit_member("coordinator", MemberKind::Coordinator)?;
    let running = Bus::connect(&coordinator).await?;
    running.prepare_log(1).await?;
    running.prepare_work_queue(WorkKind::Generate, &Pool::new("default")?, LEASE).await?;
    running.close().await;
    let roles = [MemberRole::Evaluator].into();
    let standing = MemberKind::Agent { roles, pool: Pool::new("default")? };
    let (evaluator, account) = closed.admit_member("evaluator", standing)?;
    closed.push_member_accounts(&[account], PushScope::AnyServer).await?;
    let outside = open_options(&server.client_url(), "bench");
    let mut figures = measure_facts(&evaluator, &outside).await?;
    figures.push(measure_connections(&evaluator, &outside).await?);
    server.stop().await;
    figures.push(measure_revocations(&closed).await?);
    figures.extend(measure_idle_agents(&closed).await?);
    closed.server.stop().await;
    Ok(figures)
}

async fn measure_facts(
    closed: &ConnectOptions,
    open: &ConnectOptions,
) -> anyhow::Result<Vec<BenchFigure>> {
    let buses = [Bus::connect(closed).await?, Bus::connect(open).await?];
    buses[1].prepare_log(1).await?;
    let mut taken: [Vec<f64>; 2] = Default::default();
    for round in 0..ROUNDS {
        for (bus, taken) in buses.iter().zip(&mut taken) {
            for number in 0..FACTS {
                let fact = make_eval_fact(round * FACTS + number)?;
                let began = Instant::now();
                bus.publish_fact(&fact).await?;
                taken.push(elapsed_ms(began));
            }
        }
    }
    let [closed, open] = taken.map(median_of);
    Ok(vec![BenchFigure {
        name: "closed: a fact",
        measured: closed,
        unit: "ms",
        limit: Some(FACT_RATIO * open),
        how: format!(
            "until it is acknowledged, median of {}; {open:.3} ms on an open server in turns with \
             it: {:.2} times",
            ROUNDS * FACTS,
            closed / open
        ),
    }])
}

fn make_eval_fact(number: u32) -> anyhow::Result<Fact> {
    let run = RunId::new("bench-1")?;
    let place = FactKey::Eval { cycle: 1, step: number, suite: "text".parse()? };
    let body = v1::Eval {
        run: run.to_string(),
        cycle: 1,
        step: number,
        suite: "text".into(),
        perplexity: 2.7,
        ..v1::Eval::default()
    };
    Ok(Fact { subject: Subject::new(&run, place), body: FactBody::Eval(body) })
}

async fn measure_connections(
    closed: &ConnectOptions,
    open: &ConnectOptions,
) -> anyhow::Result<BenchFigure> {
    let mut taken: [Vec<f64>; 2] = Default::default();
    for _ in 0..CONNECTIONS {
        for (options, taken) in [closed, open].into_iter().zip(&mut taken) {
            let began = Instant::now();
            let bus = Bus::connect(options).await?;
            taken.push(elapsed_ms(began));
            bus.close().await;
        }
    }
    let [closed, open] = taken.map(median_of);
    Ok(BenchFigure {
        name: "closed: a connection",
        measured: closed,
        unit: "ms",
        limit: None,
        how: format!(
            "TLS, token and JetStream's answer, median of {CONNECTIONS}; open {open:.2} ms"
        ),
    })
}

async fn measure_revocations(rig: &ClosedFleetFixture) -> anyhow::Result<BenchFigure> {
    let mut taken = Vec::new();
    for number in 0..CUTS {
        let name = format!("cut-{number}");
        let (options, account) = rig.admit_generator(&name)?;
        rig.push_member_accounts(&[account], PushScope::AnyServer).await?;
        let bus = Bus::connect(&options).await?;
        let identity = options.identity.context("it was just let in")?;
        let (roles, pool) = ([MemberRole::Generator].into(), Pool::new("default")?);
        let member =
            Member { name: AgentId::new(name)?, standing: MemberKind::Agent { roles, pool } };
        let began = Instant::now();
        let key = identity.ensure_public_key()?;
        let account = rig.authority.member_account_jwt(
            &member,
            &key,
            MemberAccess::Ended { granted_at: unix_seconds() },
        )?;
        let cut = async {
            while bus.is_connected() {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            elapsed_ms(began)
        };
        let accounts = [account];
        let (pushed, cut) =
            tokio::join!(rig.push_member_accounts(&accounts, PushScope::AllServers), cut);
        pushed?;
        taken.push(cut);
        bus.close().await;
    }
    Ok(BenchFigure {
        name: "closed: cut off",
        measured: median_of(taken),
        unit: "ms",
        limit: Some(CUT_LIMIT_MS),
        how: format!(
            "from the word that a member is revoked to its connection's end, median of {CUTS}"
        ),
    })
}

async fn measure_idle_agents(rig: &ClosedFleetFixture) -> anyhow::Result<[BenchFigure; 2]> {
    output::print_message(&format!("closed: {AGENTS} agents on one server …"));
    let before = procfs::read_status_bytes(rig.server.process_id(), "VmRSS")?;
    let members = (0..AGENTS).map(|number| rig.admit_generator(&format!("generator-{number}")));
    let (members, accounts): (Vec<_>, Vec<_>) =
        members.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    rig.push_member_accounts(&accounts, PushScope::AnyServer).await?;
    let began = Instant::now();
    let agents: Vec<Bus> = stream::iter(&members)
        .map(Bus::connect)
        .buffer_unordered(CONNECTING_MAX)
        .try_collect()
        .await
        .context("connect the agents")?;
    let connected = began.elapsed();
    let working: Vec<_> =
        agents.iter().map(|bus| tokio::spawn(run_idle_agent(bus.clone()))).collect();
    tokio::time::sleep(OBSERVE_TIME).await;
    let busy = procfs::read_cpu_seconds(rig.server.process_id())?;
    let from = Instant::now();
    tokio::time::sleep(OBSERVE_TIME).await;
    let share =
        (procfs::read_cpu_seconds(rig.server.process_id())? - busy) / from.elapsed().as_secs_f64();
    let resident = procfs::read_status_bytes(rig.server.process_id(), "VmRSS")?;
    let still = agents.iter().filter(|bus| bus.is_connected()).count();
    for task in working {
        task.abort();
    }
    for bus in agents {
        bus.close().await;
    }
    let how = format!(
        "{still} of {AGENTS} agents connected (in {:.1} s), each waiting for work, following the \
         log and speaking every second",
        connected.as_secs_f64()
    );
    Ok([
        BenchFigure {
            name: "closed: 1000 agents, memory",
            measured: to_megabytes(resident),
            unit: "MB",
            limit: None,
            how: format!("of the nats-server ({:.0} MB before); {how}", to_megabytes(before)),
        },
        BenchFigure {
            name: "closed: 1000 agents, CPU",
            measured: 100.0 * share,
            unit: "% of a core",
            limit: None,
            how: "of the same server".into(),
        },
    ])
}

async fn run_idle_agent(bus: Bus) -> anyhow::Result<()> {
    let pool = Pool::new("default")?;
    let mut queue = bus.join_work_queue(WorkKind::Generate, &pool, LEASE).await?;
    let mut facts =
        bus.follow_facts(vec!["flotilla.*.control.*".into(), "flotilla.*.done".into()], 0);
    let status =
        v1::AgentStatus { agent: bus.producer_name().to_owned(), ..v1::AgentStatus::default() };
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = tick.tick() => bus.announce_status(&status).await?,
            _ = facts.next() => {}
            _ = queue.next(LEASE) => {}
        }
    }
}

/// Returns the milliseconds since an instant.
fn elapsed_ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Returns the median, or NaN without values.
fn median_of(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Converts bytes to megabytes (10^6).
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn to_megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
