//! `flotilla init` and `flotilla keys`: the keys of a closed fleet.

use std::{path::Path, process::ExitCode};

use anyhow::{Context, bail};
use authority::Created;
use serde_json::json;

use crate::{
    cli::{InitArgs, KeysCommand},
    fleet::{FleetArgs, FleetFile},
    keys::{Keys, now},
    output,
};

pub(crate) fn init(fleet: &FleetArgs, args: &InitArgs, json: bool) -> anyhow::Result<ExitCode> {
    let directory = directory(fleet)?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("use {} for a fleet", directory.display()))?;
    let directory = directory.canonicalize().context("find the fleet's directory")?;
    let mut hosts = args.hosts.clone();
    if hosts.is_empty() {
        hosts.push(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    let own = (!fleet.nats.is_empty()).then(|| own_servers(fleet, args, &directory, &hosts));
    let own = own.transpose()?;
    let (keys, created) = Keys::make(&directory, &args.name, &hosts)?;
    keys.write_server_keys()?;
    if let Some(file) = &own {
        keys.write_fleet_files(file)?;
    }
    let at = keys.directory();
    match created {
        Created::New => output::say(&format!("made the fleet's keys in {}", at.display())),
        Created::WasThere => {
            output::say(&format!("{} has a fleet's keys already; nothing was lost", at.display()));
        }
    }
    show(&keys, json)?;
    let starts = if own.is_none() {
        format!("`flotilla up --dir {}` starts it", directory.display())
    } else {
        format!("its NATS servers have {0}/nats as their keys, leaf nodes {0}/leaf", at.display())
    };
    output::say(&format!("{starts}. Keep a copy of {}: whoever has it is the fleet", at.display()));
    Ok(ExitCode::SUCCESS)
}

/// Where the fleet is that has NATS servers of the user's own.
fn own_servers(
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
    // Files are where the coordinator says.
    let store = String::new();
    Ok(FleetFile { nats: fleet.nats.join(","), gateway, store, pid: 0, identity: None })
}

pub(crate) async fn keys(
    fleet: &FleetArgs,
    command: KeysCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let directory = directory(fleet)?;
    let Some(mut keys) = Keys::open(directory)? else {
        bail!("{} has no keys; `flotilla init` makes them (K105)", directory.display());
    };
    match command {
        KeysCommand::Show => {}
        KeysCommand::RotateServer => {
            keys.authority().rotate_server(now())?;
            keys.write_server_keys()?;
            output::say("the servers show their new certificate when they start again");
        }
        KeysCommand::RotateSigning => {
            keys.authority().rotate_signing(now())?;
            tell(&keys).await?;
            output::say(
                "members are made with a new key from now on; `flotilla keys retire` ends the old \
                 one, once all have renewed",
            );
        }
        KeysCommand::Retire => {
            let retired = keys.authority().retire(now())?;
            tell(&keys).await?;
            output::say(&format!("{retired} earlier signing keys count no longer"));
        }
    }
    show(&keys, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Servers that are up hear of it now, others when they start.
async fn tell(keys: &Keys) -> anyhow::Result<()> {
    keys.refresh()?;
    keys.write_server_keys()?;
    if !keys.tell().await? {
        output::say("no NATS server of the fleet is up here: it hears of it when it starts");
    }
    Ok(())
}

fn directory(fleet: &FleetArgs) -> anyhow::Result<&Path> {
    fleet.dir.as_deref().context("pass --dir DIR, the fleet's directory (A103)")
}

fn show(keys: &Keys, json: bool) -> anyhow::Result<()> {
    let about = keys.about();
    if json {
        output::print(&json!(about).to_string());
    } else {
        for (what, is) in about {
            output::print(&format!("{what:<14} {is}"));
        }
    }
    Ok(())
}
