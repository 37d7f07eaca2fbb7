//! `flotilla worker`: the worker processes that agents start. They die with their agent.

use std::path::{Path, PathBuf};

use anyhow::Context;
use completion_server::{ListenAddress, run_completion_server};
use rustix::process::Signal;
use verifier::Toolchain;

use super::verify;
use crate::args::WorkerCommand;

pub(crate) fn run_worker(worker: WorkerCommand) -> anyhow::Result<()> {
    // Not a cell, nor what a verifier starts itself: the thread that started it may end before it
    // does.
    if !matches!(worker, WorkerCommand::Cell | WorkerCommand::Masked { .. }) {
        process::die_with_parent(Signal::KILL);
    }
    match worker {
        WorkerCommand::Generate {
            device,
            dtype,
            backend,
            base,
            base_key,
            adapter,
            adapter_key,
            slots,
        } => {
            let backend = serde_json::from_str(&backend).context("--backend")?;
            let policy = generator::WorkerConfig {
                backend,
                base: base.unwrap_or_default(),
                base_key,
                adapter,
                adapter_key,
                slots,
                device,
                dtype,
            };
            generator::run_generate_worker(&policy)?;
        }
        WorkerCommand::Verify { threads, tools, hidden, grants, contains, .. } => {
            let tools = serde_json::from_str(&tools).context("--tools")?;
            let grants = serde_json::from_str(&grants).context("--grants")?;
            let cell_launch = verify::worker_launch("cell")?;
            let masked_launch = verify::worker_launch("masked")?;
            hide(&hidden, &cell_launch.program);
            let toolchain =
                Toolchain { tools, cell_launch, masked_launch, hidden, grants, contains };
            verifier::serve_verify_calls(toolchain, threads);
        }
        WorkerCommand::Masked { hidden, argv } => sandbox::run_masked(&hidden, &argv),
        WorkerCommand::Cell => sandbox::serve_cell(),
        WorkerCommand::Train { device, dtype } => trainer::run_train_worker(&device, dtype),
        WorkerCommand::Serve { device, dtype, models, host, port, api_key_file } => {
            let models = serde_json::from_str(&models).context("--models")?;
            let address = port.map_or(ListenAddress::Socket(host), ListenAddress::Port);
            run_completion_server(&models, (&device, dtype), &address, &api_key_file)?;
        }
        WorkerCommand::Eval { device, dtype } => evaluator::run_eval_worker(&device, dtype),
    }
    Ok(())
}

/// Hides the agent's keys from a worker that needs none of them, where the box allows it: this is a
/// second line, for the worker runs nothing but this program's own code.
fn hide(hidden: &[PathBuf], program: &Path) {
    if hidden.iter().any(|own| program.starts_with(own)) {
        // It starts cells by that path.
        tracing::warn!(
            program = %program.display(),
            "this program is in the agent's own directory, which stays visible to its verifier"
        );
    } else if let Err(error) = sandbox::hide_from_this_process(hidden) {
        tracing::info!(%error, "the agent's own directories stay visible to its verifier");
    }
}
