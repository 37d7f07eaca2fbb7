//! What was thought of completions like this one. Models say the same thing again and again.

use std::collections::BTreeMap;

use wire::{Digest, v1::verdicts::Outcome};

use crate::{calls::Item, opinion::Opinion};

/// Opinions of one generation; two are kept. Each takes less than a kilobyte.
const GENERATION_MAX: usize = 8192;

/// Opinions by what they are of. What was not asked for while a generation filled is forgotten.
/// Errors are not kept.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    young: BTreeMap<Digest, Opinion>,
    old: BTreeMap<Digest, Opinion>,
}

/// All that an opinion follows from, but for this program's version.
pub(crate) fn key(settings: &str, item: &Item) -> Option<Digest> {
    let Item { prompt_id: _, index: _, prompt, completion, answer, fields } = item;
    let all = serde_json::to_vec(&(settings, prompt, completion, answer, fields)).ok()?;
    Some(Digest::of(&all))
}

impl Cache {
    pub(crate) fn get(&mut self, key: &Digest) -> Option<Opinion> {
        if let Some(opinion) = self.young.get(key) {
            return Some(opinion.clone());
        }
        let opinion = self.old.remove(key)?;
        self.put(*key, &opinion);
        Some(opinion)
    }

    pub(crate) fn put(&mut self, key: Digest, opinion: &Opinion) {
        if opinion.outcome == Outcome::Error {
            return;
        }
        if self.young.len() >= GENERATION_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, opinion.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(n: usize) -> Digest {
        Digest::of(&n.to_le_bytes())
    }

    #[test]
    fn what_is_asked_for_stays_and_the_rest_is_forgotten() {
        let mut cache = Cache::default();
        for n in 0..10 * GENERATION_MAX {
            cache.put(number(n), &Opinion::pass());
            assert!(n % 100 != 0 || cache.get(&number(0)).is_some(), "{n}");
        }
        assert!(cache.young.len() + cache.old.len() <= 2 * GENERATION_MAX);
        assert_eq!(cache.get(&number(1)), None);
    }

    #[test]
    fn errors_are_never_kept() {
        let mut cache = Cache::default();
        cache.put(number(1), &Opinion::trouble("away"));
        assert_eq!(cache.get(&number(1)), None);
    }

    #[test]
    fn completions_are_alike_when_all_that_counts_is() {
        let item = Item::example();
        let twin = Item { index: 7, ..item.clone() };
        assert_eq!(key("s", &item), key("s", &twin));
        assert_ne!(key("s", &item), key("t", &item));
        let other = Item { completion: "x".into(), ..item.clone() };
        assert_ne!(key("s", &item), key("s", &other));
    }
}
