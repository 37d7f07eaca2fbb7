//! `flotilla join`: from a join token to a running agent.

use std::{io::Read, os::unix::process::CommandExt, path::Path, process::Command, time::Duration};

use anyhow::{Context, bail};
use clap::Parser;
use gateway::client::{ClientError, GatewayTarget, MembershipClient, fetch_authority};
use gateway::discovery;
use identity::{Fingerprint, JoinToken, MemberIdentity, ProofPurpose, ProofStatement};
use systemd::{ServiceOptions, ServiceScope};
use wire::{
    AgentId,
    clock::{unix_millis, unix_seconds},
    v1,
};

use crate::{
    args::{Cli, JoinArgs, ROLE_NAMES},
    commands::{agent, service},
    fleet::{FleetArgs, FleetFile},
    output,
    this_machine::{host_name, this_program},
};

use super::{credentials, default_credentials_directory};

const ATTEMPTS_MAX: u32 = 5;
/// Multiplied by the number of the attempt.
const RETRY_BACKOFF: Duration = Duration::from_secs(1);
/// Address in a token that requests a search of the network.
const DISCOVER_ADDRESS: &str = "discover";
const TOKEN_BYTES_MAX: u64 = 64 << 10;

pub(crate) async fn join_fleet(fleet: &FleetArgs, args: JoinArgs) -> anyhow::Result<()> {
    let directory = match &fleet.dir {
        Some(directory) => directory.clone(),
        None => default_credentials_directory()?,
    };
    let command = build_agent_arguments(&directory, &args)?;
    let line = read_token_line(&args)?;
    match credentials::find_joined_member(&directory, &line)? {
        Some(name) if args.name.as_ref().is_none_or(|wanted| *wanted == name) => {
            output::print_message(&format!(
                "{name} is already a member; its credentials are in {}",
                directory.display()
            ));
        }
        _ if line.trim().is_empty() => bail!(
            "no join token: `flotilla token create` on the fleet's machine prints one; pass it as \
             FLOTILLA_TOKEN, as --token-file FILE, or as the argument (A102)"
        ),
        _ => request_membership(line.parse()?, &directory, &args).await?,
    }
    if args.no_agent {
        return Ok(());
    }
    if args.service {
        install_agent_service(&directory, &args).await?;
        return Ok(());
    }
    // The agent replaces this process, so that the token is no longer visible in its arguments.
    let mut agent = Command::new(this_program()?);
    agent.args(&command);
    for secret in ["FLOTILLA_TOKEN", "FLOTILLA_NATS"] {
        agent.env_remove(secret);
    }
    Err(agent.exec()).context("start the agent")
}

async fn request_membership(
    mut token: JoinToken,
    directory: &Path,
    args: &JoinArgs,
) -> anyhow::Result<()> {
    token.gateways.retain(|address| address != DISCOVER_ADDRESS);
    if args.discover || token.gateways.is_empty() {
        token.gateways = discovery::find_gateways(&token.ca).await?;
    }
    let name = match &args.name {
        Some(name) => AgentId::new(name.as_str())?,
        None => agent::host_agent_id()?,
    };
    let name = join_with_retries(&token, directory, &name, &args.roles).await?;
    credentials::record_token(directory, &token)?;
    output::print_message(&format!(
        "{name} joined the fleet; its credentials are in {}",
        directory.display()
    ));
    Ok(())
}

async fn install_agent_service(directory: &Path, args: &JoinArgs) -> anyhow::Result<()> {
    let granted =
        credentials::read_grant(directory)?.map(|granted| granted.roles).unwrap_or_default();
    let works = granted.iter().map(|role| role.as_str()).filter(|role| ROLE_NAMES.contains(role));
    service::install_service(&ServiceOptions {
        program: this_program()?,
        credentials: Some(
            std::path::absolute(directory).context("find the credentials' directory")?,
        ),
        nats: Vec::new(),
        // The name comes from the credentials.
        name: None,
        roles: works.map(str::to_owned).collect(),
        scope: if args.user { ServiceScope::User } else { ServiceScope::System },
    })
    .await
}

