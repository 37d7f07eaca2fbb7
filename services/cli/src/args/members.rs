//! Arguments about the members of a closed fleet: join tokens, joining and users.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use identity::UserScope;

/// The subcommands of `flotilla token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a join token: one line, for `flotilla join` on another box.
    Create(TokenCreateArgs),
    /// List join tokens, without their secrets, which are never stored.
    List,
    /// Revoke a join token; members that joined with it stay.
    Revoke {
        /// Id of the token, as in `flotilla token list`
        id: String,
    },
}

/// Arguments of `flotilla token create`.
#[derive(Debug, Args)]
pub(crate) struct TokenCreateArgs {
    /// Roles that the token grants: trainer, generator, verifier, scorer,
    /// evaluator, watcher, server
    #[arg(long, value_delimiter = ',', required = true)]
    pub roles: Vec<String>,
    /// Number of boxes that may join with the token
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub uses: u32,
    /// Lifetime of the token: 30m, 12h, 7d
    #[arg(long, default_value = "1h", value_parser = parse_duration)]
    pub expires: Duration,
    /// Pool of the boxes that join with the token
    #[arg(long, default_value = "default")]
    pub pool: String,
    /// Gateway addresses as HOST:PORT, or `discover` to search the network (`up --announce`)
    /// [default: the fleet's --host names]
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT")]
    pub gateway: Vec<String>,
}

/// Arguments of `flotilla join`.
#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// Join token, as printed by `flotilla token create`; `-` reads it from stdin
    ///
    /// A token on the command line is visible to all users of this machine until the box has
    /// joined. FLOTILLA_TOKEN, --token-file and `-` are not visible. A box that has joined needs
    /// none.
    #[arg(env = "FLOTILLA_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// File with the join token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
    /// Search this network for the fleet, even if the token names a gateway; a token without a
    /// gateway always searches
    #[arg(long)]
    pub discover: bool,
    /// Name of this box in the fleet [default: this machine's name]
    #[arg(long, env = "FLOTILLA_NAME")]
    pub name: Option<String>,
    /// Roles to request, a subset of the token's [default: all of them]
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
    /// Join without starting an agent
    #[arg(long, conflicts_with = "service")]
    pub no_agent: bool,
    /// Join, and run the agent as a systemd service configured in /etc/flotilla/agent.env
    #[arg(long, conflicts_with = "agent")]
    pub service: bool,
    /// Install a user service, without root
    #[arg(long, requires = "service")]
    pub user: bool,
    /// Options for the `flotilla agent` that starts after joining
    #[arg(last = true, value_name = "AGENT OPTIONS")]
    pub agent: Vec<OsString>,
}

/// The subcommands of `flotilla user`.
#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Create credentials for a user: a directory that gives access to the fleet with --dir.
    Create {
        /// Name of the user.
        name: String,
        /// Scope: client (use served models), reader (view), operator (also submit and control runs),
        /// admin (also admit members).
        #[arg(long, default_value = "reader")]
        scope: UserScope,
        /// Lifetime of the credentials: 12h, 30d, 1y.
        #[arg(long, default_value = "30d", value_parser = parse_duration)]
        expires: Duration,
        /// Directory for the credentials; the private key never leaves it.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// List users.
    List,
    /// Revoke a user's access.
    Revoke {
        /// Name of the user, as in `flotilla user list`
        name: String,
    },
}

/// The subcommands of `flotilla members`.
#[derive(Debug, Subcommand)]
pub(crate) enum MembersCommand {
    /// List the agents and users that were admitted, without the fleet's own members.
    List,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; write 30m, 12h or 7d");
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(wrong)?;
    let unit_s = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        "y" => 365 * 24 * 3600,
        _ => return Err(wrong()),
    };
    let count: u64 =
        digits.parse().ok().filter(|count| (1..=100_000).contains(count)).ok_or_else(wrong)?;
    Ok(Duration::from_secs(count * unit_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_a_number_and_a_unit() {
        for (text, seconds) in [("90s", 90), ("1h", 3600), ("7d", 604_800), ("1y", 31_536_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for wrong in ["", "1", "h", "0h", "-1h", "1.5h", "1w", "1 h", "ä", "9999999d"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
