//! What a training on several boxes gained and cost, as text.

use std::collections::BTreeSet;

use cycle::{BoxShare, SoupReport, SplitReport};

/// Returns the part of each box in a training, its speed and its costs.
pub fn split_text(split: &SplitReport) -> String {
    let boxes = split.boxes.iter().map(|(agent, share)| {
        let BoxShare { steps, waited_s, .. } = share;
        format!("{agent} {steps} steps (waited {waited_s:.1} s)")
    });
    let boxes: Vec<String> = boxes.collect();
    let again = match split.repeated_steps {
        0 => String::new(),
        steps => format!(", {steps} steps trained again"),
    };
    let lost = format!(", {:.0} % lost to the rank", split.residual * 100.0);
    let residual = if split.residual > 0.0 { lost.as_str() } else { "" };
    format!(
        "{} in {} merges; {:.1} times as fast as one box, efficiency {:.0} %, {:.1} s in merges; \
         {:.1} MB sent a slice; drift {:.3}{residual}{again}{}",
        boxes.join(", "),
        split.merges,
        split.speedup(),
        split.efficiency() * 100.0,
        split.merging_s,
        split.sent_bytes / 1e6,
        split.drift,
        split.soup.as_ref().map(soup_text).unwrap_or_default(),
    )
}

fn soup_text(soup: &SoupReport) -> String {
    let SoupReport { trained, kept, heldout_nll } = soup;
    let agents: BTreeSet<&str> = kept.iter().map(String::as_str).collect();
    let agents: Vec<&str> = agents.into_iter().collect();
    let chosen = match kept.len() {
        0 => format!("none of {trained} trainings kept, none is better than the start"),
        count => format!("{count} of {trained} trainings kept ({})", agents.join(", ")),
    };
    format!("; {chosen}; held-out loss {heldout_nll:.4} nats a token")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_names_what_each_box_did_and_how_long_it_waited() {
        let share = |steps, seconds, waited_s| BoxShare { steps, seconds, waited_s };
        let boxes = [("a", share(30, 8.0, 2.0)), ("b", share(20, 7.0, 3.0))];
        let mut split = SplitReport {
            merges: 2,
            boxes: boxes.map(|(agent, share)| (agent.to_owned(), share)).into(),
            elapsed_s: 10.0,
            merging_s: 0.5,
            repeated_steps: 0,
            drift: 0.25,
            residual: 0.0,
            sent_bytes: 2e6,
            soup: None,
        };
        let text = "a 30 steps (waited 2.0 s), b 20 steps (waited 3.0 s) in 2 merges; 1.5 times as \
                    fast as one box, efficiency 75 %, 0.5 s in merges; 2.0 MB sent a slice; drift \
                    0.250";
        assert_eq!(split_text(&split), text);
        let kept = vec!["a".to_owned()];
        split.soup = Some(SoupReport { trained: 2, kept, heldout_nll: 0.5 });
        let soup = "; 1 of 2 trainings kept (a); held-out loss 0.5000 nats a token";
        assert_eq!(split_text(&split), format!("{text}{soup}"));
    }
}
