//! Splits held-out prompts from a file, and compares them with the training data.

use std::collections::BTreeMap;

use spec::HeldoutSize;
use wire::RowPlace;

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

/// Places of two prompts that ask the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromptOverlap {
    pub heldout: RowPlace,
    pub train: RowPlace,
}

/// Splits prompts into the training part and the held-out part.
///
/// The side of a prompt depends only on its normalised question and the seed, not on the chat
/// template ([`HeldoutSize::choose_questions`]). Equal questions stay together. Fails if a side
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
    let out = held.choose_questions(&texts, seed);
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

/// Returns each held-out prompt that is also in the training data, with the first training
/// prompt that asks the same.
pub(crate) fn find_overlaps(train: &PromptFile, heldout: &PromptFile) -> Vec<PromptOverlap> {
    let mut lines = BTreeMap::new();
    for numbered in &train.prompts {
        lines.entry(&numbered.question).or_insert(numbered.place);
    }
    let found = heldout.prompts.iter().filter_map(|numbered| {
        let train = *lines.get(&numbered.question)?;
        Some(PromptOverlap { heldout: numbered.place, train })
    });
    found.collect()
}

/// Returns the place of each prompt that asks the same as an earlier one, with the place of the
/// first.
pub(crate) fn find_duplicates(prompts: &PromptFile) -> Vec<(RowPlace, RowPlace)> {
    let mut first = BTreeMap::new();
    let duplicates = prompts.prompts.iter().filter_map(|numbered| {
        let place = *first.entry(&numbered.question).or_insert(numbered.place);
        (place != numbered.place).then_some((numbered.place, place))
    });
    duplicates.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bytes::Bytes;

    use super::*;
    use crate::data::prompts::ChatFormat;

    fn prompts(texts: impl IntoIterator<Item = String>) -> PromptFile {
        let line = |text: String| format!("{}\n", serde_json::json!({"prompt": text}));
        let lines: String = texts.into_iter().map(line).collect();
        PromptFile::read(&Bytes::from(lines).into(), ChatFormat::default()).unwrap()
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
            assert_eq!(numbered.prompt.id, numbered.place.number().to_string());
            assert_eq!(all.prompts[numbered.place.number() - 1], *numbered);
        }
        let again = PromptFile::read(&heldout.to_bytes().into(), ChatFormat::default()).unwrap();
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
        let line = RowPlace::Line;
        let overlap = PromptOverlap { heldout: line(2), train: line(1) };
        assert_eq!(find_overlaps(&train, &heldout), [overlap]);
        assert_eq!(find_duplicates(&train), [(line(3), line(1))]);
    }
}
