//! Judging many completions, several at a time.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use wire::{Digest, v1};

use crate::{
    cache::{Cache, key},
    calls::Item,
    judge::Judge,
    kit::Kit,
    opinion::Opinion,
    program::Shop,
};

/// Judges, and remembers what it judged.
#[derive(Debug)]
pub(crate) struct Bench {
    shop: Shop,
    cache: Mutex<Cache>,
}

/// A verifier as a run's settings have it.
#[derive(Debug)]
pub(crate) struct Verifier {
    judge: Judge,
    settings: String,
}

/// An opinion and what it took; no time at all for one that was known.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub opinion: Opinion,
    pub took: Duration,
}

impl Verifier {
    /// # Errors
    /// What is wrong with the settings.
    pub(crate) fn new(verifier: &v1::Verifier) -> Result<Self, String> {
        let how = verifier.how.as_ref().ok_or("no verifier is named")?;
        let settings = serde_json::to_string(verifier).map_err(|error| error.to_string())?;
        Ok(Self { judge: Judge::new(how)?, settings })
    }

    /// What one and the same opinion follows from. `None`: it has to be asked each time.
    fn key(&self, item: &Item) -> Option<Digest> {
        self.judge.is_lasting().then(|| key(&self.settings, item)).flatten()
    }
}

/// `python/0.1.0+1f3a9c02b7de`: the version, and a digest of the settings.
pub(crate) fn version(verifier: &v1::Verifier) -> String {
    let settings = serde_json::to_vec(verifier).unwrap_or_default();
    let digest = Digest::of(&settings).to_hex();
    format!("{}/{}+{}", name(verifier), env!("CARGO_PKG_VERSION"), &digest[..12])
}

fn name(verifier: &v1::Verifier) -> &'static str {
    use v1::verifier::How;
    match verifier.how {
        Some(How::Exact(_)) => "exact",
        Some(How::Numeric(_)) => "numeric",
        Some(How::Regex(_)) => "regex",
        Some(How::Command(_)) => "command",
        Some(How::JsonSchema(_)) => "json_schema",
        Some(How::ToolCall(_)) => "tool_call",
        Some(How::Python(_)) => "python",
        Some(How::Pytest(_)) => "pytest",
        Some(How::Stdio(_)) => "stdio",
        Some(How::Compile(_)) => "compile",
        Some(How::Chain(_)) => "chain",
        Some(How::LlmJudge(_)) => "llm_judge",
        None => "none",
    }
}

impl Bench {
    pub(crate) fn new(kit: Kit) -> Self {
        Self { shop: Shop::new(kit), cache: Mutex::default() }
    }

    /// Opinions in the order of the items. `tell` hears how many were looked at so far.
    pub(crate) fn judge_all(
        &self,
        verifier: &Verifier,
        items: &[Item],
        threads: usize,
        tell: &(impl Fn(usize) + Sync),
    ) -> Vec<Found> {
        let alike = alike(verifier, items);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut desk = self.shop.desk();
            let mut found = Vec::new();
            while let Some((key, places)) = alike.get(next.fetch_add(1, Ordering::Relaxed)) {
                let began = Instant::now();
                let known = key.as_ref().and_then(|key| self.cache.lock().ok()?.get(key));
                let opinion = known.unwrap_or_else(|| {
                    let opinion = verifier.judge.judge(&items[places[0]], &mut desk);
                    if let (Some(key), Ok(mut cache)) = (key, self.cache.lock()) {
                        cache.put(*key, &opinion);
                    }
                    opinion
                });
                let mut took = began.elapsed();
                for &place in places {
                    let opinion = opinion.clone();
                    found.push((place, Found { opinion, took: std::mem::take(&mut took) }));
                }
                tell(next.load(Ordering::Relaxed).min(items.len()));
            }
            found
        };
        let found: Vec<(usize, Found)> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..threads.clamp(1, alike.len().max(1))).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        });
        // A panic says where it was in the log; who met it has judged nothing.
        let lost =
            Found { opinion: Opinion::trouble("the verifier panicked"), took: Duration::ZERO };
        let mut all = vec![lost; items.len()];
        found.into_iter().for_each(|(place, found)| all[place] = found);
        all
    }
}

/// Where items stand that one opinion is enough for, in the order of the first of each.
fn alike(verifier: &Verifier, items: &[Item]) -> Vec<(Option<Digest>, Vec<usize>)> {
    let mut groups: Vec<(Option<Digest>, Vec<usize>)> = Vec::new();
    let mut known = BTreeMap::new();
    for (place, item) in items.iter().enumerate() {
        let key = verifier.key(item);
        let group = key.map_or(groups.len(), |key| *known.entry(key).or_insert(groups.len()));
        match groups.get_mut(group) {
            Some((_, places)) => places.push(place),
            None => groups.push((key, vec![place])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use wire::v1::{
        verdicts::Outcome,
        verifier::{Command, How},
    };

    use super::*;

    fn regex() -> v1::Verifier {
        let pattern = "^a".into();
        v1::Verifier { how: Some(How::Regex(v1::verifier::Regex { pattern })) }
    }

    fn items(completions: &[&str]) -> Vec<Item> {
        let item = |text: &&str| Item { completion: (*text).into(), ..Item::example() };
        completions.iter().map(item).collect()
    }

    #[test]
    fn opinions_come_in_the_order_of_the_items_each_judged_once() {
        let bench = Bench::new(Kit::none());
        let verifier = Verifier::new(&regex()).unwrap();
        let items = items(&["a", "b", "a", "ab", "b", "a"]);
        assert_eq!(alike(&verifier, &items).len(), 3);
        let found = bench.judge_all(&verifier, &items, 4, &|_| {});
        let passed = found.iter().map(|found| found.opinion.outcome == Outcome::Pass);
        assert_eq!(passed.collect::<Vec<_>>(), [true, false, true, true, false, true]);
        assert!(found[2].took.is_zero() && found[5].took.is_zero());
        assert_eq!(bench.judge_all(&verifier, &[], 4, &|_| {}).len(), 0);
    }

    #[test]
    fn an_executable_is_asked_each_time() {
        let argv = ["sh", "-c", "cat >/dev/null; echo '{\"outcome\":\"pass\"}'"];
        let argv = argv.map(str::to_owned).to_vec();
        let how = Some(How::Command(Command { argv, timeout_s: 20.0 }));
        let verifier = Verifier::new(&v1::Verifier { how }).unwrap();
        assert_eq!(alike(&verifier, &items(&["a", "a"])).len(), 2);
    }

    #[test]
    fn a_version_tells_settings_apart() {
        let other = v1::Verifier { how: Some(How::Regex(v1::verifier::Regex::default())) };
        assert!(version(&regex()).starts_with("regex/") && version(&regex()) != version(&other));
        assert_eq!(version(&regex()), version(&regex()));
    }
}
