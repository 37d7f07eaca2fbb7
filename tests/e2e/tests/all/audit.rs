//! Findings of `flotilla audit` in a damaged log or store.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{path::PathBuf, time::Duration};

use async_nats::jetstream;
use e2e::{Fleet, Sampling, SpecFiles};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 2 };

const CLEAN: i32 = 0;
const FINDINGS: i32 = 3;
const NOT_CHECKED: i32 = 4;

struct AuditedRun {
    fleet: Fleet,
    base: String,
    run: String,
}

impl AuditedRun {
    fn create() -> Self {
        let agents = "trainer,generator,verifier,evaluator";
        let fleet = Fleet::start_with(agents, &["--open", "--keep-cycles", "all"], []);
        let files = SpecFiles::create(fleet.path());
        let base = fleet.submit(&files.write_sft_spec(20, 10));
        fleet.await_success(&base, LIMIT);
        let run = fleet.submit(&files.write_raft_spec(&base, SMALL));
        fleet.await_success(&run, LIMIT);
        Self { fleet, base, run }
    }

    /// Returns the exit code and the report.
    fn audit(&self, more: &[&str]) -> (i32, Value) {
        let output = self.fleet.run(&[&["audit", &self.run, "--json"], more].concat());
        let report = serde_json::from_str(&output.stdout);
        (output.code, report.unwrap_or_else(|_| panic!("{}{}", output.stdout, output.stderr)))
    }

    fn assert_clean(&self, more: &[&str]) -> Value {
        let (code, report) = self.audit(more);
        assert_eq!((code, &report["findings"]), (CLEAN, &serde_json::json!([])), "{report:#}");
        report
    }

    /// Checks that there is one finding, about this file of the store, and returns it.
    fn assert_finding(&self, more: &[&str], file: &str, what: &str) -> Value {
        let (code, report) = self.audit(more);
        let findings = report["findings"].as_array().unwrap();
        assert_eq!((code, findings.len()), (FINDINGS, 1), "{report:#}");
        let finding = &findings[0];
        assert_eq!(finding["where"], "store");
        assert_eq!(
            finding["url"],
            format!("file://{}", self.store_directory().join(file).display())
        );
        assert!(finding["what"].as_str().unwrap().contains(what), "{finding:#}");
        assert!(finding["subject"].as_str().unwrap().starts_with("flotilla."), "{finding:#}");
        finding.clone()
    }

    fn store_directory(&self) -> PathBuf {
        self.fleet.path().canonicalize().unwrap().join("store")
    }

    /// Returns the directory of the run's last checkpoint in the store.
    fn checkpoint_directory(&self) -> String {
        let shown = self.fleet.run_json(&["run", "show", &self.run]).unwrap();
        let last = shown["checkpoints"].as_array().unwrap().last().unwrap();
        last["checkpoint"]["tree"]["path"].as_str().unwrap().to_owned()
    }

    /// Returns the dataset file of the first cycle in the store.
    fn dataset_file(&self) -> String {
        let selected = self.with_log(|context, run| async move {
            let log = context.get_stream("FLOTILLA").await.unwrap();
            let subject = format!("flotilla.{run}.selection.1");
            let message = log.get_last_raw_message_by_subject(&subject).await.unwrap();
            serde_json::from_slice::<Value>(&message.payload).unwrap()
        });
        let digest = selected["dataset"]["digest"].as_str().unwrap();
        let hex = digest.strip_prefix("b3:").unwrap();
        format!("blobs/{}/{hex}", &hex[..2])
    }

    /// Publishes an invalid fact and returns its sequence.
    fn publish_raw(&self, place: &'static str, payload: &'static str) -> u64 {
        self.with_log(move |context, run| async move {
            let subject = format!("flotilla.{run}.{place}");
            let sent = context.publish(subject, payload.into()).await.unwrap();
            sent.await.unwrap().sequence
        })
    }

    fn with_log<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(jetstream::Context, String) -> F,
    ) -> T {
        let url = self.fleet.read_fleet_file()["nats"].as_str().unwrap().to_owned();
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let context = jetstream::new(async_nats::connect(url).await.unwrap());
            work(context, self.run.clone()).await
        })
    }

    /// Changes a file of the store, runs `check`, and restores the file.
    fn with_changed_file(
        &self,
        file: &str,
        change: impl FnOnce(&mut Vec<u8>),
        check: impl FnOnce(),
    ) {
        let path = self.store_directory().join(file);
        let whole = std::fs::read(&path).unwrap();
        let mut changed = whole.clone();
        change(&mut changed);
        std::fs::write(&path, changed).unwrap();
        check();
        std::fs::write(&path, whole).unwrap();
    }
}

