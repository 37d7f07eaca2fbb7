//! Prompts that are never trained on: taken out of a file, and compared with what stays.

use std::collections::{BTreeMap, BTreeSet};

use wire::derive;

use super::prompts::{Numbered, Prompts};

/// How many prompts are held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Held {
    Share(f64),
    Count(u32),
}

/// A split that leaves one side without prompts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "of {prompts} prompts with different texts it would hold out {held}; both sides need some: \
     change the share or the count (D109)"
)]
pub struct SplitError {
    pub prompts: usize,
    pub held: usize,
}

/// A held-out prompt that is also trained on, by their lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub heldout: usize,
    pub train: usize,
}

/// What two prompts have in common that ask the same: neither case nor white space.
pub(crate) fn normalised(text: &str) -> String {
    let words: Vec<String> = text.split_whitespace().map(str::to_lowercase).collect();
    words.join(" ")
}

/// What is trained on, and what is held out. Where a prompt goes depends on what it asks and the
/// seed alone, not on how a template writes it: prompts that are added change nothing for the others by a share, and equal ones stay
/// together. Of a count, the last texts held out may bring a few prompts more.
///
/// # Errors
/// When a side would be empty.
pub(crate) fn split(
    prompts: &Prompts,
    held: Held,
    seed: u64,
) -> Result<(Prompts, Prompts), SplitError> {
    let mut texts: BTreeMap<String, usize> = BTreeMap::new();
    for numbered in &prompts.prompts {
        *texts.entry(numbered.asked.clone()).or_default() += 1;
    }
    let mut order: Vec<(u64, &String, usize)> = texts
        .iter()
        .map(|(text, count)| (derive(seed, &["heldout", text]), text, *count))
        .collect();
    order.sort_unstable();
    let mut taken = 0;
    let out: BTreeSet<&String> = order
        .iter()
        .take_while(|(hash, _, count)| {
            let wanted = match held {
                // 2⁻⁵³ of a difference matters to nobody.
                #[expect(clippy::cast_precision_loss, reason = "a share of all hashes")]
                Held::Share(share) => (*hash as f64) < share * u64::MAX as f64,
                Held::Count(most) => taken < most as usize,
            };
            taken += count;
            wanted
        })
        .map(|(_, text, _)| *text)
        .collect();
    if out.is_empty() || out.len() == texts.len() {
        return Err(SplitError { prompts: texts.len(), held: out.len() });
    }
    let is_out = |numbered: &&Numbered| out.contains(&numbered.asked);
    let (heldout, train): (Vec<_>, Vec<_>) = prompts.prompts.iter().partition(is_out);
    let part = |side: Vec<&Numbered>| Prompts::part(side.into_iter().cloned().collect());
    Ok((part(train), part(heldout)))
}

/// Held-out prompts that are trained on as well, each with the first line that does.
pub(crate) fn overlaps(train: &Prompts, heldout: &Prompts) -> Vec<Overlap> {
    let mut lines = BTreeMap::new();
    for numbered in &train.prompts {
        lines.entry(&numbered.asked).or_insert(numbered.line);
    }
    let found = heldout.prompts.iter().filter_map(|numbered| {
        let train = *lines.get(&numbered.asked)?;
        Some(Overlap { heldout: numbered.line, train })
    });
    found.collect()
}

/// Prompts that ask what an earlier one does, each with the line of the first that did.
pub(crate) fn duplicates(prompts: &Prompts) -> Vec<(usize, usize)> {
    let mut first = BTreeMap::new();
    let again = prompts.prompts.iter().filter_map(|numbered| {
        let line = *first.entry(&numbered.asked).or_insert(numbered.line);
        (line != numbered.line).then_some((numbered.line, line))
    });
    again.collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::data::prompts::Manner;

    fn prompts(texts: impl IntoIterator<Item = String>) -> Prompts {
        let line = |text: String| format!("{}\n", serde_json::json!({"prompt": text}));
        let lines: String = texts.into_iter().map(line).collect();
        Prompts::read(&Bytes::from(lines), Manner::default()).unwrap()
    }

    fn texts(prompts: &Prompts) -> BTreeSet<String> {
        prompts.prompts.iter().map(|numbered| numbered.prompt.prompt.clone()).collect()
    }

    #[test]
    fn a_share_is_held_out_whatever_is_added_and_equal_prompts_stay_together() {
        let some = |n: u32| (0..n).map(|n| format!("What is {n}?"));
        let (train, heldout) = split(&prompts(some(1000)), Held::Share(0.1), 7).unwrap();
        assert!((70..130).contains(&heldout.prompts.len()), "{}", heldout.prompts.len());
        assert_eq!(train.prompts.len() + heldout.prompts.len(), 1000);
        let again = some(1500).chain(some(1000).map(|text| format!(" {}", text.to_uppercase())));
        let (more, more_heldout) = split(&prompts(again), Held::Share(0.1), 7).unwrap();
        assert!(texts(&more).is_superset(&texts(&train)));
        assert!(texts(&more_heldout).is_superset(&texts(&heldout)));
        assert_eq!(overlaps(&more, &more_heldout), []);
        let (_, other) = split(&prompts(some(1000)), Held::Share(0.1), 8).unwrap();
        assert_ne!(texts(&other), texts(&heldout));
    }

    #[test]
    fn a_count_is_held_out_and_ids_stay_those_of_the_file() {
        let all = prompts((0..40).map(|n| n.to_string()));
        let (train, heldout) = split(&all, Held::Count(7), 1).unwrap();
        assert_eq!((train.prompts.len(), heldout.prompts.len()), (33, 7));
        for numbered in &heldout.prompts {
            assert_eq!(numbered.prompt.id, numbered.line.to_string());
            assert_eq!(all.prompts[numbered.line - 1], *numbered);
        }
        let again = Prompts::read(&heldout.bytes(), Manner::default()).unwrap();
        let ids = |prompts: &Prompts| -> Vec<String> {
            prompts.prompts.iter().map(|numbered| numbered.prompt.id.clone()).collect()
        };
        assert_eq!(ids(&again), ids(&heldout));
        for (held, out) in [(Held::Count(40), 40), (Held::Share(1e-9), 0)] {
            assert_eq!(split(&all, held, 1).unwrap_err(), SplitError { prompts: 40, held: out });
        }
    }

    #[test]
    fn what_is_also_trained_on_is_found_whatever_its_case_and_spaces() {
        let train = prompts(["a b".into(), "c".into(), "A  b".into()]);
        let heldout = prompts(["x".into(), " A\nB".into()]);
        assert_eq!(overlaps(&train, &heldout), [Overlap { heldout: 2, train: 1 }]);
        assert_eq!(duplicates(&train), [(3, 1)]);
    }
}
