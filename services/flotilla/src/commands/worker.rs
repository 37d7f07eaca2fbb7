//! `flotilla worker`: what agents start. Dies with its agent.

use anyhow::Context;
use rustix::process::Signal;
use verifier::Kit;

use super::verify;
use crate::{bench, cli::WorkerCommand, supervise::die_with_parent};

pub(crate) fn work(worker: WorkerCommand) -> anyhow::Result<()> {
    // Not a cell: the thread of the verifier that started it may end before it does.
    if !matches!(worker, WorkerCommand::Cell) {
        die_with_parent(Signal::KILL);
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
            generator::work(&policy)?;
        }
        WorkerCommand::Verify { threads, tools, hidden, .. } => {
            let tools = serde_json::from_str(&tools).context("--tools")?;
            verifier::work(Kit { tools, cell: verify::cell()?, hidden }, threads);
        }
        WorkerCommand::Cell => sandbox::serve_cell(),
        WorkerCommand::Train { device, dtype } => trainer::work(&device, dtype),
        WorkerCommand::Eval { device, dtype } => evaluator::work(&device, dtype),
        WorkerCommand::Swarm { part } => bench::peer_task(&part)?,
        WorkerCommand::Bench { task, model, text } => bench::engine_task(&model, &text, &task)?,
    }
    Ok(())
}
