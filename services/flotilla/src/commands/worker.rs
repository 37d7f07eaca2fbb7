//! `flotilla worker`: what agents start. Dies with its agent.

use rustix::process::Signal;

use crate::{cli::WorkerCommand, supervise::die_with_parent};

pub(crate) fn work(worker: WorkerCommand) {
    die_with_parent(Signal::KILL);
    match worker {
        WorkerCommand::Generate { device, base, adapter, slots } => {
            generator::work(&generator::WorkerConfig { base, adapter, slots, device });
        }
        WorkerCommand::Verify { threads, device: _ } => verifier::work(threads),
        WorkerCommand::Train { device } => trainer::work(&device),
        WorkerCommand::Eval { device } => evaluator::work(&device),
    }
}
