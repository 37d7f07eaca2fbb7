//! A cache of results for equal completions, because models often repeat themselves.

use std::collections::BTreeMap;

use wire::{Digest, v1::verdicts::Outcome};

use crate::{calls::VerifyItem, judge_result::JudgeResult};

/// Two generations are kept. A result takes less than 1 KB.
const GENERATION_MAX: usize = 8192;

/// A cache in two generations: when the young one is full it becomes the old one, and results that
/// were not read in the meantime are dropped. Errors are not cached.
#[derive(Debug, Default)]
pub(crate) struct VerdictCache {
    young_generation: BTreeMap<Digest, JudgeResult>,
    old_generation: BTreeMap<Digest, JudgeResult>,
}

/// Digests everything that a result depends on except the version of this program; `None` if the
/// item cannot be serialised.
pub(crate) fn cache_key(settings: &str, item: &VerifyItem) -> Option<Digest> {
    let VerifyItem { prompt_id: _, index: _, prompt, completion, answer, episode, fields } = item;
    let all = (settings, prompt, completion, answer, episode, fields);
    let all = serde_json::to_vec(&all).ok()?;
    Some(Digest::hash_bytes(&all))
}

impl VerdictCache {
    /// Moves the result to the young generation.
    pub(crate) fn get(&mut self, key: &Digest) -> Option<JudgeResult> {
        if let Some(result) = self.young_generation.get(key) {
            return Some(result.clone());
        }
        let result = self.old_generation.remove(key)?;
        self.insert_result(*key, &result);
        Some(result)
    }

    pub(crate) fn insert_result(&mut self, key: Digest, result: &JudgeResult) {
        if result.outcome == Outcome::Error {
            return;
        }
        if self.young_generation.len() >= GENERATION_MAX {
            self.old_generation = std::mem::take(&mut self.young_generation);
        }
        self.young_generation.insert(key, result.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(n: usize) -> Digest {
        Digest::hash_bytes(&n.to_le_bytes())
    }

    #[test]
    fn what_is_asked_for_stays_and_the_rest_is_forgotten() {
        let mut cache = VerdictCache::default();
        for n in 0..10 * GENERATION_MAX {
            cache.insert_result(number(n), &JudgeResult::full_pass());
            assert!(n % 100 != 0 || cache.get(&number(0)).is_some(), "{n}");
        }
        assert!(cache.young_generation.len() + cache.old_generation.len() <= 2 * GENERATION_MAX);
        assert_eq!(cache.get(&number(1)), None);
    }

    #[test]
    fn errors_are_never_kept() {
        let mut cache = VerdictCache::default();
        cache.insert_result(number(1), &JudgeResult::host_error("away"));
        assert_eq!(cache.get(&number(1)), None);
    }

    #[test]
    fn completions_are_alike_when_all_that_counts_is() {
        let item = VerifyItem::example_item();
        let twin = VerifyItem { index: 7, ..item.clone() };
        assert_eq!(cache_key("s", &item), cache_key("s", &twin));
        assert_ne!(cache_key("s", &item), cache_key("t", &item));
        let other = VerifyItem { completion: "x".into(), ..item.clone() };
        assert_ne!(cache_key("s", &item), cache_key("s", &other));
    }
}