#[test]
fn damage_to_the_store_or_the_log_is_pinpointed() {
    let audited = AuditedRun::create();
    let report = audited.assert_clean(&["--deep"]);
    assert_eq!(report["checked"], serde_json::json!(["lineage", "files", "bytes"]));
    assert_eq!(audited.assert_clean(&["--no-store"])["checked"], serde_json::json!(["lineage"]));
    let text = audited.fleet.run(&["audit", &audited.run]).stdout;
    assert!(text.ends_with("clean; checked: lineage, files\n"), "{text}");

    let weights = format!("{}/adapter_model.safetensors", audited.checkpoint_directory());
    let flip = |bytes: &mut Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    };
    audited.with_changed_file(&weights, flip, || {
        audited.assert_clean(&[]);
        let finding = audited.assert_finding(&["--deep"], &weights, "damaged");
        let digest = |field: &str| finding[field].as_str().unwrap().starts_with("b3:");
        assert!(digest("expected") && digest("found"), "{finding:#}");
        let text = audited.fleet.run(&["audit", &audited.run, "--deep"]);
        assert_eq!(text.code, FINDINGS);
        assert!(text.stdout.contains(&weights), "{}", text.stdout);
    });
    audited.with_changed_file(
        &weights,
        |bytes| bytes.truncate(100),
        || {
            let finding = audited.assert_finding(&[], &weights, "size");
            assert_eq!(finding["found"], "100 bytes");
            audited.assert_clean(&["--no-store"]);
        },
    );
    let manifest = format!("{}/manifest.json", audited.checkpoint_directory());
    audited.with_changed_file(
        &manifest,
        |bytes| bytes.reverse(),
        || {
            audited.assert_finding(&[], &manifest, "damaged");
        },
    );
    std::fs::rename(
        audited.store_directory().join(&manifest),
        audited.store_directory().join("aside"),
    )
    .unwrap();
    audited.assert_finding(&[], &manifest, "not there");
    std::fs::rename(
        audited.store_directory().join("aside"),
        audited.store_directory().join(&manifest),
    )
    .unwrap();
    let dataset = audited.dataset_file();
    audited.with_changed_file(
        &dataset,
        |bytes| bytes.reverse(),
        || {
            audited.assert_finding(&["--deep"], &dataset, "damaged");
        },
    );
    audited.assert_clean(&["--deep"]);

    let store = audited.store_directory();
    let aside = store.with_file_name("store-aside");
    std::fs::rename(&store, &aside).unwrap();
    let (code, report) = audited.audit(&[]);
    std::fs::rename(&aside, &store).unwrap();
    assert_eq!((code, &report["findings"]), (NOT_CHECKED, &serde_json::json!([])), "{report:#}");
    let why = report["not_checked"][0].as_str().unwrap();
    assert!(why.contains(store.to_str().unwrap()), "{why}");
    check_damaged_log(&audited);
}

fn check_damaged_log(audited: &AuditedRun) {
    let at = audited.publish_raw("selection.7", "{ garbage");
    let (code, report) = audited.audit(&["--no-store"]);
    assert_eq!(code, FINDINGS, "{report:#}");
    let finding = &report["findings"][0];
    assert_eq!((&finding["where"], &finding["sequence"]), (&"log".into(), &at.into()));
    assert_eq!(finding["subject"], format!("flotilla.{}.selection.7", audited.run));
    let at = audited
        .publish_raw("eval.1.1.heldout", r#"{"run":"x","cycle":1,"step":1,"suite":"heldout"}"#);
    let (_, report) = audited.audit(&["--no-store"]);
    let named = |finding: &&Value| finding["sequence"] == at;
    let found: Vec<&Value> = report["findings"].as_array().unwrap().iter().filter(named).collect();
    assert!(
        found.iter().any(|finding| finding["what"] == "its run is not its subject's"),
        "{report:#}"
    );
    // Audits of other runs do not contain these findings.
    audited.fleet.assert_clean_audit(&audited.base);
}

#[test]
fn an_archived_run_is_deleted_from_the_log_and_audited_from_its_archives() {
    let fleet = Fleet::start_with(
        "trainer,generator,verifier,evaluator",
        &["--open", "--keep-cycles", "0"],
        [],
    );
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, SMALL));
    fleet.await_success(&run, LIMIT);
    let audited = AuditedRun { fleet, base, run };
    let is_in_log = |kind: &'static str| {
        audited.with_log(|context, run| async move {
            let log = context.get_stream("FLOTILLA").await.unwrap();
            let subject = format!("flotilla.{run}.{kind}");
            log.get_last_raw_message_by_subject(&subject).await.is_ok()
        })
    };
    e2e::wait_until("the facts are deleted", LIMIT, || {
        let bulky = ["order.generate.>", "samples.>", "verdicts.>"];
        (is_in_log("cycle.2.archived") && !bulky.into_iter().any(is_in_log)).then_some(())
    });
    let audit = audited.fleet.assert_clean_audit(&audited.run);
    // Two cycles of 8 × 4, and three measurements of 8.
    assert_eq!(audit["judged_samples"], 2 * 32 + 3 * 8);
    let (code, report) = audited.audit(&["--no-store"]);
    assert_eq!((code, &report["findings"]), (NOT_CHECKED, &serde_json::json!([])), "{report:#}");

    let cycles = audited.store_directory().join("runs").join(&audited.run).join("cycles");
    let archive = std::fs::read_dir(cycles).unwrap().flatten().map(|entry| entry.path());
    let second = archive.into_iter().find(|path| path.to_str().unwrap().contains("/c2-")).unwrap();
    let unpacked = std::process::Command::new("gzip")
        .arg("-dc")
        .arg(second.join("samples.jsonl.gz"))
        .output()
        .unwrap();
    let lines: Vec<Value> = String::from_utf8(unpacked.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 32 + 8);
    let kept = lines.iter().filter(|line| line["kept"] == true);
    let shown = audited.fleet.run_json(&["run", "show", &audited.run]).unwrap();
    assert_eq!(kept.count() as u64, shown["cyclesDone"][2]["kept"].as_u64().unwrap());
    assert!(lines.iter().all(|line| line["prompt"].as_str().unwrap().ends_with("+1=")));
    let tree = second.strip_prefix(audited.store_directory()).unwrap().to_str().unwrap().to_owned();
    let facts = format!("{tree}/facts.jsonl.gz");
    audited.with_changed_file(
        &facts,
        |bytes| bytes[40] ^= 1,
        || {
            audited.assert_finding(&["--deep"], &facts, "damaged");
        },
    );
    audited.fleet.assert_clean_audit(&audited.run);
}
