//! Letting members into a closed fleet, and cutting them off.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a join token: one line, to be given to `flotilla join` on another box.
    Create(TokenArgs),
    /// Which there are, without their secrets, which are kept nowhere.
    List,
    /// Let nobody in with a token any more; who came in with it stays.
    Revoke { id: String },
}

#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// What those who come in with it may do: trainer, generator, verifier, evaluator, watcher.
    #[arg(long, value_delimiter = ',', required = true)]
    pub roles: Vec<String>,
    /// How many boxes it lets in.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub uses: u32,
    /// For how long: 30m, 12h, 7d.
    #[arg(long, default_value = "1h", value_parser = span)]
    pub expires: Duration,
    /// The pool of those who come in with it.
    #[arg(long, default_value = "default")]
    pub pool: String,
    /// Where boxes reach the gateway, as HOST:PORT; `discover` has them look for it on their
    /// network (`up --announce`). Default: as the fleet was told (`--host`).
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT")]
    pub gateway: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The line that `flotilla token create` printed; `-` reads it from stdin. What stands here is
    /// seen by everybody on this machine until the box has joined: FLOTILLA_TOKEN, --token-file
    /// and `-` are not.
    #[arg(env = "FLOTILLA_TOKEN", hide_env_values = true, required_unless_present = "token_file")]
    pub token: Option<String>,
    /// A file with that line.
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
    /// Look for the fleet on this network, wherever the token says that it is. A token that says
    /// nothing is looked for anyway.
    #[arg(long)]
    pub discover: bool,
    /// This box's name in the fleet. Default: this machine's.
    #[arg(long, env = "FLOTILLA_NAME")]
    pub name: Option<String>,
    /// Some of the token's roles. Default: all of them.
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
    /// Join, and run nothing.
    #[arg(long, conflicts_with = "service")]
    pub no_agent: bool,
    /// Join, and run the agent as a systemd service of this box. Its settings are in
    /// /etc/flotilla/agent.env.
    #[arg(long, conflicts_with = "agent")]
    pub service: bool,
    /// The service is yours alone, without root.
    #[arg(long, requires = "service")]
    pub user: bool,
    /// Options of `flotilla agent`, which then works here.
    #[arg(last = true, value_name = "AGENT OPTIONS")]
    pub agent: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Make a kit for somebody: a directory that lets its owner use this fleet by --dir.
    Create {
        name: String,
        /// reader sees everything; operator also submits and steers runs; admin also lets others in.
        #[arg(long, default_value = "reader")]
        scope: String,
        /// For how long: 12h, 30d, 1y.
        #[arg(long, default_value = "30d", value_parser = span)]
        expires: Duration,
        /// The kit's directory. Its key is made there and goes nowhere else.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    List,
    /// Cut a user off.
    Revoke {
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum MembersCommand {
    /// Agents and users that were let in; the fleet's own are not among them.
    List,
}

/// `90s`, `30m`, `12h`, `7d`, `1y`
fn span(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no span of time; write 30m, 12h or 7d");
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
            assert_eq!(span(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for wrong in ["", "1", "h", "0h", "-1h", "1.5h", "1w", "1 h", "ä", "9999999d"] {
            assert!(span(wrong).is_err(), "{wrong:?}");
        }
    }
}
