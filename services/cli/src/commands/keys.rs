//! `flotilla init` and `flotilla keys`: the keys of a closed fleet.

use std::path::Path;

use anyhow::{Context, bail};
use identity::CreateOutcome;
use wire::clock::unix_seconds;

use super::first_spec;
use crate::{
    args::{GlobalArgs, InitArgs, KeysCommand},
    fleet::{FleetArgs, FleetFile},
    fleet_keys::FleetKeys,
    output, this_machine,
};

const DEFAULT_NAME: &str = "flotilla";

pub(crate) fn init_keys(flags: &GlobalArgs, args: &InitArgs) -> anyhow::Result<()> {
    let directory = flags.fleet.require_directory()?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("use {} for a fleet", directory.display()))?;
    let directory = directory.canonicalize().context("find the fleet's directory")?;
    let mut hosts = args.hosts.clone();
    if hosts.is_empty() {
        hosts.push(this_machine::host_name());
    }
    let own = (!flags.fleet.nats.is_empty())
        .then(|| external_servers_file(&flags.fleet, args, &directory, &hosts));
    let own = own.transpose()?;
    let (keys, created) = FleetKeys::create_or_open(&directory, &args.name, &hosts)?;
    keys.write_server_keys()?;
    if let Some(file) = &own {
        keys.write_fleet_files(file)?;
    }
    let at = keys.keys_directory();
    output::print_message(&match created {
        CreateOutcome::New => format!("created the fleet's keys in {}", at.display()),
        CreateOutcome::AlreadyExisted => {
            format!("{} already has a fleet's keys; nothing changed", at.display())
        }
    });
    print_keys(&keys, flags.json)?;
    let starts = if own.is_none() {
        format!("`flotilla up --dir {}` starts it", directory.display())
    } else {
        format!("its NATS servers have {0}/nats as their keys, leaf nodes {0}/leaf", at.display())
    };
    output::print_message(&format!(
        "{starts}. Keep a copy of {}: anyone who has it controls the fleet",
        at.display()
    ));
    let is_plain = args.name == DEFAULT_NAME && args.hosts.is_empty() && own.is_none();
    if is_plain && !flags.json {
        first_spec::ask_first_spec(&directory)?;
    }
    Ok(())
}

fn external_servers_file(
    fleet: &FleetArgs,
    args: &InitArgs,
    directory: &Path,
    hosts: &[String],
) -> anyhow::Result<FleetFile> {
    let before = FleetFile::read(directory)?;
    if before.as_ref().is_some_and(|file| file.pid != 0) {
        bail!(
            "--nats: `flotilla up` ran this fleet with a server of its own; leave --nats out, or \
             take another directory (A102)"
        );
    }
    let before = before.map(|file| file.gateway);
    let here = || format!("{}:7070", hosts.first().map_or("127.0.0.1", String::as_str));
    let gateway = args.gateway.clone().or(before).unwrap_or_else(here);
    // The coordinator decides the location of the store.
    let store = String::new();
    Ok(FleetFile {
        nats: fleet.nats.join(","),
        gateway,
        store,
        pid: 0,
        agents: Vec::new(),
        identity: None,
    })
}

pub(crate) async fn handle_keys(flags: &GlobalArgs, command: KeysCommand) -> anyhow::Result<()> {
    let directory = flags.fleet.require_directory()?;
    let Some(mut keys) = FleetKeys::open(directory)? else {
        bail!("{} has no keys; `flotilla init` makes them (K105)", directory.display());
    };
    match command {
        KeysCommand::Show => {}
        KeysCommand::RotateServer => {
            keys.authority_mut().rotate_server_certificate(unix_seconds())?;
            keys.write_server_keys()?;
            output::print_message("restart the servers to use the new certificate");
        }
        KeysCommand::RotateSigning => {
            keys.authority_mut().rotate_signing_key(unix_seconds())?;
            publish_keys(&keys).await?;
            output::print_message(
                "members are made with a new key from now on; `flotilla keys retire` ends the old \
                 one, once all have renewed",
            );
        }
        KeysCommand::Retire => {
            let retired = keys.authority_mut().retire_signing_keys(unix_seconds())?;
            publish_keys(&keys).await?;
            output::print_message(&format!("{retired} earlier signing keys retired"));
        }
    }
    print_keys(&keys, flags.json)?;
    Ok(())
}

/// Running servers receive them now, others when they start.
async fn publish_keys(keys: &FleetKeys) -> anyhow::Result<()> {
    keys.write_own_credentials()?;
    keys.write_server_keys()?;
    if !keys.push_to_servers().await? {
        output::print_message(
            "no NATS server of the fleet is running here: it loads the change when it starts",
        );
    }
    Ok(())
}

fn print_keys(keys: &FleetKeys, json: bool) -> anyhow::Result<()> {
    let about = keys.public_summary();
    output::print_json_or(json, &about, || {
        about.iter().for_each(|(what, is)| output::print_line(&format!("{what:<14} {is}")));
    })
}
