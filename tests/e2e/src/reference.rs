//! What a run comes to when nobody disturbs it: the same as when somebody does.

use std::{
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use serde_json::{Value, json};

use crate::{Client, Files, Fleet, Sampling, binary};

const LIMIT: Duration = Duration::from_secs(240);

/// Steps of the base that RAFT runs of these tests start from.
const BASE_STEPS: u32 = 5;

/// The results of a calm run.
pub struct Undisturbed {
    sampling: Sampling,
    results: Value,
}

impl Undisturbed {
    /// Of a RAFT run with this sampling. One calm fleet works it out; tests of the same
    /// build read what it found.
    ///
    /// # Panics
    /// When a calm fleet fails at it.
    pub fn of(sampling: Sampling) -> Self {
        let kept = kept_at(sampling);
        let known = std::fs::read(&kept).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let results = known.unwrap_or_else(|| {
            let results = calm(sampling);
            let partial = kept.with_extension(std::process::id().to_string());
            std::fs::write(&partial, results.to_string()).expect("a file");
            std::fs::rename(&partial, &kept).expect("a file");
            results
        });
        Self { sampling, results }
    }

    /// The base on a fleet that nobody disturbs yet, and the spec of the run on it.
    ///
    /// # Panics
    /// When the base cannot be trained.
    pub fn spec(&self, client: &Client, directory: &Path) -> PathBuf {
        let files = Files::create(directory);
        let base = client.submit(&files.sft(BASE_STEPS, 0));
        client.finish(&base, LIMIT);
        files.raft(&base, self.sampling)
    }

    /// Checks that a run ended well, with nothing lost, nothing counted twice, and the very
    /// results of a calm one. Returns its audit.
    ///
    /// # Panics
    /// When it did not.
    pub fn assert_same(&self, client: &Client, run: &str, limit: Duration) -> Value {
        client.finish(run, limit);
        let audit = client.audit_clean(run);
        let found = results(client, run);
        assert_eq!(found, self.results, "{run} is not what a calm run comes to");
        audit
    }
}

fn calm(sampling: Sampling) -> Value {
    let fleet = Fleet::up("trainer,generator=2,verifier,evaluator");
    let unknown = Undisturbed { sampling, results: Value::Null };
    let spec = unknown.spec(&fleet, fleet.path());
    let run = fleet.submit(&spec);
    fleet.finish(&run, LIMIT);
    fleet.audit_clean(&run);
    results(&fleet, &run)
}

/// Digests of all that was selected and trained, and every figure that must follow from
/// them: by subject, without the run's name.
fn results(client: &Client, run: &str) -> Value {
    let place = |fact: &Value| {
        let subject = fact["subject"].as_str().expect("facts have subjects");
        subject.split('.').skip(2).collect::<Vec<_>>().join(".")
    };
    let told = |fact: &Value| {
        let (place, fact) = (place(fact), &fact["fact"]);
        let kind = place.split('.').next().unwrap_or_default();
        let result = match kind {
            "selection" => json!([fact["dataset"]["digest"], fact["kept"], fact["dropped"]]),
            "checkpoint" => fact["tree"]["manifest"].clone(),
            "eval" => fact["perplexity"].clone(),
            "cycle" if place.ends_with(".done") => {
                json!([fact["sampled"], fact["kept"], fact["train"], fact["heldout"]])
            }
            _ => return None,
        };
        assert!(!result.is_null(), "{place}: {fact}");
        Some((place, result))
    };
    client.facts(run).iter().filter_map(told).collect::<serde_json::Map<_, _>>().into()
}

/// Beside the tests of this build of the program.
fn kept_at(sampling: Sampling) -> PathBuf {
    let program = binary();
    let built = std::fs::metadata(&program).expect("it is there");
    let age = built.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let Sampling { prompts, per_prompt, max_new_tokens, cycles } = sampling;
    let directory = program.parent().expect("programs lie in directories").join("e2e-reference");
    std::fs::create_dir_all(&directory).expect("a directory");
    directory.join(format!(
        "{}-{}-{prompts}-{per_prompt}-{max_new_tokens}-{cycles}.json",
        built.len(),
        age.unwrap_or_default().as_nanos(),
    ))
}
