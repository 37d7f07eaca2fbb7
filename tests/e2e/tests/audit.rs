//! What `flotilla audit` finds when somebody damages a real fleet's log or store.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{path::PathBuf, time::Duration};

use async_nats::jetstream;
use e2e::{Files, Fleet, Sampling};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 2 };

/// Exit codes of the program.
const CLEAN: i32 = 0;
const FINDINGS: i32 = 3;
const NOT_CHECKED: i32 = 4;

struct Audited {
    fleet: Fleet,
    base: String,
    run: String,
}

impl Audited {
    fn run_to_the_end() -> Self {
        let agents = "trainer,generator,verifier,evaluator";
        let fleet = Fleet::up_with(agents, &["--open", "--keep-cycles", "all"], []);
        let files = Files::create(fleet.path());
        let base = fleet.submit(&files.sft(20, 10));
        fleet.finish(&base, LIMIT);
        let run = fleet.submit(&files.raft(&base, SMALL));
        fleet.finish(&run, LIMIT);
        Self { fleet, base, run }
    }

    /// The exit code and the report.
    fn audit(&self, more: &[&str]) -> (i32, Value) {
        let output = self.fleet.run(&[&["audit", &self.run, "--json"], more].concat());
        let report = serde_json::from_str(&output.stdout);
        (output.code, report.unwrap_or_else(|_| panic!("{}{}", output.stdout, output.stderr)))
    }

    fn clean(&self, more: &[&str]) -> Value {
        let (code, report) = self.audit(more);
        assert_eq!((code, &report["findings"]), (CLEAN, &serde_json::json!([])), "{report:#}");
        report
    }

    /// The one finding, which names this file of the store.
    fn finds(&self, more: &[&str], file: &str, what: &str) -> Value {
        let (code, report) = self.audit(more);
        let findings = report["findings"].as_array().unwrap();
        assert_eq!((code, findings.len()), (FINDINGS, 1), "{report:#}");
        let finding = &findings[0];
        assert_eq!(finding["where"], "store");
        assert_eq!(finding["url"], format!("file://{}", self.store().join(file).display()));
        assert!(finding["what"].as_str().unwrap().contains(what), "{finding:#}");
        assert!(finding["subject"].as_str().unwrap().starts_with("flotilla."), "{finding:#}");
        finding.clone()
    }

    fn store(&self) -> PathBuf {
        self.fleet.path().canonicalize().unwrap().join("store")
    }

    /// The directory of the run's last checkpoint, in the store.
    fn checkpoint(&self) -> String {
        let shown = self.fleet.json(&["run", "show", &self.run]).unwrap();
        let last = shown["checkpoints"].as_array().unwrap().last().unwrap();
        last["checkpoint"]["tree"]["path"].as_str().unwrap().to_owned()
    }

    /// The dataset of the first cycle, in the store.
    fn dataset(&self) -> String {
        let selected = self.log(|context, run| async move {
            let log = context.get_stream("FLOTILLA").await.unwrap();
            let subject = format!("flotilla.{run}.selection.1");
            let message = log.get_last_raw_message_by_subject(&subject).await.unwrap();
            serde_json::from_slice::<Value>(&message.payload).unwrap()
        });
        let digest = selected["dataset"]["digest"].as_str().unwrap();
        let hex = digest.strip_prefix("b3:").unwrap();
        format!("blobs/{}/{hex}", &hex[..2])
    }

    /// Publishes what is no fact; the sequence it got.
    fn write(&self, place: &'static str, payload: &'static str) -> u64 {
        self.log(move |context, run| async move {
            let subject = format!("flotilla.{run}.{place}");
            let sent = context.publish(subject, payload.into()).await.unwrap();
            sent.await.unwrap().sequence
        })
    }

    fn log<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(jetstream::Context, String) -> F,
    ) -> T {
        let url = self.fleet.file()["nats"].as_str().unwrap().to_owned();
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let context = jetstream::new(async_nats::connect(url).await.unwrap());
            work(context, self.run.clone()).await
        })
    }

    /// Changes a file of the store for as long as `look` looks.
    fn with(&self, file: &str, change: impl FnOnce(&mut Vec<u8>), look: impl FnOnce()) {
        let path = self.store().join(file);
        let whole = std::fs::read(&path).unwrap();
        let mut changed = whole.clone();
        change(&mut changed);
        std::fs::write(&path, changed).unwrap();
        look();
        std::fs::write(&path, whole).unwrap();
    }
}

