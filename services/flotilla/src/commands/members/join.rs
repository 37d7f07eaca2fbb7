//! `flotilla join`: from a line of text to an agent that works.

use std::{
    io::Read,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitCode},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail};
use authority::{Fingerprint, Identity, JoinToken, Purpose, Statement};
use clap::Parser;
use gateway::client::{Client, Target, fetch_authority};
use wire::{AgentId, v1};

use crate::{
    cli::{Cli, JoinArgs},
    commands::{agent, service},
    discovery,
    fleet::{FleetArgs, FleetFile},
    output,
    service::{Options, Scope},
};

use super::{default_kit, is_transient, kit, renew};

/// A gateway that is being started anew is back by then.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);
/// In place of an address: it is to be looked for.
const DISCOVER: &str = "discover";
/// What a token file may hold.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

pub(crate) async fn join(fleet: &FleetArgs, args: JoinArgs) -> anyhow::Result<ExitCode> {
    let directory = match &fleet.dir {
        Some(directory) => directory.clone(),
        None => default_kit()?,
    };
    let command = agent_arguments(&directory, &args)?;
    let line = line(&args)?;
    match kit::let_in_before(&directory, &line)? {
        Some(name) if args.name.as_ref().is_none_or(|wanted| *wanted == name) => {
            output::say(&format!("{name} is a member already; its kit is {}", directory.display()));
        }
        _ => enter(line.parse()?, &directory, &args).await?,
    }
    if args.no_agent {
        return Ok(ExitCode::SUCCESS);
    }
    if args.service {
        serve(&directory, &args).await?;
        return Ok(ExitCode::SUCCESS);
    }
    // In place of this process: what is left shows the token to nobody.
    let mut agent = Command::new(std::env::current_exe().context("find this program")?);
    agent.args(&command);
    for secret in ["FLOTILLA_TOKEN", "FLOTILLA_NATS"] {
        agent.env_remove(secret);
    }
    Err(agent.exec()).context("start the agent")
}

async fn enter(mut token: JoinToken, directory: &Path, args: &JoinArgs) -> anyhow::Result<()> {
    token.gateways.retain(|address| address != DISCOVER);
    if args.discover || token.gateways.is_empty() {
        token.gateways = discovery::gateways(&token.ca).await?;
    }
    let name = match &args.name {
        Some(name) => AgentId::new(name.as_str())?,
        None => agent::machine_name()?,
    };
    let name = admit(&token, directory, &name, &args.roles).await?;
    kit::note_token(directory, &token)?;
    output::say(&format!("{name} is a member now; its kit is {}", directory.display()));
    Ok(())
}

/// The agent as a service, with what its kit lets it do.
async fn serve(directory: &Path, args: &JoinArgs) -> anyhow::Result<()> {
    let granted = renew::granted(directory)?.map(|granted| granted.roles).unwrap_or_default();
    let works = granted.iter().map(|role| role.as_str()).filter(|role| agent::ROLES.contains(role));
    service::install(&Options {
        program: std::env::current_exe().context("find this program")?,
        kit: Some(std::path::absolute(directory).context("find the kit's directory")?),
        nats: Vec::new(),
        // The kit's.
        name: None,
        roles: works.map(str::to_owned).collect(),
        scope: if args.user { Scope::User } else { Scope::System },
    })
    .await
}

/// The token, from wherever it was put.
fn line(args: &JoinArgs) -> anyhow::Result<String> {
    let mut text = String::new();
    match (&args.token_file, args.token.as_deref()) {
        (Some(path), _) => {
            std::fs::File::open(path)
                .and_then(|file| file.take(TOKEN_BYTES_MAX).read_to_string(&mut text))
                .with_context(|| format!("read the join token in {}", path.display()))?;
        }
        (None, Some("-")) => {
            std::io::stdin()
                .take(TOKEN_BYTES_MAX)
                .read_to_string(&mut text)
                .context("read the join token from stdin")?;
        }
        (None, token) => token.unwrap_or_default().clone_into(&mut text),
    }
    Ok(text)
}

