//! The demo, whose model must really learn, and then every run spec and script of `examples/`, run
//! as its README describes.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use e2e::{Fleet, PythonEnv, SpecFiles, program_path};
use requirements::require_namespaces;
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// A copy of `examples/` that sandboxed programs can read, even if the checkout is root's own, and
/// the names of the files that have run or cannot run here.
struct Examples {
    directory: TempDir,
    covered: BTreeSet<String>,
}

impl Examples {
    fn copy() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
        for entry in fs::read_dir(repository().join("examples")).expect("the examples") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let name = path.file_name().expect("a file has a name");
                fs::copy(&path, directory.path().join(name)).expect("a copy");
            }
        }
        Self { directory, covered: BTreeSet::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn mark_covered(&mut self, name: &str) {
        self.covered.insert(name.to_owned());
    }

    /// Submits a spec and returns the id of its run, and the run once it has succeeded.
    fn run_spec(&mut self, fleet: &Fleet, name: &str) -> (String, Value) {
        let id = fleet.submit(&self.path(name));
        let ended = fleet.await_success(&id, LIMIT);
        fleet.assert_clean_audit(&id);
        self.mark_covered(name);
        (id, ended)
    }

    /// Runs the script on a spec and returns its output. `fleet` is the variable that names the
    /// fleet, and its value.
    fn follow(&mut self, python: &PythonEnv, spec: &str, fleet: (&str, &str)) -> String {
        let script = "submit_and_follow.py";
        let client = generate_client(python);
        let mut command = python.command("python");
        command.arg(self.path(script)).arg(self.path(spec));
        command.env_remove("FLOTILLA_DIR").env(fleet.0, fleet.1).env("PYTHONPATH", client.path());
        let printed = stdout_of_success(&command.output().expect("Python starts"));
        self.mark_covered(script);
        printed
    }

    /// The specs and scripts of the folder.
    fn specs_and_scripts(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.directory.path()).expect("the examples");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let names = names.map(|name| name.into_string().expect("UTF-8"));
        names.filter(|name| name.ends_with(".yaml") || name.ends_with(".py")).collect()
    }
}

fn stdout_of_success(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Generates the Python client with the command of docs/SCRIPTS.md.
fn generate_client(python: &PythonEnv) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let proto = repository().join("proto");
    let entries = fs::read_dir(proto.join("flotilla/v1")).expect("the protocol");
    let files = entries.map(|entry| entry.expect("an entry").path());
    let mut command = python.command("python");
    command.args(["-m", "grpc_tools.protoc", "-I"]).arg(&proto);
    for option in ["--python_out", "--grpc_python_out"] {
        command.arg(format!("{option}={}", directory.path().display()));
    }
    command.args(files.filter(|path| path.extension().is_some_and(|it| it == "proto")));
    stdout_of_success(&command.output().expect("Python starts"));
    directory
}

/// Runs the demo in a directory and returns its report.
fn run_demo(directory: &Path) -> Value {
    let mut demo = Command::new(program_path());
    demo.args(["demo", "--seed", "7", "--json", "--dir"]).arg(directory);
    let printed = stdout_of_success(&demo.output().expect("the demo starts"));
    serde_json::from_str(&printed).expect("exactly one document")
}

fn assert_demo_learned(report: &Value) {
    let checkpoints = report["checkpoints"].as_array().expect("as it is documented");
    let base: Vec<f64> = checkpoints
        .iter()
        .filter(|checkpoint| checkpoint["run"] == report["runs"][0])
        .map(|checkpoint| checkpoint["perplexity"].as_f64().expect("as it is documented"))
        .collect();
    assert_eq!(base.len(), 10, "a checkpoint every 40 of 400 steps");
    // The best possible perplexity is 1.
    assert!(base[9] - 1.0 < (base[0] - 1.0) / 4.0, "perplexity falls: {base:?}");

    let cycles = report["cycles"].as_array().expect("as it is documented");
    let number =
        |cycle: usize, key: &str| cycles[cycle][key].as_f64().expect("as it is documented");
    assert_eq!(cycles.len(), 4);
    assert_eq!(cycles[0]["sampled"], 0);
    for cycle in &cycles[1..] {
        assert_eq!(cycle["sampled"], 2048);
        let agents = cycle["samples_by_agent"].as_object().expect("as it is documented");
        let total: u64 =
            agents.values().map(|count| count.as_u64().expect("as it is documented")).sum();
        assert_eq!(total, 2048 + 600, "every sample is counted once");
    }
    let rates: Vec<f64> = (0..4).map(|cycle| number(cycle, "heldout_pass_rate")).collect();
    assert!(rates[3] > rates[0] + 0.2 && rates[3] > 0.75, "it learns: {rates:?}");
    assert!(number(3, "heldout_perplexity") < number(0, "heldout_perplexity"));
}

