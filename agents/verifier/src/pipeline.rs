//! The judge pipeline: judges many completions on several threads and caches the results.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use wire::{Digest, v1};

use crate::{
    calls::VerifyItem,
    judge::CompletionJudge,
    judge_result::JudgeResult,
    program::{SandboxPool, SandboxSlot},
    toolchain::Toolchain,
    verdict_cache::{VerdictCache, cache_key},
};

/// The pipeline that judges the completions of a call.
///
/// For each call it
///
/// 1. groups items that must get the same result (same settings, prompt and completion),
/// 2. returns the cached result of a group, or judges its first item in a sandbox slot of the
///    thread,
/// 3. copies the result to all items of the group, in the order of the items.
///
/// Results of `command` and `http` verifiers are never cached or shared, because the executable or
/// the server may be replaced between two items. A verifier that panics produces a host error for
/// the items of its thread. If the server or the executable is not there, no further item is judged:
/// each would wait for it.
#[derive(Debug)]
pub(crate) struct JudgePipeline {
    sandboxes: SandboxPool,
    cache: Mutex<VerdictCache>,
}

#[derive(Debug)]
pub(crate) struct ConfiguredVerifier {
    judge: CompletionJudge,
    /// JSON; part of the cache key.
    settings: String,
}

/// The time is zero for a cached or copied result.
#[derive(Debug, Clone)]
pub(crate) struct TimedResult {
    pub result: JudgeResult,
    pub took: Duration,
}

impl ConfiguredVerifier {
    /// Fails with what is wrong with the settings.
    pub(crate) fn new(verifier: &v1::Verifier) -> Result<Self, String> {
        let how = verifier.how.as_ref().ok_or("no verifier is named")?;
        let settings = serde_json::to_string(verifier).map_err(|error| error.to_string())?;
        Ok(Self { judge: CompletionJudge::new(how)?, settings })
    }

    /// Returns `None` if every item must be judged separately.
    fn item_key(&self, item: &VerifyItem) -> Option<Digest> {
        self.judge.is_cacheable().then(|| cache_key(&self.settings, item)).flatten()
    }
}

/// Returns `python/0.1.0+1f3a9c02b7de`: name, crate version and a digest of the settings.
pub(crate) fn verifier_version(verifier: &v1::Verifier) -> String {
    let settings = serde_json::to_vec(verifier).unwrap_or_default();
    let digest = Digest::hash_bytes(&settings).to_hex();
    format!("{}/{}+{}", verifier.kind_name(), env!("CARGO_PKG_VERSION"), &digest[..12])
}

impl JudgePipeline {
    pub(crate) fn new(toolchain: Toolchain) -> Self {
        Self { sandboxes: SandboxPool::new(toolchain), cache: Mutex::default() }
    }

    /// Opens a sandbox slot for a thread that asks an environment, one of `threads`.
    pub(crate) fn open_slot(&self, threads: usize) -> SandboxSlot<'_> {
        self.sandboxes.open_slot(threads)
    }

    /// Returns results in the order of the items. Reports the number of items or groups handled so
    /// far. Once an item finds that the verifier is not there, items that were not begun get its
    /// result.
    pub(crate) fn judge_items(
        &self,
        verifier: &ConfiguredVerifier,
        items: &[VerifyItem],
        threads: usize,
        tell: &(impl Fn(usize) + Sync),
    ) -> Vec<TimedResult> {
        let alike = group_equal_items(verifier, items);
        let next = AtomicUsize::new(0);
        let unreachable = OnceLock::new();
        let work = || {
            let mut slot = self.sandboxes.open_slot(threads);
            let mut found = Vec::new();
            while unreachable.get().is_none()
                && let Some((key, places)) = alike.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let began = Instant::now();
                let known = key.as_ref().and_then(|key| self.cache.lock().ok()?.get(key));
                let result = known.unwrap_or_else(|| {
                    let result = verifier.judge.judge_item(&items[places[0]], &mut slot);
                    if let (Some(key), Ok(mut cache)) = (key, self.cache.lock()) {
                        cache.insert_result(*key, &result);
                    }
                    result
                });
                if result.is_unreachable {
                    unreachable.get_or_init(|| result.clone());
                }
                let mut took = began.elapsed();
                for &place in places {
                    let result = result.clone();
                    found.push((place, TimedResult { result, took: std::mem::take(&mut took) }));
                }
                tell(next.load(Ordering::Relaxed).min(items.len()));
            }
            found
        };
        let found: Vec<(usize, TimedResult)> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..threads.clamp(1, alike.len().max(1))).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        });
        // A panic writes its location to the log. The items that its thread judged have no result.
        let panicked = || JudgeResult::host_error("the verifier panicked");
        let result = unreachable.into_inner().unwrap_or_else(panicked);
        let lost = TimedResult { result, took: Duration::ZERO };
        let mut all = vec![lost; items.len()];
        found.into_iter().for_each(|(place, found)| all[place] = found);
        all
    }
}

