//! What boxes showed of the policies they sampled with, told to people.

use control::{FigureStory, ProofStory};
use wire::v1;

use crate::output;

pub(super) fn print(proof: Option<&ProofStory>, quarantines: &[v1::Quarantine]) {
    if let Some(proof) = proof {
        output::print(&format!("\nwhat drew the samples of cycle {}", proof.cycle));
        proof.shown.iter().for_each(|figure| output::print(&figure_line(figure)));
        if !proof.decided {
            output::print(
                "  they differ, and no more than half agree: nobody knows who is right, and all of \
                 their samples count; compare their engines, or add a box",
            );
        }
    }
    for quarantine in quarantines {
        output::print(&quarantine_line(quarantine));
    }
}

fn figure_line(FigureStory { who, mean, distance }: &FigureStory) -> String {
    let apart = distance.map_or(String::new(), |apart| format!(", {apart:.4} from the right ones"));
    format!("  {who}: a token of its canary is worth {mean:.4} nats{apart}")
}

pub(crate) fn quarantine_line(quarantine: &v1::Quarantine) -> String {
    let v1::Quarantine { agent, said, reference, agreed, jobs, .. } = quarantine;
    format!(
        "{agent} is in quarantine: it sampled with something else than it was ordered to ({said:.4} \
         nats a token where {} have {reference:.4}); {} of its jobs are drawn again",
        agreed.join(", "),
        jobs.len()
    )
}
