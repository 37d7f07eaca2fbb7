//! What being closed costs: facts and connections with TLS and members' tokens, beside the same
//! without; a member cut off; and a thousand agents on one server.

use std::time::{Duration, Instant};

use anyhow::Context;
use authority::{Access, Authority, Identity, KitFiles, Member, Role, Standing};
use bus::{
    Bus, ConnectOptions, Producer,
    server::{Closed, ManagedServer, ServerOptions},
    system::{Heard, SystemUser, push_accounts},
};
use futures::{StreamExt, TryStreamExt, stream};
use wire::{AgentId, Body, Fact, Place, Pool, RunId, Subject, WorkKind, v1};

use super::{Figure, processes};
use crate::{directory::Directory, keys::now, output};

/// Taken in turns, so that both servers see the same machine.
const ROUNDS: u32 = 10;
const FACTS: u32 = 100;
const CONNECTIONS: usize = 20;
const CUTS: usize = 10;

const AGENTS: u32 = 1000;
const AT_ONCE: usize = 32;
/// For which the idle fleet is looked at.
const LOOK: Duration = Duration::from_secs(10);

/// Allowed beside an open server.
const FACT_RATIO: f64 = 1.5;
/// A second, as the design has it.
const CUT_LIMIT_MS: f64 = 1000.0;

const LEASE: Duration = Duration::from_secs(30);

struct Rig {
    authority: Authority,
    server: ManagedServer,
    directory: Directory,
}

impl Rig {
    async fn start() -> anyhow::Result<Self> {
        let directory = Directory::choose(None, "bench-closed")?;
        let keys = directory.path().join("keys");
        let (authority, _) = Authority::create(&keys, "bench", &[], now())?;
        let nats = directory.path().join("nats");
        let config = authority.nats_config(&nats.join("accounts"), now())?;
        let closed = Some(Closed { config, account: authority.account() });
        let options = ServerOptions { closed, ..ServerOptions::new(nats) };
        let server = ManagedServer::start(&options).await?;
        Ok(Self { authority, server, directory })
    }

    /// How a member connects, and its account, which the server has yet to hear of.
    fn member(&self, name: &str, standing: Standing) -> anyhow::Result<(ConnectOptions, String)> {
        let member = Member { name: AgentId::new(name)?, standing };
        let identity = Identity::named(name).within(&self.directory.path().join("kits").join(name));
        let admitted = self.authority.admit(&member, &identity.public_key()?, now(), None)?;
        identity.write(&KitFiles {
            jwt: &admitted.jwt,
            bearer: &admitted.bearer,
            ca: self.authority.ca_pem(),
        })?;
        let key = identity.public_key()?;
        let account =
            self.authority.member_account(&member, &key, Access::Granted { at: now() })?;
        let options = open(&self.server.url(), name);
        Ok((ConnectOptions { identity: Some(identity), ..options }, account))
    }

    fn generator(&self, name: &str) -> anyhow::Result<(ConnectOptions, String)> {
        let (roles, pool) = ([Role::Generator].into(), Pool::new("default")?);
        self.member(name, Standing::Agent { roles, pool })
    }

    async fn tell(&self, accounts: &[String], heard: Heard) -> anyhow::Result<()> {
        let (seed, jwt) = self.authority.system_user(now())?;
        let tls = authority::client_config(self.authority.ca_pem().as_bytes())?;
        let user = SystemUser { seed, jwt };
        Ok(push_accounts(&[self.server.url()], tls, &user, accounts, heard).await?)
    }
}

fn open(url: &str, name: &str) -> ConnectOptions {
    let producer = Producer { name: name.to_owned(), role: "bench".to_owned() };
    ConnectOptions { urls: vec![url.to_owned()], producer, ..ConnectOptions::default() }
}

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say("closed: facts, connections and cuts, beside an open server …");
    let mut closed = Rig::start().await?;
    let plain = Directory::choose(None, "bench-open")?;
    let mut server = ManagedServer::start(&ServerOptions::new(plain.path().join("nats"))).await?;
    let (coordinator, _) = closed.member("coordinator", Standing::Coordinator)?;
    let running = Bus::connect(&coordinator).await?;
    running.prepare(1).await?;
    running.prepare_work(WorkKind::Generate, &Pool::new("default")?, LEASE).await?;
    running.close().await;
    let roles = [Role::Evaluator].into();
    let standing = Standing::Agent { roles, pool: Pool::new("default")? };
    let (evaluator, account) = closed.member("evaluator", standing)?;
    closed.tell(&[account], Heard::ByOne).await?;
    let outside = open(&server.url(), "bench");
    let mut figures = facts(&evaluator, &outside).await?;
    figures.push(connections(&evaluator, &outside).await?);
    server.stop().await;
    figures.push(cuts(&closed).await?);
    figures.extend(crowd(&closed).await?);
    closed.server.stop().await;
    Ok(figures)
}

