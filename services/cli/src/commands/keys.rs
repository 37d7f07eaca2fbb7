//! `flotilla init` and `flotilla keys`: the keys of a closed fleet.

use std::{path::Path, process::ExitCode};

use anyhow::{Context, bail};
use identity::CreateOutcome;

use crate::{
    args::{InitArgs, KeysCommand},
    clock::unix_time_s,
    fleet::{FleetArgs, FleetFile},
    fleet_keys::FleetKeys,
    output,
};

/// Creates the keys of a fleet if they are missing, and prints them.
pub(crate) fn init_keys(
    fleet: &FleetArgs,
    args: &InitArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let directory = fleet_directory(fleet)?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("use {} for a fleet", directory.display()))?;
    let directory = directory.canonicalize().context("find the fleet's directory")?;
    let mut hosts = args.hosts.clone();
    if hosts.is_empty() {
        hosts.push(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    let own =
        (!fleet.nats.is_empty()).then(|| external_servers_file(fleet, args, &directory, &hosts));
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
    print_keys(&keys, json)?;
    let starts = if own.is_none() {
        format!("`flotilla up --dir {}` starts it", directory.display())
    } else {
        format!("its NATS servers have {0}/nats as their keys, leaf nodes {0}/leaf", at.display())
    };
    output::print_message(&format!(
        "{starts}. Keep a copy of {}: anyone who has it controls the fleet",
        at.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns the fleet file of a fleet whose NATS servers the user runs.
///
/// # Errors
/// If `flotilla up` already manages a server in this directory.
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
    Ok(FleetFile { nats: fleet.nats.join(","), gateway, store, pid: 0, identity: None })
}

/// Runs a `flotilla keys` subcommand.
pub(crate) async fn run_keys_command(
    fleet: &FleetArgs,
    command: KeysCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let directory = fleet_directory(fleet)?;
    let Some(mut keys) = FleetKeys::open(directory)? else {
        bail!("{} has no keys; `flotilla init` makes them (K105)", directory.display());
    };
    match command {
        KeysCommand::Show => {}
        KeysCommand::RotateServer => {
            keys.authority_mut().rotate_server_certificate(unix_time_s())?;
            keys.write_server_keys()?;
            output::print_message("restart the servers to use the new certificate");
        }
        KeysCommand::RotateSigning => {
            keys.authority_mut().rotate_signing_key(unix_time_s())?;
            publish_keys(&keys).await?;
            output::print_message(
                "members are made with a new key from now on; `flotilla keys retire` ends the old \
                 one, once all have renewed",
            );
        }
        KeysCommand::Retire => {
            let retired = keys.authority_mut().retire_signing_keys(unix_time_s())?;
            publish_keys(&keys).await?;
            output::print_message(&format!("{retired} earlier signing keys retired"));
        }
    }
    print_keys(&keys, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes and pushes changed keys: running servers receive them now, others when they start.
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

/// Returns the fleet's directory.
fn fleet_directory(fleet: &FleetArgs) -> anyhow::Result<&Path> {
    fleet.dir.as_deref().context("pass --dir DIR, the fleet's directory (A103)")
}

/// Prints the public facts about the keys.
fn print_keys(keys: &FleetKeys, json: bool) -> anyhow::Result<()> {
    let about = keys.public_summary();
    output::print_json_or(json, &about, || {
        about.iter().for_each(|(what, is)| output::print_line(&format!("{what:<14} {is}")));
    })
}
