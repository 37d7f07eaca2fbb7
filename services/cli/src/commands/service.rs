//! `flotilla service`: this box's agent as a systemd service.

use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::{
    args::{ROLE_NAMES, ServiceArgs, ServiceCommand},
    fleet::FleetArgs,
    output,
    systemd::{self, ServiceManager, ServiceOptions, ServiceScope},
};

/// Runs a `flotilla service` subcommand.
pub(crate) async fn run_service_command(
    fleet: &FleetArgs,
    command: &ServiceCommand,
) -> anyhow::Result<ExitCode> {
    match command {
        ServiceCommand::Unit(args) => {
            output::print_text(systemd::render_unit(&service_options(fleet, args)?).trim_end());
        }
        ServiceCommand::Install(args) => {
            let options = service_options(fleet, args)?;
            install_service(&options).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Installs the unit, gives it access to its credentials and starts it.
pub(super) async fn install_service(options: &ServiceOptions) -> anyhow::Result<()> {
    let manager = ServiceManager::for_scope(options.scope)?;
    let unit = manager.install_unit(options).await?;
    output::print_message(&format!("wrote {}", unit.display()));
    if let Some(kit) =
        options.credentials.as_ref().filter(|_| options.scope == ServiceScope::System)
    {
        systemd::give_to_service_user(kit)?;
    }
    manager.enable_service(systemd::SERVICE_NAME).await?;
    output::print_message(&format!("{} is running and starts at boot", systemd::SERVICE_NAME));
    Ok(())
}

/// Returns the service options of the arguments.
///
/// # Errors
/// If a role is unknown.
fn service_options(fleet: &FleetArgs, args: &ServiceArgs) -> anyhow::Result<ServiceOptions> {
    if let Some(wrong) = args.roles.iter().find(|role| !ROLE_NAMES.contains(&role.as_str())) {
        bail!("--roles {wrong}: the roles are {} (A101)", ROLE_NAMES.join(", "));
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().context("find this program")?,
    };
    let kit = fleet.dir.as_ref().map(std::path::absolute).transpose().context("use --dir")?;
    Ok(ServiceOptions {
        program,
        credentials: kit,
        nats: fleet.nats.clone(),
        name: args.name.clone(),
        roles: args.roles.clone(),
        scope: if args.user { ServiceScope::User } else { ServiceScope::System },
    })
}
