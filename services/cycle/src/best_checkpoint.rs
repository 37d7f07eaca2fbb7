//! Finds the best checkpoint of a run.

use wire::{SuiteName, v1};

use crate::state::Run;

/// Returns the best checkpoint so far.
///
/// RAFT runs: the final checkpoint of the best finished cycle ([`v1::CycleDone::best`]), which may
/// be cycle 0, the base. Other runs: the checkpoint with the lowest perplexity of the spec's first
/// suite, the earlier one of equals. Without a finished cycle or a perplexity: the newest
/// checkpoint. `None` if there is no checkpoint.
pub fn best_checkpoint(run: &Run) -> Option<&v1::Checkpoint> {
    let best_cycle = run.cycles.values().rev().find_map(|cycle| Some(cycle.done.as_ref()?.best));
    let of_best_cycle = best_cycle.and_then(|cycle| run.cycles.get(&cycle)?.final_checkpoint());
    match run.raft_spec() {
        Some(_) => of_best_cycle.or_else(|| newest_checkpoint(run)),
        None => lowest_perplexity(run).or_else(|| newest_checkpoint(run)),
    }
}

/// Returns the checkpoint of the last cycle and step.
pub fn newest_checkpoint(run: &Run) -> Option<&v1::Checkpoint> {
    run.cycles.values().rev().find_map(|cycle| cycle.checkpoints.values().next_back())
}

fn lowest_perplexity(run: &Run) -> Option<&v1::Checkpoint> {
    let suite = SuiteName::new(run.spec.suites.first()?.name.as_str()).ok()?;
    let checkpoints = run.cycles.values().flat_map(|cycle| {
        cycle.checkpoints.iter().map(move |(step, checkpoint)| (cycle, *step, checkpoint))
    });
    let measured = checkpoints.filter_map(|(cycle, step, checkpoint)| {
        let perplexity = cycle.evals.get(&(step, suite.clone()))?.perplexity;
        perplexity.is_finite().then_some((perplexity, checkpoint))
    });
    measured.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, checkpoint)| checkpoint)
}
