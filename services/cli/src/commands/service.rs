//! `flotilla service`: this box's agent as a systemd service.

use anyhow::{Context, bail};
use systemd::{ServiceManager, ServiceOptions, ServiceScope};

use crate::{
    args::{ROLE_NAMES, ServiceArgs, ServiceCommand},
    fleet::FleetArgs,
    output,
    this_machine::this_program,
};

pub(crate) async fn run_service_command(
    fleet: &FleetArgs,
    command: &ServiceCommand,
) -> anyhow::Result<()> {
    match command {
        ServiceCommand::Unit(args) => {
            output::print_text(systemd::render_unit(&service_options(fleet, args)?).trim_end());
        }
        ServiceCommand::Install(args) => {
            install_service(&service_options(fleet, args)?).await?;
        }
    }
    Ok(())
}

pub(super) async fn install_service(options: &ServiceOptions) -> anyhow::Result<()> {
    let manager = ServiceManager::for_scope(options.scope)?;
    let unit = manager.install_unit(options).await?;
    output::print_message(&format!("wrote {}", unit.display()));
    if let Some(credentials) =
        options.credentials.as_ref().filter(|_| options.scope == ServiceScope::System)
    {
        systemd::give_to_service_user(credentials)?;
    }
    manager.enable_service(systemd::SERVICE_NAME).await?;
    output::print_message(&format!("{} is running and starts at boot", systemd::SERVICE_NAME));
    Ok(())
}

fn service_options(fleet: &FleetArgs, args: &ServiceArgs) -> anyhow::Result<ServiceOptions> {
    if let Some(wrong) = args.roles.iter().find(|role| !ROLE_NAMES.contains(&role.as_str())) {
        bail!("--roles {wrong}: the roles are {} (A101)", ROLE_NAMES.join(", "));
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => this_program()?,
    };
    let credentials =
        fleet.dir.as_ref().map(std::path::absolute).transpose().context("use --dir")?;
    Ok(ServiceOptions {
        program,
        credentials,
        nats: fleet.nats.clone(),
        name: args.name.clone(),
        roles: args.roles.clone(),
        scope: if args.user { ServiceScope::User } else { ServiceScope::System },
    })
}