/// Orders groups by their first item. Items without a key form groups of one.
fn group_equal_items(
    verifier: &ConfiguredVerifier,
    items: &[VerifyItem],
) -> Vec<(Option<Digest>, Vec<usize>)> {
    let mut groups: Vec<(Option<Digest>, Vec<usize>)> = Vec::new();
    let mut known = BTreeMap::new();
    for (place, item) in items.iter().enumerate() {
        let key = verifier.item_key(item);
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

    fn items(completions: &[&str]) -> Vec<VerifyItem> {
        let item =
            |text: &&str| VerifyItem { completion: (*text).into(), ..VerifyItem::example_item() };
        completions.iter().map(item).collect()
    }

    #[test]
    fn opinions_come_in_the_order_of_the_items_each_judged_once() {
        let bench = JudgePipeline::new(Toolchain::without_programs());
        let verifier = ConfiguredVerifier::new(&regex()).unwrap();
        let items = items(&["a", "b", "a", "ab", "b", "a"]);
        assert_eq!(group_equal_items(&verifier, &items).len(), 3);
        let found = bench.judge_items(&verifier, &items, 4, &|_| {});
        let passed = found.iter().map(|found| found.result.outcome == Outcome::Pass);
        assert_eq!(passed.collect::<Vec<_>>(), [true, false, true, true, false, true]);
        assert!(found[2].took.is_zero() && found[5].took.is_zero());
        assert_eq!(bench.judge_items(&verifier, &[], 4, &|_| {}).len(), 0);
    }

    #[test]
    fn an_executable_is_asked_each_time() {
        let argv = ["sh", "-c", "cat >/dev/null; echo '{\"outcome\":\"pass\"}'"];
        let argv = argv.map(str::to_owned).to_vec();
        let how = Some(How::Command(Command { argv, timeout_s: 20.0, ..Command::default() }));
        let verifier = ConfiguredVerifier::new(&v1::Verifier { how }).unwrap();
        assert_eq!(group_equal_items(&verifier, &items(&["a", "a"])).len(), 2);
    }

    #[test]
    fn a_verifier_that_is_gone_costs_one_time_limit_and_no_item_a_reward() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        drop(listener);
        let http = v1::verifier::Http { url, timeout_s: 2.0, ..v1::verifier::Http::default() };
        let http = v1::Verifier { how: Some(How::Http(http)) };
        let argv = vec!["/nowhere/grader".to_owned()];
        let how = Some(How::Command(Command { argv, timeout_s: 20.0, ..Command::default() }));
        for settings in [http, v1::Verifier { how }] {
            let verifier = ConfiguredVerifier::new(&settings).unwrap();
            let bench = JudgePipeline::new(Toolchain::without_programs());
            let began = Instant::now();
            let found = bench.judge_items(&verifier, &items(&["a"; 64]), 2, &|_| {});
            assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
            assert_eq!(found.len(), 64);
            assert!(found.iter().all(|found| found.result.is_unreachable), "{found:?}");
            assert!(found.iter().all(|found| found.result.outcome == Outcome::Error), "{found:?}");
        }
    }

    #[test]
    fn a_version_tells_settings_apart() {
        let other = v1::Verifier { how: Some(How::Regex(v1::verifier::Regex::default())) };
        assert!(
            verifier_version(&regex()).starts_with("regex/")
                && verifier_version(&regex()) != verifier_version(&other)
        );
        assert_eq!(verifier_version(&regex()), verifier_version(&regex()));
    }
}
