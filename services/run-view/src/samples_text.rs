//! The texts about samples.

use std::cmp::Reverse;

use wire::v1::{self, samples_page::Sample};

/// Describes a page of samples: how many prompts match, how to get the next page, and the numbers of
/// all samples of the cycle by outcome and by what became of them, the largest first.
pub fn describe_samples_page(page: &v1::SamplesPage, request: &v1::SamplesRequest) -> String {
    let (all, shown) = (page.prompts_in_all, u32::try_from(page.prompts.len()).unwrap_or(u32::MAX));
    let last = request.offset.saturating_add(shown);
    let of = format!("cycle {}: {all} prompts match", request.cycle);
    let next = if last < all { format!("; --skip {last} continues") } else { String::new() };
    let counts =
        [("verified", list_counts(&page.outcomes)), ("selected", list_counts(&page.fates))];
    let counts = counts.into_iter().filter(|(_, counts)| !counts.is_empty());
    let counts: Vec<String> = counts.map(|(what, counts)| format!("{what} {counts}")).collect();
    match (counts.is_empty(), all) {
        (true, 0) => format!("{of}; the cycle has no such samples"),
        (true, _) => format!("{of}{next}; not judged yet"),
        (false, _) => format!("{of}{next}; of all samples: {}", counts.join("; ")),
    }
}

/// Returns `sample 3: reward 1, pass, kept, 12 tokens`.
pub fn describe_sample(sample: &Sample) -> String {
    let Sample { index, reward, outcome, fate, detail, tokens, finish, .. } = sample;
    let judged = (!outcome.is_empty()).then(|| format!("reward {reward}, {outcome}"));
    let cut = (finish == "length").then(|| "stopped at max_new_tokens".to_owned());
    let known = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let parts = [judged, known(fate), Some(format!("{tokens} tokens")), cut, known(detail)];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    format!("sample {index}: {}", parts.join(", "))
}

fn list_counts<'a>(counts: impl IntoIterator<Item = (&'a String, &'a u32)>) -> String {
    let mut counts: Vec<(&String, &u32)> = counts.into_iter().collect();
    counts.sort_by_key(|(name, count)| (Reverse(*count), *name));
    let counts = counts.into_iter().map(|(name, count)| format!("{count} {name}"));
    counts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_numbers_of_all_samples_by_outcome_and_fate() {
        let counts = |of: &[(&str, u32)]| of.iter().map(|(name, n)| ((*name).into(), *n)).collect();
        let request = v1::SamplesRequest { cycle: 2, offset: 1, ..Default::default() };
        let mut page = v1::SamplesPage { prompts_in_all: 4, ..Default::default() };
        page.prompts = vec![v1::samples_page::Prompt::default()];
        let text = |page: &v1::SamplesPage| describe_samples_page(page, &request);
        assert_eq!(text(&page), "cycle 2: 4 prompts match; --skip 2 continues; not judged yet");
        page.outcomes = counts(&[("fail", 3), ("pass", 5)]);
        page.fates = counts(&[("kept", 2), ("duplicate", 2), ("failed", 4)]);
        assert_eq!(
            text(&page),
            "cycle 2: 4 prompts match; --skip 2 continues; of all samples: verified 5 pass, 3 fail; \
             selected 4 failed, 2 duplicate, 2 kept"
        );
        let none = describe_samples_page(&v1::SamplesPage::default(), &request);
        assert_eq!(none, "cycle 2: 0 prompts match; the cycle has no such samples");
    }
}