#[test]
fn damage_to_the_store_or_the_log_is_pinpointed() {
    let it = Audited::run_to_the_end();
    let report = it.clean(&["--deep"]);
    assert_eq!(report["checked"], serde_json::json!(["lineage", "files", "bytes"]));
    assert_eq!(it.clean(&["--no-store"])["checked"], serde_json::json!(["lineage"]));
    let text = it.fleet.run(&["audit", &it.run]).stdout;
    assert!(text.ends_with("clean; checked: lineage, files\n"), "{text}");

    let weights = format!("{}/adapter_model.safetensors", it.checkpoint());
    let flip = |bytes: &mut Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    };
    it.with(&weights, flip, || {
        it.clean(&[]);
        let finding = it.finds(&["--deep"], &weights, "damaged");
        let digest = |field: &str| finding[field].as_str().unwrap().starts_with("b3:");
        assert!(digest("expected") && digest("found"), "{finding:#}");
        let text = it.fleet.run(&["audit", &it.run, "--deep"]);
        assert_eq!(text.code, FINDINGS);
        assert!(text.stdout.contains(&weights), "{}", text.stdout);
    });
    it.with(
        &weights,
        |bytes| bytes.truncate(100),
        || {
            let finding = it.finds(&[], &weights, "size");
            assert_eq!(finding["found"], "100 bytes");
            it.clean(&["--no-store"]);
        },
    );
    let manifest = format!("{}/manifest.json", it.checkpoint());
    it.with(
        &manifest,
        |bytes| bytes.reverse(),
        || {
            it.finds(&[], &manifest, "damaged");
        },
    );
    std::fs::rename(it.store().join(&manifest), it.store().join("aside")).unwrap();
    it.finds(&[], &manifest, "not there");
    std::fs::rename(it.store().join("aside"), it.store().join(&manifest)).unwrap();
    let dataset = it.dataset();
    it.with(
        &dataset,
        |bytes| bytes.reverse(),
        || {
            it.finds(&["--deep"], &dataset, "damaged");
        },
    );
    it.clean(&["--deep"]);

    let store = it.store();
    let aside = store.with_file_name("store-aside");
    std::fs::rename(&store, &aside).unwrap();
    let (code, report) = it.audit(&[]);
    std::fs::rename(&aside, &store).unwrap();
    assert_eq!((code, &report["findings"]), (NOT_CHECKED, &serde_json::json!([])), "{report:#}");
    let why = report["not_checked"][0].as_str().unwrap();
    assert!(why.contains(store.to_str().unwrap()), "{why}");
    damage_to_the_log(&it);
}

fn damage_to_the_log(it: &Audited) {
    let at = it.write("selection.7", "{ garbage");
    let (code, report) = it.audit(&["--no-store"]);
    assert_eq!(code, FINDINGS, "{report:#}");
    let finding = &report["findings"][0];
    assert_eq!((&finding["where"], &finding["sequence"]), (&"log".into(), &at.into()));
    assert_eq!(finding["subject"], format!("flotilla.{}.selection.7", it.run));
    let at = it.write("eval.1.1.heldout", r#"{"run":"x","cycle":1,"step":1,"suite":"heldout"}"#);
    let (_, report) = it.audit(&["--no-store"]);
    let named = |finding: &&Value| finding["sequence"] == at;
    let told: Vec<&Value> = report["findings"].as_array().unwrap().iter().filter(named).collect();
    assert!(
        told.iter().any(|finding| finding["what"] == "its run is not its subject's"),
        "{report:#}"
    );
    // Another run's findings are not this one's.
    it.fleet.audit_clean(&it.base);
}

#[test]
fn a_done_run_is_archived_let_go_of_and_audited_from_its_archives() {
    let fleet = Fleet::up_with(
        "trainer,generator,verifier,evaluator",
        &["--open", "--keep-cycles", "0"],
        [],
    );
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(20, 0));
    fleet.finish(&base, LIMIT);
    let run = fleet.submit(&files.raft(&base, SMALL));
    fleet.finish(&run, LIMIT);
    let it = Audited { fleet, base, run };
    let held = |kind: &'static str| {
        it.log(|context, run| async move {
            let log = context.get_stream("FLOTILLA").await.unwrap();
            let subject = format!("flotilla.{run}.{kind}");
            log.get_last_raw_message_by_subject(&subject).await.is_ok()
        })
    };
    e2e::until("the log lets go", LIMIT, || {
        let bulky = ["order.generate.>", "samples.>", "verdicts.>"];
        (held("cycle.2.archived") && !bulky.into_iter().any(held)).then_some(())
    });
    let audit = it.fleet.audit_clean(&it.run);
    // Two cycles of 8 × 4, and three measurements of 8.
    assert_eq!(audit["judged_samples"], 2 * 32 + 3 * 8);
    let (code, report) = it.audit(&["--no-store"]);
    assert_eq!((code, &report["findings"]), (NOT_CHECKED, &serde_json::json!([])), "{report:#}");

    let cycles = it.store().join("runs").join(&it.run).join("cycles");
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
    let shown = it.fleet.json(&["run", "show", &it.run]).unwrap();
    assert_eq!(kept.count() as u64, shown["cyclesDone"][2]["kept"].as_u64().unwrap());
    assert!(lines.iter().all(|line| line["prompt"].as_str().unwrap().ends_with("+1=")));
    let tree = second.strip_prefix(it.store()).unwrap().to_str().unwrap().to_owned();
    let facts = format!("{tree}/facts.jsonl.gz");
    it.with(
        &facts,
        |bytes| bytes[40] ^= 1,
        || {
            it.finds(&["--deep"], &facts, "damaged");
        },
    );
    it.fleet.audit_clean(&it.run);
}