async fn facts(closed: &ConnectOptions, open: &ConnectOptions) -> anyhow::Result<Vec<Figure>> {
    let buses = [Bus::connect(closed).await?, Bus::connect(open).await?];
    buses[1].prepare(1).await?;
    let mut taken: [Vec<f64>; 2] = Default::default();
    for round in 0..ROUNDS {
        for (bus, taken) in buses.iter().zip(&mut taken) {
            for number in 0..FACTS {
                let fact = eval(round * FACTS + number)?;
                let began = Instant::now();
                bus.publish(&fact).await?;
                taken.push(milliseconds(began));
            }
        }
    }
    let [closed, open] = taken.map(median);
    Ok(vec![Figure {
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

fn eval(number: u32) -> anyhow::Result<Fact> {
    let run = RunId::new("bench-1")?;
    let place = Place::Eval { cycle: 1, step: number, suite: "text".parse()? };
    let body = v1::Eval {
        run: run.to_string(),
        cycle: 1,
        step: number,
        suite: "text".into(),
        perplexity: 2.7,
        ..v1::Eval::default()
    };
    Ok(Fact { subject: Subject::new(&run, place), body: Body::Eval(body) })
}

async fn connections(closed: &ConnectOptions, open: &ConnectOptions) -> anyhow::Result<Figure> {
    let mut taken: [Vec<f64>; 2] = Default::default();
    for _ in 0..CONNECTIONS {
        for (options, taken) in [closed, open].into_iter().zip(&mut taken) {
            let began = Instant::now();
            let bus = Bus::connect(options).await?;
            taken.push(milliseconds(began));
            bus.close().await;
        }
    }
    let [closed, open] = taken.map(median);
    Ok(Figure {
        name: "closed: a connection",
        measured: closed,
        unit: "ms",
        limit: None,
        how: format!(
            "TLS, token and JetStream's answer, median of {CONNECTIONS}; open {open:.2} ms"
        ),
    })
}

/// From the word to the connection's end, each time of another member.
async fn cuts(rig: &Rig) -> anyhow::Result<Figure> {
    let mut taken = Vec::new();
    for number in 0..CUTS {
        let name = format!("cut-{number}");
        let (options, account) = rig.generator(&name)?;
        rig.tell(&[account], Heard::ByOne).await?;
        let bus = Bus::connect(&options).await?;
        let identity = options.identity.context("it was just let in")?;
        let (roles, pool) = ([Role::Generator].into(), Pool::new("default")?);
        let member =
            Member { name: AgentId::new(name)?, standing: Standing::Agent { roles, pool } };
        let began = Instant::now();
        let key = identity.public_key()?;
        let account =
            rig.authority.member_account(&member, &key, Access::Over { granted_at: now() })?;
        let cut = async {
            while bus.is_connected() {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            milliseconds(began)
        };
        let accounts = [account];
        let (told, cut) = tokio::join!(rig.tell(&accounts, Heard::ByAll), cut);
        told?;
        taken.push(cut);
        bus.close().await;
    }
    Ok(Figure {
        name: "closed: cut off",
        measured: median(taken),
        unit: "ms",
        limit: Some(CUT_LIMIT_MS),
        how: format!(
            "from the word that a member is revoked to its connection's end, median of {CUTS}"
        ),
    })
}

/// Agents that do what idle ones do: wait for work, follow the log, and say every second that
/// they are there.
async fn crowd(rig: &Rig) -> anyhow::Result<[Figure; 2]> {
    output::say(&format!("closed: {AGENTS} agents on one server …"));
    let before = processes::status_bytes(rig.server.pid(), "VmRSS")?;
    let members = (0..AGENTS).map(|number| rig.generator(&format!("generator-{number}")));
    let (members, accounts): (Vec<_>, Vec<_>) =
        members.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    rig.tell(&accounts, Heard::ByOne).await?;
    let began = Instant::now();
    let agents: Vec<Bus> = stream::iter(&members)
        .map(Bus::connect)
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await
        .context("connect the agents")?;
    let connected = began.elapsed();
    let working: Vec<_> = agents.iter().map(|bus| tokio::spawn(idle(bus.clone()))).collect();
    tokio::time::sleep(LOOK).await;
    let busy = processes::cpu_seconds(rig.server.pid())?;
    let from = Instant::now();
    tokio::time::sleep(LOOK).await;
    let share = (processes::cpu_seconds(rig.server.pid())? - busy) / from.elapsed().as_secs_f64();
    let resident = processes::status_bytes(rig.server.pid(), "VmRSS")?;
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
        Figure {
            name: "closed: 1000 agents, memory",
            measured: megabytes(resident),
            unit: "MB",
            limit: None,
            how: format!("of the nats-server ({:.0} MB before); {how}", megabytes(before)),
        },
        Figure {
            name: "closed: 1000 agents, CPU",
            measured: 100.0 * share,
            unit: "% of a core",
            limit: None,
            how: "of the same server".into(),
        },
    ])
}

async fn idle(bus: Bus) -> anyhow::Result<()> {
    let pool = Pool::new("default")?;
    let mut queue = bus.work(WorkKind::Generate, &pool, LEASE).await?;
    let mut facts = bus.follow(vec!["flotilla.*.control.*".into(), "flotilla.*.done".into()], 0);
    let status = v1::AgentStatus { agent: bus.name().to_owned(), ..v1::AgentStatus::default() };
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = tick.tick() => bus.announce(&status).await?,
            _ = facts.next() => {}
            _ = queue.next(LEASE) => {}
        }
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
