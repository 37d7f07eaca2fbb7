//! Splits held-out prompts from a file, and compares them with the training data.

use std::collections::{BTreeMap, BTreeSet};

use spec::HeldoutSize;
use wire::derive_seed;

use super::prompts::{NumberedPrompt, PromptFile};

/// A split that leaves one side without prompts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "of {prompts} different prompts, {held} would be held out; hold out from 1 to {}, so that both \
     sides have some (D109)", prompts.saturating_sub(1)
)]
pub struct SplitError {
    pub prompts: usize,
    /// A count may be above the number of prompts.
    pub held: usize,
}

/// Line numbers of two prompts that ask the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromptOverlap {
    pub heldout: usize,
    pub train: usize,
}

/// Splits prompts into the training part and the held-out part.
///
/// The side of a prompt depends only on its normalised question and the seed, not on the chat
/// template. Equal questions stay together. With a share, added prompts do not move the others.
/// With a count, the last question held out may exceed the count by its duplicates. Fails if a side
/// would be empty.
pub(crate) fn split_prompts(
    prompts: &PromptFile,
    held: HeldoutSize,
    seed: u64,
) -> Result<(PromptFile, PromptFile), SplitError> {
    let mut texts: BTreeMap<String, usize> = BTreeMap::new();
    for numbered in &prompts.prompts {
        *texts.entry(numbered.question.clone()).or_default() += 1;
    }
    let mut order: Vec<(u64, &String, usize)> = texts
        .iter()
        .map(|(text, count)| (derive_seed(seed, &["heldout", text]), text, *count))
        .collect();
    order.sort_unstable();
    let mut taken = 0;
    let out: BTreeSet<&String> = order
        .iter()
        .take_while(|(hash, _, count)| {
            let wanted = match held {
                // A relative error of 2⁻⁵³ does not matter here.
                #[expect(clippy::cast_precision_loss, reason = "a share of all hashes")]
                HeldoutSize::Share(share) => (*hash as f64) < share * u64::MAX as f64,
                HeldoutSize::Count(most) => taken < most as usize,
            };
            taken += count;
            wanted
        })
        .map(|(_, text, _)| *text)
        .collect();
    if out.is_empty() || out.len() == texts.len() {
        let held = match held {
            HeldoutSize::Count(count) => count as usize,
            HeldoutSize::Share(_) => out.len(),
        };
        return Err(SplitError { prompts: texts.len(), held });
    }
    let is_out = |numbered: &&NumberedPrompt| out.contains(&numbered.question);
    let (heldout, train): (Vec<_>, Vec<_>) = prompts.prompts.iter().partition(is_out);
    let part =
        |side: Vec<&NumberedPrompt>| PromptFile::from_prompts(side.into_iter().cloned().collect());
    Ok((part(train), part(heldout)))
}

/// Returns each held-out prompt that is also in the training data, with the first training line
/// that asks the same.
pub(crate) fn find_overlaps(train: &PromptFile, heldout: &PromptFile) -> Vec<PromptOverlap> {
    let mut lines = BTreeMap::new();
    for numbered in &train.prompts {
        lines.entry(&numbered.question).or_insert(numbered.line);
    }
    let found = heldout.prompts.iter().filter_map(|numbered| {
        let train = *lines.get(&numbered.question)?;
        Some(PromptOverlap { heldout: numbered.line, train })
    });
    found.collect()
}

/// Returns the line of each prompt that asks the same as an earlier one, with the line of the
/// first.
pub(crate) fn find_duplicates(prompts: &PromptFile) -> Vec<(usize, usize)> {
    let mut first = BTreeMap::new();
    let duplicates = prompts.prompts.iter().filter_map(|numbered| {
        let line = *first.entry(&numbered.question).or_insert(numbered.line);
        (line != numbered.line).then_some((numbered.line, line))
    });
    duplicates.collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::data::prompts::ChatFormat;

    fn prompts(texts: impl IntoIterator<Item = String>) -> PromptFile {
        let line = |text: String| format!("{}\n", serde_json::json!({"prompt": text}));
        let lines: String = texts.into_iter().map(line).collect();
        PromptFile::read(&Bytes::from(lines), ChatFormat::default()).unwrap()
    }

    fn texts(prompts: &PromptFile) -> BTreeSet<String> {
        prompts.prompts.iter().map(|numbered| numbered.prompt.prompt.clone()).collect()
    }

    #[test]
    fn a_share_is_held_out_whatever_is_added_and_equal_prompts_stay_together() {
        let some = |n: u32| (0..n).map(|n| format!("What is {n}?"));
        let (train, heldout) =
            split_prompts(&prompts(some(1000)), HeldoutSize::Share(0.1), 7).unwrap();
        assert!((70..130).contains(&heldout.prompts.len()), "{}", heldout.prompts.len());
        assert_eq!(train.prompts.len() + heldout.prompts.len(), 1000);
        let again = some(1500).chain(some(1000).map(|text| format!(" {}", text.to_uppercase())));
        let (more, more_heldout) =
            split_prompts(&prompts(again), HeldoutSize::Share(0.1), 7).unwrap();
        assert!(texts(&more).is_superset(&texts(&train)));
        assert!(texts(&more_heldout).is_superset(&texts(&heldout)));
        assert_eq!(find_overlaps(&more, &more_heldout), []);
        let (_, other) = split_prompts(&prompts(some(1000)), HeldoutSize::Share(0.1), 8).unwrap();
        assert_ne!(texts(&other), texts(&heldout));
    }

    #[test]
    fn a_count_is_held_out_and_ids_stay_those_of_the_file() {
        let all = prompts((0..40).map(|n| n.to_string()));
        let (train, heldout) = split_prompts(&all, HeldoutSize::Count(7), 1).unwrap();
        assert_eq!((train.prompts.len(), heldout.prompts.len()), (33, 7));
        for numbered in &heldout.prompts {
            assert_eq!(numbered.prompt.id, numbered.line.to_string());
            assert_eq!(all.prompts[numbered.line - 1], *numbered);
        }
        let again = PromptFile::read(&heldout.to_bytes(), ChatFormat::default()).unwrap();
        let ids = |prompts: &PromptFile| -> Vec<String> {
            prompts.prompts.iter().map(|numbered| numbered.prompt.id.clone()).collect()
        };
        assert_eq!(ids(&again), ids(&heldout));
        for (held, out) in [(HeldoutSize::Count(40), 40), (HeldoutSize::Share(1e-9), 0)] {
            assert_eq!(
                split_prompts(&all, held, 1).unwrap_err(),
                SplitError { prompts: 40, held: out }
            );
        }
    }

    #[test]
    fn what_is_also_trained_on_is_found_whatever_its_case_and_spaces() {
        let train = prompts(["a b".into(), "c".into(), "A  b".into()]);
        let heldout = prompts(["x".into(), " A\nB".into()]);
        assert_eq!(find_overlaps(&train, &heldout), [PromptOverlap { heldout: 2, train: 1 }]);
        assert_eq!(find_duplicates(&train), [(3, 1)]);
    }
}
