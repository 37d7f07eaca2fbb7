//! What a command would run with: every setting, its value, and where that comes from. Secrets are
//! said to be there.

use std::{collections::BTreeMap, ffi::OsStr};

use clap::{ArgMatches, Command, parser::ValueSource};
use serde::Serialize;

use crate::output;

const SECRET: &str = "(a secret)";

#[derive(Debug, Serialize)]
struct Setting {
    value: String,
    from: String,
}

/// Prints the settings of the command that was given, and of those it belongs to.
pub(crate) fn print(command: &Command, matches: &ArgMatches, json: bool) -> anyhow::Result<()> {
    let mut settings = BTreeMap::new();
    let (mut command, mut matches) = (command, matches);
    loop {
        settings.extend(of(command, matches));
        let Some((name, below)) = matches.subcommand() else { break };
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, below);
    }
    if json {
        return output::print_json(&settings);
    }
    for (name, Setting { value, from }) in settings {
        output::print(&format!("{name} = {value}  # {from}"));
    }
    Ok(())
}

fn of(command: &Command, matches: &ArgMatches) -> BTreeMap<String, Setting> {
    let mut settings = BTreeMap::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(source) = matches.value_source(id) else { continue };
        // A flag has a value of ours and no raw one of the user's.
        let raw = matches.try_get_raw(id).ok().flatten();
        let values: Vec<String> = raw.into_iter().flatten().map(shown).collect();
        let secret = argument.is_hide_env_values_set();
        let value = if secret { SECRET.to_owned() } else { values.join(",") };
        let from = match (source, argument.get_env().and_then(OsStr::to_str)) {
            (ValueSource::CommandLine, _) => "given".to_owned(),
            (ValueSource::EnvVariable, Some(name)) => format!("environment: {name}"),
            (_, Some(name)) => format!("default; {name} sets it"),
            _ => "default".to_owned(),
        };
        settings.insert(argument.get_long().unwrap_or(id).to_owned(), Setting { value, from });
    }
    settings
}

/// URLs without who logs in.
fn shown(value: &OsStr) -> String {
    let value = value.to_string_lossy();
    let without = |one: &str| match one.split_once("://") {
        Some((scheme, rest)) => match rest.split_once('/').unwrap_or((rest, "")).0.rsplit_once('@')
        {
            Some((login, _)) => format!("{scheme}://{SECRET}{}", &rest[login.len()..]),
            None => one.to_owned(),
        },
        None => one.to_owned(),
    };
    value.split(',').map(without).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_who_logs_in() {
        for (value, expected) in [
            ("nats://a:b@host:4222", "nats://(a secret)@host:4222"),
            ("nats://t@h,tls://x:y@z/p@q", "nats://(a secret)@h,tls://(a secret)@z/p@q"),
            ("s3://bucket/a@b", "s3://bucket/a@b"),
            ("a@b", "a@b"),
        ] {
            assert_eq!(shown(OsStr::new(value)), expected);
        }
    }
}
