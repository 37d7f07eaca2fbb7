//! `flotilla stack`: versions of llama.cpp and PyTorch, tried before agents start with them.

use std::{path::Path, process::ExitCode};

use agent::AgentStack;
use anyhow::Context;
use hardware::{HardwareProfile, StackVersions};
use stacks::{InstalledStack, MakeEnvironment, StackDirectory, StackPrograms};

use super::doctor::burn_in_box;
use crate::{
    args::{AgentArgs, StackCommand, StackInstallArgs, StackPlaceArgs, StackUseArgs},
    exit_codes, output,
};

const NEXT_START: &str = "agents of this box use it from their next start";

pub(crate) async fn handle_stacks(command: StackCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        StackCommand::List(place) => {
            let stacks = open_stacks(&place)?.list_stacks()?;
            output::print_json_or(json, &stacks, || print_stacks(&stacks))?;
        }
        StackCommand::Install(args) => install_stack(&args, json)?,
        StackCommand::Use(args) => return use_stack(args, json).await,
        StackCommand::RollBack { from, place } => {
            let stacks = open_stacks(&place)?;
            if let Some(from) = from.filter(|from| !stacks.is_in_use(from)) {
                output::print_message(&format!("stack {from} is not in use: nothing to change"));
                return Ok(ExitCode::SUCCESS);
            }
            let name = stacks.roll_back()?;
            let name = name.map_or("no stack".to_owned(), |name| format!("stack {name}"));
            output::print_message(&format!("back to {name}; {NEXT_START}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn install_stack(args: &StackInstallArgs, json: bool) -> anyhow::Result<()> {
    let source = StackPrograms { llama_cpp: args.llama_cpp.clone(), python: args.python.clone() };
    let profile = HardwareProfile::choose_profile(args.profile.as_deref())?;
    let mut install = |at: &Path| stacks::install_torch(&profile, at);
    let torch: Option<&mut MakeEnvironment<'_>> =
        if args.torch { Some(&mut install) } else { None };
    let stack = open_stacks(&args.place)?.install_stack(&args.name, &source, torch)?;
    output::print_json_or(json, &stack, || {
        output::print_message(&format!("installed; try it: flotilla stack use {}", stack.name));
    })
}

/// A stack that fails on this box is not used.
async fn use_stack(mut args: StackUseArgs, json: bool) -> anyhow::Result<ExitCode> {
    let stacks = open_stacks(&args.place)?;
    let StackPrograms { llama_cpp, python } = stacks.read_stack(&args.name)?.programs;
    args.burn_in.engines.llama_cpp = llama_cpp.or(args.burn_in.engines.llama_cpp);
    args.burn_in.python = python.or(args.burn_in.python);
    if !args.untested && !burn_in_box(&args.burn_in, StackPrograms::default(), json).await? {
        output::print_message(&format!("stack {} failed here and is not used", args.name));
        return Ok(exit_codes::findings_code(true));
    }
    if args.only_test {
        output::print_message(&format!("stack {} passed; nothing was changed", args.name));
        return Ok(ExitCode::SUCCESS);
    }
    stacks.use_stack(&args.name)?;
    output::print_message(&format!("stack {} is in use; {NEXT_START}", args.name));
    Ok(ExitCode::SUCCESS)
}

fn open_stacks(place: &StackPlaceArgs) -> anyhow::Result<StackDirectory> {
    place.find_directory()?.context("HOME is not set; pass --stacks (A102)")
}

fn print_stacks(stacks: &[InstalledStack]) {
    let rows = stacks.iter().map(|InstalledStack { name, programs, is_current, is_previous }| {
        let state = match (is_current, is_previous) {
            (true, _) => "in use",
            (_, true) => "previous",
            _ => "-",
        };
        let shown = |path: &Option<std::path::PathBuf>| {
            path.as_ref().map_or("-".to_owned(), |path| path.display().to_string())
        };
        [name.clone(), state.to_owned(), shown(&programs.llama_cpp), shown(&programs.python)]
    });
    let headings = ["stack", "state", "llama.cpp", "python"];
    output::print_list(headings, rows, "no stacks; `flotilla stack install` makes one");
}

/// Fills the options of an agent that name no programs with those of the stack in use, as it is now:
/// a switch counts at the agent's next start.
pub(super) fn apply_stack(args: &mut AgentArgs) -> anyhow::Result<AgentStack> {
    let stack = args.stacks.current_stack()?;
    let rocm = std::fs::read_to_string("/opt/rocm/.info/version").unwrap_or_default();
    let host = StackVersions {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        rocm: rocm.trim().to_owned(),
        ..StackVersions::default()
    };
    let mut name = String::new();
    if let Some(InstalledStack { name: own, programs, .. }) = stack {
        let tools = &mut args.generator_tools;
        let is_used = programs.llama_cpp.is_some() && tools.llama_cpp.is_none()
            || programs.python.is_some() && args.converters.python.is_none();
        tools.llama_cpp = tools.llama_cpp.take().or(programs.llama_cpp);
        args.converters.python = args.converters.python.take().or(programs.python);
        if is_used {
            name = own;
        }
    }
    Ok(AgentStack { name, host, known: None })
}
