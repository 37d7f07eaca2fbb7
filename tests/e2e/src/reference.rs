//! Results of undisturbed runs. Runs with injected faults must have the same results.

use std::{
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use serde_json::{Value, json};

use crate::{Client, Fleet, Sampling, SpecFiles, program_path};

const LIMIT: Duration = Duration::from_secs(240);

/// Training steps of the base model of these RAFT runs.
const BASE_STEPS: u32 = 5;

/// The results of an undisturbed RAFT run.
pub struct ReferenceResults {
    sampling: Sampling,
    results: Value,
}

impl ReferenceResults {
    /// Returns the results for this sampling. Computes them on a new fleet, or reads them from a
    /// cache of the same build.
    pub fn for_sampling(sampling: Sampling) -> Self {
        let cache = cache_path(sampling);
        let cached = std::fs::read(&cache).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let results = cached.unwrap_or_else(|| {
            let results = run_undisturbed(sampling);
            let partial = cache.with_extension(std::process::id().to_string());
            std::fs::write(&partial, results.to_string()).expect("a file");
            std::fs::rename(&partial, &cache).expect("a file");
            results
        });
        Self { sampling, results }
    }

    /// Trains the base model on a fleet without faults, and writes the spec of the run.
    pub fn write_spec(&self, client: &Client, directory: &Path) -> PathBuf {
        let files = SpecFiles::create(directory);
        let base = client.submit(&files.write_sft_spec(BASE_STEPS, 0));
        client.await_success(&base, LIMIT);
        files.write_raft_spec(&base, self.sampling)
    }

    /// Waits until a run has succeeded and checks that its audit is clean, also of all files, and
    /// its results equal those of the undisturbed run.
    pub fn assert_same_results(&self, client: &Client, run: &str, limit: Duration) {
        client.await_success(run, limit);
        client.assert_clean_deep_audit(run);
        let found = collect_results(client, run);
        assert_eq!(found, self.results, "{run} is not what a calm run comes to");
    }
}

fn run_undisturbed(sampling: Sampling) -> Value {
    let fleet = Fleet::start("trainer,generator=2,verifier,evaluator");
    let unknown = ReferenceResults { sampling, results: Value::Null };
    let spec = unknown.write_spec(&fleet, fleet.path());
    let run = fleet.submit(&spec);
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    collect_results(&fleet, &run)
}

/// Digests of selections and checkpoints and the metrics that follow from them, by subject without
/// the run.
fn collect_results(client: &Client, run: &str) -> Value {
    let place = |fact: &Value| {
        let subject = fact["subject"].as_str().expect("facts have subjects");
        subject.split('.').skip(2).collect::<Vec<_>>().join(".")
    };
    let summarize = |fact: &Value| {
        let (place, fact) = (place(fact), &fact["fact"]);
        let kind = place.split('.').next().unwrap_or_default();
        let result = match kind {
            "selection" => json!([fact["dataset"]["digest"], fact["kept"], fact["dropped"]]),
            "checkpoint" => fact["tree"]["manifest"].clone(),
            "eval" if place.ends_with(".pass-rates") => json!([fact["heldout"], fact["suites"]]),
            "eval" => fact["perplexity"].clone(),
            "cycle" if place.ends_with(".done") => {
                json!([fact["sampled"], fact["kept"], fact["train"], fact["heldout"]])
            }
            _ => return None,
        };
        assert!(!result.is_null(), "{place}: {fact}");
        Some((place, result))
    };
    client.read_facts(run).iter().filter_map(summarize).collect::<serde_json::Map<_, _>>().into()
}

fn cache_path(sampling: Sampling) -> PathBuf {
    let program = program_path();
    let built = std::fs::metadata(&program).expect("it is there");
    let modified = built.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let Sampling { prompts, per_prompt, max_new_tokens, cycles } = sampling;
    let directory = program.parent().expect("programs lie in directories").join("e2e-reference");
    std::fs::create_dir_all(&directory).expect("a directory");
    directory.join(format!(
        "{}-{}-{prompts}-{per_prompt}-{max_new_tokens}-{cycles}.json",
        built.len(),
        modified.unwrap_or_default().as_nanos(),
    ))
}
