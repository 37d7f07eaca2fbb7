//! Detects nearly equal completions.

use std::collections::BTreeSet;

/// Words of a shingle (Broder, 1997).
const SHINGLE_WORDS: usize = 3;

/// The completions seen so far, as sets of word trigrams.
pub(super) struct NearDuplicates {
    similarity_min: f64,
    seen: Vec<BTreeSet<u64>>,
}

impl NearDuplicates {
    /// `similarity_min` is the Jaccard similarity (0..1) from which two completions are near
    /// duplicates; 0 disables the detection.
    pub(super) fn new(similarity_min: f64) -> Self {
        Self { similarity_min, seen: Vec::new() }
    }

    /// Returns true if a similar completion was seen before; otherwise adds this one.
    pub(super) fn check_and_insert(&mut self, text: &str) -> bool {
        if self.similarity_min <= 0.0 {
            return false;
        }
        let shingles = hash_shingles(text);
        let sizes = |other: &BTreeSet<u64>| {
            let (a, b) = (other.len(), shingles.len());
            if a == b { 1.0 } else { ratio_of(a.min(b), a.max(b)) }
        };
        // The intersection is at most the smaller set, which bounds the similarity.
        let mut seen = self.seen.iter().filter(|other| sizes(other) >= self.similarity_min);
        if seen.any(|other| jaccard_similarity(other, &shingles) >= self.similarity_min) {
            return true;
        }
        self.seen.push(shingles);
        false
    }
}

/// Returns at least one hash. Case and whitespace are ignored; punctuation is not, because it
/// carries the meaning of many answers.
fn hash_shingles(text: &str) -> BTreeSet<u64> {
    let lower = text.to_lowercase();
    let words = split_words(&lower);
    let size = SHINGLE_WORDS.min(words.len()).max(1);
    words.windows(size).map(|shingle| wire::derive_seed(0, shingle)).collect()
}

/// Splits into words of letters, digits and `_`; any other visible character is a word of its own.
fn split_words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = None;
    for (place, sign) in text.char_indices() {
        if sign.is_alphanumeric() || sign == '_' {
            start.get_or_insert(place);
            continue;
        }
        words.extend(start.take().map(|start| &text[start..place]));
        if !sign.is_whitespace() {
            words.push(&text[place..place + sign.len_utf8()]);
        }
    }
    words.extend(start.map(|start| &text[start..]));
    words
}

/// Returns the share of common elements in all elements of two sets; 1 if both are empty.
pub fn jaccard_similarity(a: &BTreeSet<u64>, b: &BTreeSet<u64>) -> f64 {
    let both = a.intersection(b).count();
    let either = a.len() + b.len() - both;
    if either == 0 {
        return 1.0;
    }
    ratio_of(both, either)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer words than 2^52")]
fn ratio_of(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_case_or_spacing_is_near_another_sign_is_not() {
        let mut similar = NearDuplicates::new(0.9);
        assert!(!similar.check_and_insert("The answer is 3 - 4 = -1"));
        assert!(similar.check_and_insert("the  answer is\n3 - 4 = -1"));
        assert!(!similar.check_and_insert("The answer is 3 + 4 = 7"));
    }

    #[test]
    fn how_near_is_near_is_the_rules_matter() {
        let (a, b) = ("one two three four five six", "one two three four five seven");
        // 4 trigrams each, 3 of them shared.
        for (least, near) in [(0.6, true), (0.61, false), (0.0, false)] {
            let mut similar = NearDuplicates::new(least);
            assert!(!similar.check_and_insert(a));
            assert_eq!(similar.check_and_insert(b), near, "{least}");
        }
    }

    #[test]
    fn texts_of_a_word_or_none_compare_too() {
        let mut similar = NearDuplicates::new(1.0);
        assert!(!similar.check_and_insert("yes"));
        assert!(similar.check_and_insert("Yes"));
        assert!(!similar.check_and_insert("no"));
        assert!(!similar.check_and_insert(""));
        assert!(similar.check_and_insert(" "));
    }
}
