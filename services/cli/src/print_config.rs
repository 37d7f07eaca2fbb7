//! `--print-config`: every setting of a command, its value and its source. Secrets are masked.

use std::{collections::BTreeMap, ffi::OsStr};

use clap::{ArgMatches, Command, parser::ValueSource};
use serde::Serialize;

use crate::output;

const SECRET_MASK: &str = "(a secret)";

#[derive(Debug, Serialize)]
struct ConfigSetting {
    value: String,
    from: String,
}

pub(crate) fn print_settings(
    command: &Command,
    matches: &ArgMatches,
    json: bool,
) -> anyhow::Result<()> {
    let mut settings = BTreeMap::new();
    let (mut command, mut matches) = (command, matches);
    loop {
        settings.extend(command_settings(command, matches));
        let Some((name, below)) = matches.subcommand() else { break };
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, below);
    }
    if json {
        return output::print_json(&settings);
    }
    for (name, ConfigSetting { value, from }) in settings {
        output::print_line(&format!("{name} = {value}  # {from}"));
    }
    Ok(())
}

fn command_settings(command: &Command, matches: &ArgMatches) -> BTreeMap<String, ConfigSetting> {
    let mut settings = BTreeMap::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(source) = matches.value_source(id) else { continue };
        // A flag has a parsed value but no raw text.
        let raw = matches.try_get_raw(id).ok().flatten();
        let values: Vec<String> = raw.into_iter().flatten().map(mask_credentials).collect();
        let secret = argument.is_hide_env_values_set();
        let value = if secret { SECRET_MASK.to_owned() } else { values.join(",") };
        let from = match (source, argument.get_env().and_then(OsStr::to_str)) {
            (ValueSource::CommandLine, _) => "given".to_owned(),
            (ValueSource::EnvVariable, Some(name)) => format!("environment: {name}"),
            (_, Some(name)) => format!("default; set {name} to change it"),
            _ => "default".to_owned(),
        };
        settings
            .insert(argument.get_long().unwrap_or(id).to_owned(), ConfigSetting { value, from });
    }
    settings
}

fn mask_credentials(value: &OsStr) -> String {
    let value = value.to_string_lossy();
    let without = |one: &str| match one.split_once("://") {
        Some((scheme, rest)) => match rest.split_once('/').unwrap_or((rest, "")).0.rsplit_once('@')
        {
            Some((login, _)) => format!("{scheme}://{SECRET_MASK}{}", &rest[login.len()..]),
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
            assert_eq!(mask_credentials(OsStr::new(value)), expected);
        }
    }
}
