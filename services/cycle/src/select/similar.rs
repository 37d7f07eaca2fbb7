//! Completions that say nearly the same.

use std::collections::BTreeSet;

/// Words of a shingle (Broder, 1997).
const SHINGLE: usize = 3;

/// Completions seen so far, as sets of word trigrams.
pub(super) struct Similar {
    least: f64,
    seen: Vec<BTreeSet<u64>>,
}

impl Similar {
    /// `least`: Jaccard similarity from which two count as one; 0 finds nothing.
    pub(super) fn new(least: f64) -> Self {
        Self { least, seen: Vec::new() }
    }

    /// Whether one like it was seen before; otherwise it counts as seen from now on.
    pub(super) fn is_near(&mut self, text: &str) -> bool {
        if self.least <= 0.0 {
            return false;
        }
        let shingles = shingles(text);
        let sizes = |other: &BTreeSet<u64>| {
            let (a, b) = (other.len(), shingles.len());
            if a == b { 1.0 } else { ratio(a.min(b), a.max(b)) }
        };
        // No more than the smaller one can be shared.
        let mut seen = self.seen.iter().filter(|other| sizes(other) >= self.least);
        if seen.any(|other| jaccard(other, &shingles) >= self.least) {
            return true;
        }
        self.seen.push(shingles);
        false
    }
}

/// Hashes of each run of words, of which there are no fewer than one. Case and whatever stands
/// between words and numbers do not count, but signs do: they are what answers are made of.
fn shingles(text: &str) -> BTreeSet<u64> {
    let lower = text.to_lowercase();
    let words = words(&lower);
    let size = SHINGLE.min(words.len()).max(1);
    words.windows(size).map(|shingle| wire::derive(0, shingle)).collect()
}

/// Words of letters, digits and `_`; every other visible sign is a word of its own.
fn words(text: &str) -> Vec<&str> {
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

fn jaccard(a: &BTreeSet<u64>, b: &BTreeSet<u64>) -> f64 {
    let both = a.intersection(b).count();
    let either = a.len() + b.len() - both;
    if either == 0 {
        return 1.0;
    }
    ratio(both, either)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer words than 2^52")]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_case_or_spacing_is_near_another_sign_is_not() {
        let mut similar = Similar::new(0.9);
        assert!(!similar.is_near("The answer is 3 - 4 = -1"));
        assert!(similar.is_near("the  answer is\n3 - 4 = -1"));
        assert!(!similar.is_near("The answer is 3 + 4 = 7"));
    }

    #[test]
    fn how_near_is_near_is_the_rules_matter() {
        let (a, b) = ("one two three four five six", "one two three four five seven");
        // 4 trigrams each, 3 of them shared.
        for (least, near) in [(0.6, true), (0.61, false), (0.0, false)] {
            let mut similar = Similar::new(least);
            assert!(!similar.is_near(a));
            assert_eq!(similar.is_near(b), near, "{least}");
        }
    }

    #[test]
    fn texts_of_a_word_or_none_compare_too() {
        let mut similar = Similar::new(1.0);
        assert!(!similar.is_near("yes"));
        assert!(similar.is_near("Yes"));
        assert!(!similar.is_near("no"));
        assert!(!similar.is_near(""));
        assert!(similar.is_near(" "));
    }
}