/// What `flotilla` is called with to work as this member. Checked before anything is spent.
fn agent_arguments(directory: &Path, args: &JoinArgs) -> anyhow::Result<Vec<std::ffi::OsString>> {
    let directory = std::path::absolute(directory).context("find the kit's directory")?;
    let mut all: Vec<std::ffi::OsString> = vec!["agent".into(), "--dir".into(), directory.into()];
    all.extend(args.agent.iter().cloned());
    let checked = Cli::try_parse_from(std::iter::once("flotilla".into()).chain(all.clone()));
    match checked {
        Ok(_) => Ok(all),
        Err(error) => bail!("what stands behind `--` is for the agent: {} (A100)", error.render()),
    }
}

/// Joins, and writes the kit. Doing it again after a crash goes on where it was.
async fn admit(
    token: &JoinToken,
    directory: &Path,
    name: &AgentId,
    roles: &[String],
) -> anyhow::Result<String> {
    let identity = kit::begin(directory, name.as_str())?;
    if let Ok(ca) = identity.read_ca()
        && FleetFile::read(directory)?.is_some()
        && Fingerprint::of_pem(&ca)? != token.ca
    {
        bail!(
            "{} is a kit of another fleet; choose another directory with --dir, or remove it (K105)",
            directory.display()
        );
    }
    let now = now_ms() / 1000;
    if let Some(ago) = now.checked_sub(token.expires_at).filter(|ago| *ago > 0) {
        bail!(
            "this join token expired {ago} s ago by this machine's clock; ask for a new one (flotilla token create) (K107)"
        );
    }
    if token.gateways.is_empty() {
        bail!(
            "this join token names no gateway; make one with `flotilla token create --gateway HOST:PORT` (A117)"
        );
    }
    let public_key = identity.public_key()?;
    let mut tries = 0;
    loop {
        tries += 1;
        match ask_any(token, &identity, name, &public_key, roles).await {
            Ok((membership, gateway)) => {
                kit::finish(directory, &membership, &gateway)?;
                return Ok(membership.name);
            }
            Err(error) if is_transient(&error) && tries < TRIES => {
                output::say(&format!("{error:#}; trying again"));
                tokio::time::sleep(PAUSE * tries).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The first of the token's gateways that is the fleet's is asked.
async fn ask_any(
    token: &JoinToken,
    identity: &Identity,
    name: &AgentId,
    public_key: &str,
    roles: &[String],
) -> anyhow::Result<(v1::Membership, String)> {
    let mut failed = None;
    for address in &token.gateways {
        let ca_pem = match fetch_authority(address, token.ca).await {
            Ok(ca_pem) => ca_pem,
            Err(error) => {
                failed = Some(anyhow::Error::from(error));
                continue;
            }
        };
        let target = Target { addresses: vec![address.clone()], ca_pem, bearer: None };
        let mut client = Client::connect(&target).await?;
        let request = request(token, identity, name, public_key, roles)?;
        return Ok((client.join(request).await?, address.clone()));
    }
    Err(failed.context("this join token names no gateway")?)
}

fn request(
    token: &JoinToken,
    identity: &Identity,
    name: &AgentId,
    public_key: &str,
    roles: &[String],
) -> anyhow::Result<v1::JoinRequest> {
    let at_ms = now_ms();
    let purpose = Purpose::Join { token: &token.id };
    let statement = Statement { purpose, fleet: token.ca, name, at_ms };
    Ok(v1::JoinRequest {
        id: token.id.clone(),
        secret: token.secret.clone(),
        name: name.to_string(),
        public_key: public_key.to_owned(),
        roles: roles.to_vec(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").into(),
        proof: Some(v1::KeyProof { at_ms, signature: statement.sign(identity)? }),
    })
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
