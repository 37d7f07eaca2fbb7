//! Checkpoints reach generators before the orders that need them.

use std::{path::PathBuf, time::Duration};

use e2e::{Fleet, Member, Sampling, SpecFiles, wait_until};
use rustix::process::Signal;

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(120);

const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 32, cycles: 2 };

/// Writes the spec of a run whose next cycle waits for the eval of the checkpoint.
fn write_gated_spec(files: &SpecFiles, base: &str) -> PathBuf {
    let path = files.write_raft_spec(base, SAMPLING);
    let gate = "  gates: { perplexity: [{ suite: heldout, margin: 1000, then: roll_back }] }\n";
    let spec = std::fs::read_to_string(&path).expect("a spec");
    // Held-out samples would be drawn with the checkpoint at once.
    let spec = spec.replace("  heldout: heldout.jsonl\n", "");
    std::fs::write(&path, spec + gate).expect("a file");
    path
}

#[test]
fn a_generator_fetches_and_loads_the_next_adapter_before_it_is_ordered() {
    let fleet = Fleet::start_open("trainer,verifier,evaluator");
    // Agents of `flotilla up` share the cache that the trainer writes to.
    let (nats, home) = (fleet.nats_url(), fleet.path().join("far"));
    let at = home.display().to_string();
    let arguments = ["agent", "--nats", &nats, "--roles", "generator", "--name", "far"];
    let arguments = [&arguments[..], &["--agent-dir", &at]].concat();
    let generator = Member::start("far", &[], &arguments, [], fleet.path());
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&write_gated_spec(&files, &base));
    let log = RawLog::open(&fleet);
    // The gate compares with the base.
    for (what, subject) in [("the eval of the base", "eval.0.>"), ("samples", "samples.1.*")] {
        wait_until(what, LIMIT, || {
            (!log.subjects(&format!("flotilla.{run}.{subject}")).is_empty()).then_some(())
        });
        fleet.signal("evaluator-1", Signal::STOP);
    }
    let checkpoint = wait_until("the first checkpoint", LIMIT, || {
        log.read(log.subjects(&format!("flotilla.{run}.checkpoint.1.*")).last()?)
    });
    let manifest = checkpoint["tree"]["manifest"].as_str().expect("a digest").to_owned();
    let tree = home.join("cache/trees").join(manifest.rsplit(':').next().expect("hex"));
    wait_until("the adapter is in the cache", LIMIT, || tree.exists().then_some(()));
    wait_until("the adapter is loaded", LIMIT, || {
        let text = std::fs::read_to_string(generator.log()).ok()?;
        text.contains("loaded the adapter that the next orders may need").then_some(())
    });
    let orders = log.subjects(&format!("flotilla.{run}.order.generate.>"));
    let is_first = |order: &String| order.split('.').nth(5) == Some("1");
    assert!(orders.iter().all(is_first), "nothing was ordered with it yet: {orders:?}");
    fleet.signal("evaluator-1", Signal::CONT);
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
}
