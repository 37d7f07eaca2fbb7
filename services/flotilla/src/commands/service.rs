//! `flotilla service …`: this box's agent as a systemd service.

use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::{
    cli::{ServiceArgs, ServiceCommand},
    fleet::FleetArgs,
    output,
    service::{self, Manager, Options, Scope},
};

use super::agent::ROLES;

pub(crate) async fn service(
    fleet: &FleetArgs,
    command: &ServiceCommand,
) -> anyhow::Result<ExitCode> {
    match command {
        ServiceCommand::Unit(args) => {
            output::print(service::unit(&options(fleet, args)?).trim_end());
        }
        ServiceCommand::Install(args) => {
            let options = options(fleet, args)?;
            install(&options).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the unit, gives it its kit, and starts it.
pub(super) async fn install(options: &Options) -> anyhow::Result<()> {
    let manager = Manager::of(options.scope)?;
    let unit = manager.install(options).await?;
    output::say(&format!("wrote {}", unit.display()));
    if let Some(kit) = options.kit.as_ref().filter(|_| options.scope == Scope::System) {
        service::adopt(kit)?;
    }
    manager.enable(service::NAME).await?;
    output::say(&format!("{} works, and starts with this box", service::NAME));
    Ok(())
}

fn options(fleet: &FleetArgs, args: &ServiceArgs) -> anyhow::Result<Options> {
    if let Some(wrong) = args.roles.iter().find(|role| !ROLES.contains(&role.as_str())) {
        bail!("--roles {wrong}: the roles are {} (A101)", ROLES.join(", "));
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().context("find this program")?,
    };
    let kit = fleet.dir.as_ref().map(std::path::absolute).transpose().context("use --dir")?;
    Ok(Options {
        program,
        kit,
        nats: fleet.nats.clone(),
        name: args.name.clone(),
        roles: args.roles.clone(),
        scope: if args.user { Scope::User } else { Scope::System },
    })
}
