//! Finds prompts that repeat an earlier one: equal ones, and similar ones by the Jaccard similarity
//! of their character n-grams. MinHash signatures (Broder, 1997) name the earlier prompts that are
//! worth comparing, so that the cost of a prompt does not grow with the data.

use std::collections::{BTreeMap, BTreeSet};

use cycle::jaccard_similarity;
use spec::DeduplicationSpec;
use wire::{derive_seed, normalise_question};

const SIGNATURE_HASHES: usize = 64;

/// Least probability that two prompts of the threshold's similarity are compared.
const RECALL_MIN: f64 = 0.999;

/// The prompts so far.
#[derive(Debug)]
pub(crate) struct DuplicateIndex {
    spec: DeduplicationSpec,
    /// Hashes of a signature that must be equal for a comparison.
    band_rows: usize,
    /// Normalised.
    questions: BTreeSet<String>,
    ngrams: Vec<BTreeSet<u64>>,
    /// Indices of prompts by the place and the hash of a band of their signature.
    bands: BTreeMap<(usize, u64), Vec<usize>>,
}

impl DuplicateIndex {
    pub(crate) fn new(spec: DeduplicationSpec) -> Self {
        Self {
            spec,
            band_rows: choose_band_rows(spec.similarity),
            questions: BTreeSet::new(),
            ngrams: Vec::new(),
            bands: BTreeMap::new(),
        }
    }

    /// Returns true if the prompt repeats an earlier one; otherwise adds it.
    pub(crate) fn check_and_insert(&mut self, prompt: &str) -> bool {
        let question = normalise_question(prompt);
        if self.questions.contains(&question) {
            return true;
        }
        if self.spec.similarity > 0.0 {
            let ngrams = hash_ngrams(&question, self.spec.ngram as usize);
            let keys = self.band_keys(&ngrams);
            let near = keys.iter().filter_map(|key| self.bands.get(key)).flatten();
            let near: BTreeSet<usize> = near.copied().collect();
            let is_near = |index: &usize| {
                jaccard_similarity(&self.ngrams[*index], &ngrams) >= self.spec.similarity
            };
            if near.iter().any(is_near) {
                return true;
            }
            for key in keys {
                self.bands.entry(key).or_default().push(self.ngrams.len());
            }
            self.ngrams.push(ngrams);
        }
        self.questions.insert(question);
        false
    }

    fn band_keys(&self, ngrams: &BTreeSet<u64>) -> Vec<(usize, u64)> {
        let signature: Vec<u64> = (0..SIGNATURE_HASHES as u64)
            .map(|number| {
                let hash = |ngram: &u64| mix_bits(ngram ^ mix_bits(number));
                ngrams.iter().map(hash).min().unwrap_or_default()
            })
            .collect();
        let bands = signature.chunks(self.band_rows).enumerate();
        bands
            .map(|(place, rows)| (place, rows.iter().fold(0, |key, row| mix_bits(key ^ row))))
            .collect()
    }
}

/// Returns the most rows of a band with which similar prompts are still compared. With fewer rows,
/// more prompts are compared.
fn choose_band_rows(similarity: f64) -> usize {
    let recall = |rows: &usize| {
        let bands = (SIGNATURE_HASHES / rows) as f64;
        1.0 - (1.0 - similarity.powf(*rows as f64)).powf(bands)
    };
    [8, 4, 2].into_iter().find(|rows| recall(rows) >= RECALL_MIN).unwrap_or(1)
}

/// Returns at least one hash.
fn hash_ngrams(text: &str, length: usize) -> BTreeSet<u64> {
    let ends = text.char_indices().map(|(place, _)| place).chain([text.len()]);
    let ends: Vec<usize> = ends.collect();
    let length = length.min(ends.len() - 1);
    ends.windows(length + 1).map(|it| derive_seed(0, &[&text[it[0]..it[length]]])).collect()
}

/// Mixes all bits of a number (the finaliser of splitmix64).
fn mix_bits(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(similarity: f64) -> DuplicateIndex {
        DuplicateIndex::new(DeduplicationSpec { similarity, ngram: 5 })
    }

    #[test]
    fn equal_and_similar_prompts_are_duplicates_and_others_are_not() {
        let mut index = index(0.8);
        for (prompt, is_duplicate) in [
            ("How do I list the containers that are running?", false),
            ("how do i  list the containers\nthat are RUNNING?", true),
            ("How do I list the containers that are running", true),
            ("How do I list the images that are unused?", false),
            ("", false),
            (" ", true),
            ("a", false),
            ("ä", false),
        ] {
            assert_eq!(index.check_and_insert(prompt), is_duplicate, "{prompt}");
        }
    }

    #[test]
    fn without_a_threshold_only_equal_prompts_are_duplicates() {
        let mut index = index(0.0);
        assert!(!index.check_and_insert("How do I list the containers that are running?"));
        assert!(!index.check_and_insert("How do I list the containers that are running"));
        assert!(index.check_and_insert("how do i list the containers that are running"));
    }

    #[test]
    fn the_index_decides_as_a_comparison_with_all_prompts_does() {
        for similarity in [0.3, 0.5, 0.8, 0.95] {
            let (mut random, mut index) = (fastrand::Rng::with_seed(7), index(similarity));
            let (mut kept, mut differ): (Vec<BTreeSet<u64>>, usize) = (Vec::new(), 0);
            for _ in 0..1000 {
                let words: Vec<String> =
                    (0..8).map(|place| format!("w{place}{}", random.u32(..4))).collect();
                let text = words.join(" ");
                let ngrams = hash_ngrams(&text, 5);
                let is_near = kept.iter().any(|it| jaccard_similarity(it, &ngrams) >= similarity);
                let found = index.check_and_insert(&text);
                differ += usize::from(found != is_near);
                if !found {
                    kept.push(ngrams);
                }
            }
            assert!(differ <= 2, "{similarity}: {differ} of 1000 differ");
        }
    }
}
