//! The demo, whose model must really learn, and then every run spec and script of `examples/`, run
//! as its README describes.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use e2e::{ChildGuard, Fleet, PythonEnv, SpecFiles, program_path};
use requirements::require_namespaces;
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);
/// The folder of the scripts in `examples/`.
const SCRIPTS: &str = "python";

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
        fs::create_dir(directory.path().join(SCRIPTS)).expect("a directory");
        for folder in ["", SCRIPTS] {
            let from = repository().join("examples").join(folder);
            for entry in fs::read_dir(from).expect("the examples") {
                let path = entry.expect("an entry").path();
                if path.is_file() {
                    let name = path.file_name().expect("a file has a name");
                    fs::copy(&path, directory.path().join(folder).join(name)).expect("a copy");
                }
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

    /// Runs a script of the folder `python` beside the specs, and returns its output.
    fn run_script(&mut self, python: &PythonEnv, fleet: &Fleet, command: &[&str]) -> String {
        let name = format!("{SCRIPTS}/{}", command[0]);
        let mut script = python.command("python");
        script.arg(self.path(&name)).args(&command[1..]).env("FLOTILLA_DIR", fleet.path());
        script.current_dir(self.directory.path());
        let printed = stdout_of_success(&script.output().expect("Python starts"));
        self.mark_covered(&name);
        printed
    }

    /// Runs the script that prints results without end, until it has printed `count`. Returns all that
    /// it printed.
    fn watch_evals(
        &mut self,
        python: &PythonEnv,
        fleet: &Fleet,
        run: &str,
        count: usize,
    ) -> Vec<String> {
        let name = format!("{SCRIPTS}/watch_evals.py");
        let mut script = python.command("python");
        script.arg(self.path(&name)).arg(run).env("FLOTILLA_DIR", fleet.path());
        script.current_dir(self.directory.path()).stdout(Stdio::piped());
        let mut watching = ChildGuard(script.spawn().expect("Python starts"));
        let mut lines = BufReader::new(watching.0.stdout.take().expect("its output")).lines();
        self.mark_covered(&name);
        let mut printed: Vec<String> =
            lines.by_ref().take(count).map(|line| line.expect("UTF-8")).collect();
        drop(watching);
        printed.extend(lines.map_while(Result::ok));
        printed
    }

    /// The specs and scripts of the folder.
    fn specs_and_scripts(&self) -> BTreeSet<String> {
        let read = |folder: &str| {
            let entries = fs::read_dir(self.path(folder)).expect("the examples");
            let paths = entries.map(|entry| entry.expect("an entry").path());
            let names = paths.map(|path| {
                let name = path.strip_prefix(self.directory.path()).expect("a copy");
                name.display().to_string()
            });
            names.collect::<Vec<_>>()
        };
        let names = [read(""), read(SCRIPTS)].concat().into_iter();
        names.filter(|name| name.ends_with(".yaml") || name.ends_with(".py")).collect()
    }
}

fn stdout_of_success(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs the demo in a directory and returns its report.
fn run_demo(directory: &Path, arguments: &[&str]) -> Value {
    let mut demo = Command::new(program_path());
    demo.arg("demo").args(arguments).args(["--json", "--dir"]).arg(directory);
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

/// Runs the example of an environment. Returns the pass rates of its cycles.
fn assert_learns_the_tool(examples: &mut Examples, fleet: &Fleet) -> Vec<f64> {
    let (id, played) = examples.run_spec(fleet, "raft-environment.yaml");
    let rates = heldout_pass_rates(&played);
    println!("{id}: held-out pass rates {rates:?}");
    assert!(rates.len() == 4 && rates[3] > rates[0] + 0.3, "it learns: {rates:?}");
    rates
}

#[test]
#[ignore = "figures of five seeds, in minutes"]
fn the_tool_of_the_examples_is_learned_with_each_of_five_seeds() {
    for seed in 1..=5 {
        let demo = tempfile::tempdir().expect("a directory");
        run_demo(demo.path(), &["--seed", &seed.to_string(), "--cycles", "1"]);
        let mut examples = Examples::copy();
        let spec = examples.path("raft-environment.yaml");
        let text = fs::read_to_string(&spec).expect("a spec");
        fs::write(&spec, text.replace("seed: 1", &format!("seed: {seed}"))).expect("a spec");
        let fleet = start_demo_fleet(demo, examples.directory.path());
        assert_learns_the_tool(&mut examples, &fleet);
    }
}

/// Submits the demo's second run again, and prints its forecast from the log before beside the actual
/// duration.
fn print_demo_forecast(fleet: &Fleet) {
    let run = fleet.submit(&fleet.path().join("demo/raft.yaml"));
    fleet.await_success(&run, LIMIT);
    let story = fleet.run_json(&["run", "explain", &run, "--forecast"]).expect("a story");
    let compared = &story["forecast"];
    let number = |value: &Value| value.as_f64().expect("a number");
    let range = &compared["forecast"]["seconds"];
    let [low, median, high] = ["low", "median", "high"].map(|name| number(&range[name]));
    let (actual, memory) = (number(&compared["actual_s"]), &compared["forecast"]["memory"]);
    println!("{run}: forecast {median:.1} s [{low:.1}, {high:.1}], took {actual:.1} s; {memory}");
    assert!(median < 4.0 * actual && actual < 4.0 * median, "{compared:#}");
}

#[test]
fn the_demo_learns_and_the_fleet_that_it_leaves_runs_every_example() {
    let demo = tempfile::tempdir().expect("a directory");
    assert_demo_learned(&run_demo(demo.path(), &["--seed", "7"]));
    let mut examples = Examples::copy();
    let fleet = start_demo_fleet(demo, examples.directory.path());

    print_demo_forecast(&fleet);
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
        assert_learns_the_tool(&mut examples, &fleet);
    } else {
        examples.mark_covered("raft-command.yaml");
        examples.mark_covered("raft-environment.yaml");
    }
    examples.mark_covered("judge_sum.py");
    examples.mark_covered("sum_tool.py");
    // It describes no run: the tests of `generating_data` use it.
    examples.mark_covered("homelab-assistant.yaml");

    match PythonEnv::with_client_packages() {
        Some(python) => run_scripts(&mut examples, &python, &fleet),
        None => {
            let names = examples.specs_and_scripts().into_iter();
            examples.covered.extend(names.filter(|name| name.starts_with(SCRIPTS)));
        }
    }
    assert_eq!(examples.covered, examples.specs_and_scripts(), "run each example in this test");
}

/// Runs every script of the folder `python`. The fleet has the runs of all specs.
fn run_scripts(examples: &mut Examples, python: &PythonEnv, fleet: &Fleet) {
    let printed = examples.run_script(python, fleet, &["submit_and_follow.py", "raft.yaml"]);
    assert!(printed.contains(" samples\n"), "progress: {printed}");
    assert!(printed.contains("cycle 0, step 0, worked: perplexity 1."), "{printed}");
    assert!(printed.contains("cycle 2, held out: pass rate "), "{printed}");
    assert!(printed.contains("cycle 2, carry: pass rate "), "{printed}");
    assert_eq!(printed.lines().last(), Some("sums-raft-2 succeeded"), "{printed}");

    let mut seen: Vec<String> = Vec::new();
    while seen.len() < 3 {
        // One that was printed as the script was killed may be printed again.
        let printed = examples.watch_evals(python, fleet, "sums-sft-1", 1);
        assert!(!printed.is_empty(), "the script ended after {seen:?}");
        seen.extend(printed.into_iter().filter(|line| !seen.contains(line)).collect::<Vec<_>>());
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
    for (line, step) in seen.iter().zip([8, 16, 24]) {
        let expected = format!("sums-sft-1, cycle 0, step {step}, worked: perplexity ");
        assert!(line.starts_with(&expected), "{line}");
    }

    let table = examples.run_script(python, fleet, &["tabulate_samples.py", "sums-raft-1", "1"]);
    assert!(table.contains("kept") && table.contains("prompt"), "{table}");
    let best = examples.path("best").display().to_string();
    let files = examples.run_script(python, fleet, &["download_best.py", "sums-raft-1", &best]);
    assert!(files.contains("adapter_model.safetensors"), "{files}");
    let rates = examples.run_script(python, fleet, &["compare_learning_rates.py"]);
    let lines: Vec<&str> = rates.lines().collect();
    assert_eq!(lines.len(), 3, "{rates}");
    for (line, rate) in lines.iter().zip(["0.0005", "0.001", "0.002"]) {
        assert!(line.starts_with(&format!("learning rate {rate}: rates-")), "{line}");
    }

    let long = fs::read_to_string(examples.path("sft.yaml")).expect("a spec");
    let long_spec = examples.path("long.spec");
    fs::write(&long_spec, long.replace("epochs: 4", "epochs: 4000")).expect("a spec");
    let run = fleet.submit(&long_spec);
    for (arguments, state) in
        [(&["pause_runs.py"][..], "paused"), (&["pause_runs.py", "resume"][..], "running")]
    {
        let states = examples.run_script(python, fleet, arguments);
        assert!(states.lines().any(|line| line == format!("{run} {state}")), "{states}");
    }
    fleet.run(&["run", "cancel", &run]).assert_success();
}

#[test]
fn the_script_of_the_examples_follows_a_run_of_an_open_fleet() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let mut examples = Examples::copy();
    let fleet = Fleet::start_open("trainer,evaluator");
    let base = fleet.submit(&SpecFiles::create(fleet.path()).write_sft_spec(10, 0));
    assert_eq!(base, "base-1", "the base that examples name");
    fleet.await_success(&base, LIMIT);
    let printed = examples.run_script(&python, &fleet, &["submit_and_follow.py", "sft.yaml"]);
    for step in [8, 16, 24] {
        assert!(
            printed.contains(&format!("cycle 0, step {step}, worked: perplexity ")),
            "{printed}"
        );
    }
    assert_eq!(printed.lines().last(), Some("sums-sft-1 succeeded"), "{printed}");
}