/// Starts the fleet that the demo leaves behind. Its agents look for commands in `examples`, which
/// their owner opened.
fn start_demo_fleet(directory: TempDir, examples: &Path) -> Fleet {
    let examples = examples.display().to_string();
    let path = format!("{examples}:{}", std::env::var("PATH").unwrap_or_default());
    let environment = [("PATH".to_owned(), path), ("FLOTILLA_VERIFIER_PATH".to_owned(), examples)];
    Fleet::start_in(directory, "trainer,generator,verifier,evaluator", &[], environment)
}

fn perplexities(run: &Value) -> Vec<f64> {
    let evals = run["evals"].as_array().into_iter().flatten();
    evals.map(|eval| eval["perplexity"].as_f64().expect("a perplexity")).collect()
}

fn heldout_pass_rates(run: &Value) -> Vec<f64> {
    let cycles = run["cyclesDone"].as_array().into_iter().flatten();
    cycles.map(|cycle| cycle["heldout"]["mean"].as_f64().expect("a pass rate")).collect()
}

#[test]
fn the_demo_learns_and_the_fleet_that_it_leaves_runs_every_example() {
    let demo = tempfile::tempdir().expect("a directory");
    assert_demo_learned(&run_demo(demo.path()));
    let mut examples = Examples::copy();
    let fleet = start_demo_fleet(demo, examples.directory.path());

    let (_, sft) = examples.run_spec(&fleet, "sft.yaml");
    assert_eq!(perplexities(&sft).len(), 3, "after steps 8, 16 and 24: {sft:#}");

    let (_, raft) = examples.run_spec(&fleet, "raft.yaml");
    assert_eq!(perplexities(&raft).len(), 3, "of the base and two cycles: {raft:#}");
    let rates = heldout_pass_rates(&raft);
    assert!(rates.len() == 3 && rates[2] > rates[0] + 0.1, "it learns: {rates:?}");
    assert!(raft["cyclesDone"][2]["suites"][0]["rate"]["mean"].is_number(), "{raft:#}");

    if require_namespaces() {
        let (id, command) = examples.run_spec(&fleet, "raft-command.yaml");
        assert_eq!(heldout_pass_rates(&command).len(), 2, "{command:#}");
        let facts = Value::from(fleet.read_facts(&id)).to_string();
        assert!(facts.contains("2 of 2 steps right, answer right"), "judge_sum.py judged: {facts}");
    } else {
        examples.mark_covered("raft-command.yaml");
    }
    examples.mark_covered("judge_sum.py");

    if let Some(python) = PythonEnv::with_client_packages() {
        let credentials = fleet.path().display().to_string();
        let printed = examples.follow(&python, "raft.yaml", ("FLOTILLA_DIR", &credentials));
        assert!(printed.contains(" samples\n"), "progress: {printed}");
        assert!(printed.contains("cycle 0, step 0, worked: perplexity 1."), "{printed}");
        assert!(printed.contains("cycle 2, held-out: pass rate "), "{printed}");
        assert!(printed.contains("cycle 2, carry: pass rate "), "{printed}");
        let last = printed.lines().last().unwrap_or_default();
        assert!(last.starts_with("sums-raft-2 succeeded"), "{printed}");
    } else {
        examples.mark_covered("submit_and_follow.py");
    }
    assert_eq!(examples.covered, examples.specs_and_scripts(), "run each example in this test");
}

#[test]
fn the_script_of_the_examples_follows_a_run_of_an_open_fleet() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let mut examples = Examples::copy();
    let fleet = Fleet::start_open("trainer,evaluator");
    let base = fleet.submit(&SpecFiles::create(fleet.path()).write_sft_spec(10, 0));
    assert_eq!(base, "base-1", "the base that examples name");
    fleet.await_success(&base, LIMIT);
    let file = fleet.read_fleet_file();
    let gateway = file["gateway"].as_str().expect("an address");
    let printed = examples.follow(&python, "sft.yaml", ("GATEWAY", gateway));
    for step in [8, 16, 24] {
        assert!(
            printed.contains(&format!("cycle 0, step {step}, worked: perplexity ")),
            "{printed}"
        );
    }
    let last = printed.lines().last().unwrap_or_default();
    assert!(last.starts_with("sums-sft-1 succeeded"), "{printed}");
}
