//! `flotilla token`, `user`, `members` and `agents revoke`: the members of a closed fleet. All of
//! them call the gateway, from any machine.

pub(crate) mod credentials;
pub(crate) mod join;

use std::path::Path;

use anyhow::Context;
use gateway::client::{ClientError, GatewayTarget, MembershipClient, MembershipRenewal};
use identity::JoinToken;
use wire::{Timestamp, v1};

use crate::{
    args::{GlobalArgs, TokenCommand, TokenCreateArgs, UserCommand},
    fleet::{FleetArgs, FleetFile},
    output,
    this_machine::is_local_host,
};

pub(crate) async fn handle_tokens(flags: &GlobalArgs, command: TokenCommand) -> anyhow::Result<()> {
    let mut client = connect_gateway(&flags.fleet).await?;
    match command {
        TokenCommand::Create(args) => create_token(&mut client, args, flags.json).await?,
        TokenCommand::List => {
            let tokens = client.list_tokens().await?;
            output::print_json_or(flags.json, &tokens, || print_tokens(&tokens))?;
        }
        TokenCommand::Revoke { id } => client.revoke_token(&id).await?,
    }
    Ok(())
}

async fn create_token(
    client: &mut MembershipClient,
    args: TokenCreateArgs,
    json: bool,
) -> anyhow::Result<()> {
    let TokenCreateArgs { roles, uses, expires, pool, gateway } = args;
    let expires_in_s = expires.as_secs_f64();
    let request = v1::CreateTokenRequest { roles, pool, uses, expires_in_s, gateways: gateway };
    let made = client.create_token(request).await?;
    if json {
        return output::print_json(&made);
    }
    let token = made.token.unwrap_or_default();
    output::print_line(&made.line);
    output::print_status_text(&format!(
        "token {} lets in {} until {}, as {}. On each box:\n\n  \
         read -rs FLOTILLA_TOKEN && export FLOTILLA_TOKEN    # paste the line, press Enter\n  \
         flotilla join\n",
        output::escape_line(&token.id),
        if token.uses == 1 { "one box".into() } else { format!("{} boxes", token.uses) },
        output::format_time(token.expires_at.as_ref()),
        output::escape_line(&token.roles.join(", ")),
    ));
    if is_local_only(&made.line) {
        output::print_message(
            "other boxes cannot use it: this fleet only listens on loopback addresses; start it \
             with `flotilla up --listen ADDRESS --host NAME`",
        );
    }
    Ok(())
}

/// Returns true if all gateways of a token are addresses of this machine alone.
fn is_local_only(line: &str) -> bool {
    let Ok(token) = line.parse::<JoinToken>() else { return false };
    let is_local = |gateway: &String| {
        is_local_host(gateway.rsplit_once(':').map_or(&**gateway, |(host, _)| host))
    };
    !token.gateways.is_empty() && token.gateways.iter().all(is_local)
}

fn print_tokens(tokens: &[v1::JoinTokenInfo]) {
    let rows = tokens.iter().map(|token| {
        [
            token.id.clone(),
            token.roles.join(", "),
            token.pool.clone(),
            format!("{}/{}", token.uses_left, token.uses),
            end_text(token.revoked_at.as_ref(), token.expires_at.as_ref()),
            token.created_by.clone(),
            token.used_by.join(", "),
        ]
    });
    let headings = ["token", "roles", "pool", ">uses left", "expires", "made by", "used by"];
    output::print_list(headings, rows, "no tokens; `flotilla token create` makes one");
}

fn end_text(revoked: Option<&Timestamp>, expires: Option<&Timestamp>) -> String {
    match revoked {
        Some(_) => format!("revoked {}", output::format_time(revoked)),
        None => output::format_time(expires),
    }
}

pub(crate) async fn handle_users(flags: &GlobalArgs, command: UserCommand) -> anyhow::Result<()> {
    match command {
        UserCommand::Create { name, scope, expires, out } => {
            let identity = credentials::prepare_credentials(&out, &name)?;
            let mut client = connect_gateway(&flags.fleet).await?;
            let (pending, public_key) = credentials::PendingKey::create(&identity)?;
            let expires_in_s = expires.as_secs_f64();
            let scope = scope.to_string();
            let request = v1::CreateUserRequest { public_key, name, scope, expires_in_s };
            let created = client.create_user(request).await;
            // Without an answer, the fleet may have admitted this key, and the next try needs it.
            if created.as_ref().err().is_none_or(ClientError::is_transient) {
                pending.keep();
            }
            let membership = created?;
            // The user may be on another machine, where our address of the gateway is not
            // reachable.
            let gateway =
                membership.gateways.first().context("the fleet has no gateway address")?;
            credentials::write_credentials(&out, &membership, gateway)?;
            identity.write_creds_file(&out.join("nats.creds"))?;
            if flags.json {
                return output::print_json(&serde_json::json!({
                    "name": membership.name,
                    "scope": membership.scope,
                    "expires_at": output::format_time(membership.expires_at.as_ref()),
                    "directory": out.display().to_string(),
                }));
            }
            output::print_message(&format!(
                "{name} may use this fleet as {} until {}, with --dir {dir}; give that directory \
                 only to {name}. The nats command takes --creds {dir}/nats.creds and \
                 --tlsca {dir}/ca.pem",
                membership.scope,
                output::format_time(membership.expires_at.as_ref()),
                name = membership.name,
                dir = out.display(),
            ));
        }
        UserCommand::List => {
            let members = connect_gateway(&flags.fleet).await?.list_members().await?;
            print_members(
                members.into_iter().filter(|member| !member.scope.is_empty()).collect(),
                "no users yet; `flotilla user create NAME --out DIR` adds one",
                flags.json,
            )?;
        }
        UserCommand::Revoke { name } => revoke_member(&flags.fleet, &name).await?,
    }
    Ok(())
}

