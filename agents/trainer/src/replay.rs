//! Adds examples of earlier cycles to the new ones.

use std::collections::BTreeSet;

use wire::{ExamplesError, TrainingExample, derive_seed};

/// Returns the lines of the new examples, followed by a seeded draw of older ones: at most `share`
/// for each new example, and no duplicates.
pub(crate) fn append_replay(
    new: &[u8],
    older: &[Vec<u8>],
    share: f64,
    seed: u64,
) -> Result<Vec<u8>, ExamplesError> {
    let fresh = TrainingExample::parse_all(new)?;
    let mut seen: BTreeSet<(String, String)> =
        fresh.iter().map(|example| (example.prompt.clone(), example.completion.clone())).collect();
    let mut drawn = Vec::new();
    for dataset in older {
        let examples = TrainingExample::parse_all(dataset)?;
        let lines =
            dataset.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
        for (example, line) in examples.into_iter().zip(lines) {
            let key = derive_seed(seed, &["replay", &example.prompt, &example.completion]);
            if seen.insert((example.prompt, example.completion)) {
                drawn.push((key, line));
            }
        }
    }
    drawn.sort_unstable();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "a share of a number of examples"
    )]
    let most = (fresh.len() as f64 * share).ceil() as usize;
    let mut lines = new.to_vec();
    for (_, line) in drawn.into_iter().take(most) {
        lines.extend_from_slice(line);
        lines.push(b'\n');
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dataset(completions: &[&str]) -> Vec<u8> {
        let line = |c: &&str| format!("{{\"prompt\":\"p\",\"completion\":\"{c}\",\"index\":1}}\n");
        completions.iter().map(line).collect::<String>().into_bytes()
    }

    fn completions(dataset: &[u8]) -> Vec<String> {
        TrainingExample::parse_all(dataset).unwrap().into_iter().map(|e| e.completion).collect()
    }

    #[test]
    fn new_examples_come_first_and_older_ones_are_drawn_by_the_seed() {
        let new = dataset(&["a", "b", "c", "d"]);
        let older = [dataset(&["a", "e", "f"]), dataset(&["f", "g", "h"])];
        let of = |share, seed| completions(&append_replay(&new, &older, share, seed).unwrap());
        let half = of(0.5, 1);
        assert_eq!(half[..4], ["a", "b", "c", "d"]);
        assert_eq!(half.len(), 6);
        assert_eq!(of(0.5, 1), half);
        assert!((2..20).any(|seed| of(0.5, seed) != half), "the seed draws nothing");
        let mut all = of(9.0, 1);
        all.sort();
        assert_eq!(all, ["a", "b", "c", "d", "e", "f", "g", "h"], "each once");
    }

    #[test]
    fn a_dataset_that_is_none_is_refused() {
        assert!(append_replay(&dataset(&["a"]), &[b"nonsense\n".to_vec()], 1.0, 1).is_err());
    }
}
