//! `flotilla token …`, `user …`, `members …` and `agents revoke`: who belongs to a closed fleet.
//! All of it goes through the gateway, from the bus host as from anywhere.

pub(crate) mod join;
pub(crate) mod kit;
pub(crate) mod renew;

use std::{path::Path, process::ExitCode};

use anyhow::Context;
use authority::Identity;
use gateway::client::{Client, ClientError, Target};
use wire::v1;

use crate::{
    cli::{MembersCommand, TokenArgs, TokenCommand, UserCommand},
    fleet::{FleetArgs, FleetFile},
    output,
};

pub(crate) async fn token(
    fleet: &FleetArgs,
    command: TokenCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut client = client(fleet).await?;
    match command {
        TokenCommand::Create(args) => create_token(&mut client, args, json).await?,
        TokenCommand::List => {
            let tokens = client.tokens().await?;
            if json {
                output::print_json(&tokens)?;
            } else {
                list_tokens(&tokens);
            }
        }
        TokenCommand::Revoke { id } => client.revoke_token(&id).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn create_token(client: &mut Client, args: TokenArgs, json: bool) -> anyhow::Result<()> {
    let TokenArgs { roles, uses, expires, pool, gateway } = args;
    let expires_in_s = expires.as_secs_f64();
    let request = v1::CreateTokenRequest { roles, pool, uses, expires_in_s, gateways: gateway };
    let made = client.create_token(request).await?;
    if json {
        return output::print_json(&made);
    }
    let token = made.token.unwrap_or_default();
    output::print(&made.line);
    output::say(&format!(
        "token {} lets in {} until {}, as {}. On each box:\n\n  \
         read -rs FLOTILLA_TOKEN && export FLOTILLA_TOKEN    # paste the line, press Enter\n  \
         flotilla join\n",
        token.id,
        if token.uses == 1 { "one box".into() } else { format!("{} boxes", token.uses) },
        output::time(token.expires_at.as_ref()),
        token.roles.join(", "),
    ));
    Ok(())
}

fn list_tokens(tokens: &[v1::JoinTokenInfo]) {
    let rows = tokens.iter().map(|token| {
        let revoked =
            token.revoked_at.as_ref().map(|at| format!("revoked {}", output::time(Some(at))));
        [
            token.id.clone(),
            token.roles.join(", "),
            token.pool.clone(),
            format!("{}/{}", token.uses_left, token.uses),
            revoked.unwrap_or_else(|| output::time(token.expires_at.as_ref())),
            token.created_by.clone(),
            token.used_by.join(", "),
        ]
    });
    let headings = ["token", "roles", "pool", ">uses left", "expires", "made by", "used by"];
    output::print(&output::table(headings, rows));
}

pub(crate) async fn user(
    fleet: &FleetArgs,
    command: UserCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match command {
        UserCommand::Create { name, scope, expires, out } => {
            let identity = kit::begin(&out, &name)?;
            let request = v1::CreateUserRequest {
                public_key: identity.public_key()?,
                name,
                scope,
                expires_in_s: expires.as_secs_f64(),
            };
            let membership = client(fleet).await?.create_user(request).await?;
            // Whoever gets it is elsewhere: where we reached the gateway may be nowhere to him.
            let gateway = membership.gateways.first().context("the fleet names no gateway")?;
            kit::finish(&out, &membership, gateway)?;
            output::say(&format!(
                "{} may use this fleet as {} until {}, with --dir {}; keep that directory to \
                 whoever it is for",
                membership.name,
                membership.scope,
                output::time(membership.expires_at.as_ref()),
                out.display(),
            ));
        }
        UserCommand::List => {
            let members = client(fleet).await?.members().await?;
            print(members.into_iter().filter(|member| !member.scope.is_empty()).collect(), json)?;
        }
        UserCommand::Revoke { name } => revoke(fleet, &name).await?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn members(
    fleet: &FleetArgs,
    MembersCommand::List: MembersCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    print(client(fleet).await?.members().await?, json)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn revoke(fleet: &FleetArgs, name: &str) -> anyhow::Result<()> {
    let revoked = client(fleet).await?.revoke(name).await?;
    output::say(&format!("{name} is cut off since {}", output::time(revoked.revoked_at.as_ref())));
    Ok(())
}

fn print(members: Vec<v1::MemberInfo>, json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(&members);
    }
    let rows = members.into_iter().map(|member| {
        let revoked =
            member.revoked_at.as_ref().map(|at| format!("revoked {}", output::time(Some(at))));
        [
            member.name,
            if member.scope.is_empty() { member.roles.join(", ") } else { member.scope },
            if member.pool.is_empty() { "-".into() } else { member.pool },
            output::time(member.joined_at.as_ref()),
            revoked.unwrap_or_else(|| output::time(member.expires_at.as_ref())),
            if member.token.is_empty() { "-".into() } else { member.token },
            if member.host.is_empty() { "-".into() } else { member.host },
            if member.version.is_empty() { "-".into() } else { member.version },
        ]
    });
    let headings =
        ["member", "may", "?pool", "joined", "good until", "?token", "?host", "?version"];
    output::print(&output::table(headings, rows));
    Ok(())
}

/// The gateway of a closed fleet, called as whoever `--dir` is.
async fn client(fleet: &FleetArgs) -> anyhow::Result<Client> {
    let directory = fleet.dir.as_deref().context(
        "which fleet? pass --dir with the fleet's directory or an admin's kit, or set FLOTILLA_DIR",
    )?;
    let file = FleetFile::read(directory)?
        .with_context(|| format!("no fleet was ever up in {}", directory.display()))?;
    let identity = fleet.identity()?.with_context(|| {
        let directory = directory.display();
        format!("the fleet of {directory} is open: it has no members, and whoever reaches it may do everything; `flotilla init --dir DIR` makes a closed one")
    })?;
    Ok(Client::connect(&target(&file, &identity)?).await?)
}

/// How a member calls its gateway.
pub(crate) fn target(file: &FleetFile, identity: &Identity) -> anyhow::Result<Target> {
    Ok(Target {
        addresses: file.gateway.split(',').map(reachable).collect(),
        ca_pem: identity.read_ca()?,
        bearer: Some(identity.read_bearer()?),
    })
}

/// Where to call what listens everywhere.
fn reachable(address: &str) -> String {
    address.trim().replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
}

/// The directory of a member that joins, when none is named.
pub(crate) fn default_kit() -> anyhow::Result<std::path::PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/flotilla/kit".into());
    }
    let home = std::env::var_os("HOME").context("HOME is not set; pass --dir")?;
    Ok(Path::new(&home).join(".flotilla/kit"))
}

/// Whether asking again may help.
pub(crate) fn is_transient(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ClientError>().is_some_and(ClientError::is_transient)
}