pub(crate) async fn list_members(flags: &GlobalArgs) -> anyhow::Result<()> {
    let members = connect_gateway(&flags.fleet).await?.list_members().await?;
    print_members(members, "no members yet; they join with `flotilla join`", flags.json)
}

pub(crate) async fn revoke_member(fleet: &FleetArgs, name: &str) -> anyhow::Result<()> {
    let revoked = connect_gateway(fleet).await?.revoke_member(name).await?;
    output::print_message(&format!(
        "{name} was revoked {}",
        output::format_time(revoked.revoked_at.as_ref())
    ));
    Ok(())
}

fn print_members(members: Vec<v1::MemberInfo>, empty: &str, json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(&members);
    }
    let rows = members.into_iter().map(member_row);
    output::print_list(MEMBER_HEADINGS, rows, empty);
    Ok(())
}

const MEMBER_HEADINGS: [&str; 8] =
    ["member", "may", "~?pool", "~joined", "good until", "~?token", "~?host", "~?version"];

fn member_row(member: v1::MemberInfo) -> [String; 8] {
    [
        member.name,
        if member.scope.is_empty() { member.roles.join(", ") } else { member.scope },
        output::text_or_dash(member.pool),
        output::format_time(member.joined_at.as_ref()),
        end_text(member.revoked_at.as_ref(), member.expires_at.as_ref()),
        output::text_or_dash(member.token),
        output::text_or_dash(member.host),
        output::text_or_dash(member.version),
    ]
}

pub(super) fn read_fleet_file(fleet: &FleetArgs) -> anyhow::Result<FleetFile> {
    let directory = fleet.dir.as_deref().context(
        "no fleet given; pass --dir with the fleet's directory or an admin's credentials, or set FLOTILLA_DIR",
    )?;
    FleetFile::read(directory)?.with_context(|| {
        format!(
            "no fleet has run in {}; pass the fleet's directory or an admin's credentials (A103)",
            directory.display()
        )
    })
}

pub(super) async fn connect_gateway(fleet: &FleetArgs) -> anyhow::Result<MembershipClient> {
    let file = read_fleet_file(fleet)?;
    let (_, identity) = fleet.read_member()?.with_context(|| {
        let directory = fleet.dir.as_deref().unwrap_or(Path::new("")).display();
        format!(
            "the fleet of {directory} is open: it has no members, and anyone who can reach it has \
             full access; create a closed one with `flotilla init --dir DIR`"
        )
    })?;
    let target = GatewayTarget {
        addresses: gateway_addresses(&file),
        ca_pem: identity.read_ca()?,
        bearer: Some(identity.read_bearer()?),
    };
    let connected = MembershipClient::connect_first(&target).await;
    connected.map_err(|error| fleet.explain_failure(error.into()))
}

fn gateway_addresses(file: &FleetFile) -> Vec<String> {
    file.gateway.split(',').map(reachable_address).collect()
}

/// `None` in an open fleet, and if the credentials do not expire.
pub(crate) fn membership_renewal(directory: &Path) -> anyhow::Result<Option<MembershipRenewal>> {
    let Some((file, identity)) = FleetFile::read_member(directory)? else { return Ok(None) };
    MembershipRenewal::new(directory.to_owned(), gateway_addresses(&file), identity)
}

/// Returns the address at which a gateway that listens on all addresses is reachable from this
/// machine.
fn reachable_address(address: &str) -> String {
    address.trim().replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
}

/// Returns the credentials directory of a joining box: `/var/lib/flotilla/credentials` for root,
/// otherwise `~/.flotilla/credentials`.
pub(crate) fn default_credentials_directory() -> anyhow::Result<std::path::PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(credentials::find_below(Path::new("/var/lib/flotilla")));
    }
    let home = std::env::var_os("HOME").context("HOME is not set; pass --dir")?;
    Ok(credentials::find_below(&Path::new(&home).join(".flotilla")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_listed_in_80_columns_without_broken_words() {
        let at = Some(Timestamp { seconds: 1_795_176_000, nanos: 0 });
        let member = v1::MemberInfo {
            name: "generator-12".into(),
            roles: ["trainer", "generator", "verifier", "evaluator"].map(str::to_owned).into(),
            pool: "default".into(),
            host: "strix-halo-1".into(),
            token: "k3v9x2m1".into(),
            version: "0.2.0+g1234abc".into(),
            joined_at: at,
            expires_at: at,
            ..Default::default()
        };
        let shown = output::fit_table(MEMBER_HEADINGS, [member_row(member)], Some(80));
        for word in ["generator-12", "verifier, evaluator", "2026-11-20 12:00:00Z", "--wide"] {
            assert!(shown.contains(word), "{word}:\n{shown}");
        }
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    }
}
