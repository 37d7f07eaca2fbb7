//! Reports about canaries: evidence of which weights each box sampled with.

use control::{CanaryFigure, CanaryReport};
use wire::v1;

use crate::output;

/// Prints the canary report of a cycle and all quarantines.
pub(super) fn print_canaries(proof: Option<&CanaryReport>, quarantines: &[v1::Quarantine]) {
    if let Some(proof) = proof {
        output::print_line("");
        output::print_line(&format!("canary check of cycle {}'s samples", proof.cycle));
        proof.shown.iter().for_each(|figure| output::print_line(&canary_line(figure)));
        if !proof.decided {
            output::print_line(
                "  they differ, and no more than half agree: nobody knows who is right, and all of \
                 their samples count; compare their engines, or add a box",
            );
        }
    }
    quarantines.iter().for_each(|one| output::print_line(&quarantine_line(one)));
}

/// Returns a line about the canary of one agent.
fn canary_line(CanaryFigure { who, mean, distance }: &CanaryFigure) -> String {
    let apart = distance.map_or(String::new(), |apart| format!(", {apart:.4} from the majority"));
    format!("  {who}: mean canary log-prob {mean:.4} nats per token{apart}")
}

/// Returns a line about a quarantine.
pub(crate) fn quarantine_line(quarantine: &v1::Quarantine) -> String {
    let v1::Quarantine { agent, said, reference, agreed, jobs, .. } = quarantine;
    format!(
        "{agent} is in quarantine: it sampled with something else than it was ordered to ({said:.4} \
         nats a token where {} have {reference:.4}); {} of its jobs are drawn again",
        agreed.join(", "),
        jobs.len()
    )
}