fn read_token_line(args: &JoinArgs) -> anyhow::Result<String> {
    let read = |input: &mut dyn Read| {
        let mut text = String::new();
        input.take(TOKEN_BYTES_MAX).read_to_string(&mut text).map(|_| text)
    };
    match (&args.token_file, args.token.as_deref()) {
        (Some(path), _) => std::fs::File::open(path)
            .and_then(|mut file| read(&mut file))
            .with_context(|| format!("read the join token in {}", path.display())),
        (None, Some("-")) => read(&mut std::io::stdin()).context("read the join token from stdin"),
        (None, token) => Ok(token.unwrap_or_default().to_owned()),
    }
}

/// Checked before the token is used.
fn build_agent_arguments(
    directory: &Path,
    args: &JoinArgs,
) -> anyhow::Result<Vec<std::ffi::OsString>> {
    let directory = std::path::absolute(directory).context("find the credentials' directory")?;
    let mut all: Vec<std::ffi::OsString> = vec!["agent".into(), "--dir".into(), directory.into()];
    all.extend(args.agent.iter().cloned());
    let checked = Cli::try_parse_from(std::iter::once("flotilla".into()).chain(all.clone()));
    match checked {
        Ok(_) => Ok(all),
        Err(error) => bail!("arguments after `--` are for the agent: {} (A100)", error.render()),
    }
}

/// After a crash, a second call continues with the same key.
async fn join_with_retries(
    token: &JoinToken,
    directory: &Path,
    name: &AgentId,
    roles: &[String],
) -> anyhow::Result<String> {
    let identity = credentials::prepare_credentials(directory, name.as_str())?;
    if let Ok(ca) = identity.read_ca()
        && FleetFile::read(directory)?.is_some()
        && Fingerprint::from_pem(&ca)? != token.ca
    {
        bail!(
            "{} has credentials of another fleet; choose another directory with --dir, or remove it (K105)",
            directory.display()
        );
    }
    if let Some(ago) = unix_seconds().checked_sub(token.expires_at).filter(|ago| *ago > 0) {
        bail!(
            "join token expired {ago} s ago by this machine's clock; create a new one with `flotilla token create` (K107)"
        );
    }
    if token.gateways.is_empty() {
        bail!(
            "join token has no gateway address; create one with `flotilla token create --gateway HOST:PORT` (A117)"
        );
    }
    let mut tries = 0;
    loop {
        tries += 1;
        match join_any_gateway(token, &identity, name, roles).await {
            Ok((membership, gateway)) => {
                credentials::write_credentials(directory, &membership, &gateway)?;
                return Ok(membership.name);
            }
            Err(error)
                if error.downcast_ref().is_some_and(ClientError::is_transient)
                    && tries < ATTEMPTS_MAX =>
            {
                output::print_message(&format!("{error:#}; trying again"));
                tokio::time::sleep(RETRY_BACKOFF * tries).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Asks the first gateway of the token that proves to be the fleet's.
async fn join_any_gateway(
    token: &JoinToken,
    identity: &MemberIdentity,
    name: &AgentId,
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
        let target = GatewayTarget { addresses: vec![address.clone()], ca_pem, bearer: None };
        let mut client = MembershipClient::connect_first(&target).await?;
        let (pending, public_key) = credentials::PendingKey::create(identity)?;
        let at_ms = unix_millis();
        let purpose = ProofPurpose::Join { token: &token.id };
        let statement = ProofStatement { purpose, fleet: token.ca, name, at_ms };
        let request = v1::JoinRequest {
            id: token.id.clone(),
            secret: token.secret.clone(),
            name: name.to_string(),
            public_key,
            roles: roles.to_vec(),
            host: host_name(),
            version: env!("CARGO_PKG_VERSION").into(),
            proof: Some(v1::KeyProof { at_ms, signature: statement.sign_with(identity)? }),
        };
        let joined = client.join_fleet(request).await;
        // Without an answer, the fleet may have admitted this key, and the next try needs it.
        if joined.as_ref().err().is_none_or(ClientError::is_transient) {
            pending.keep();
        }
        return Ok((joined?, address.clone()));
    }
    Err(failed.context("join token has no gateway address")?)
}
