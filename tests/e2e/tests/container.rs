//! A box's agent in a container of its own, for a fleet of this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use e2e::{Fleet, binary, until};

const LIMIT: Duration = Duration::from_secs(60);

fn docker(arguments: &[&str]) -> Output {
    Command::new("docker").args(arguments).stdin(Stdio::null()).output().expect("docker starts")
}

#[track_caller]
fn must(arguments: &[&str]) -> String {
    let output = docker(arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// An image from the Containerfile, and what runs of it; both go with the test.
struct Container {
    name: String,
}

impl Container {
    fn image() -> Self {
        let name = format!("flotilla-e2e-{}", std::process::id());
        let context = tempfile::tempdir().expect("a temporary directory");
        fs::copy(binary(), context.path().join("flotilla")).expect("a file");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/Containerfile");
        let (file, context) = (file.display().to_string(), context.path().display().to_string());
        let argument = "BINARY=flotilla";
        must(&[
            "build",
            "--target",
            "agent",
            "--build-arg",
            argument,
            "-t",
            &name,
            "-f",
            &file,
            &context,
        ]);
        Self { name }
    }

    /// Runs what stands at the end, in this machine's network, with this environment.
    fn run(&self, environment: &[String], mounts: &[String], arguments: &[&str]) {
        let mut run = vec!["run", "-d", "--name", &self.name, "--network", "host", "--read-only"];
        run.extend(["--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]);
        run.extend(["-v", "/var/lib/flotilla"]);
        run.extend(environment.iter().flat_map(|variable| ["-e", variable.as_str()]));
        let libraries = libraries();
        run.extend(mounts.iter().chain(&libraries).flat_map(|mount| ["-v", mount.as_str()]));
        run.push(&self.name);
        run.extend(arguments);
        must(&run);
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        docker(&["rm", "-f", "-v", &self.name]);
        docker(&["rmi", "-f", &self.name]);
    }
}

/// A build for tests needs this machine's libraries, as the static one does not.
fn libraries() -> Vec<String> {
    let all = ["/lib", "/lib64", "/usr/lib"];
    let there = all.iter().filter(|path| Path::new(path).exists());
    there
        .map(|library| {
            let real: PathBuf = fs::canonicalize(library).expect("it was there");
            format!("{}:{library}:ro", real.display())
        })
        .collect()
}

fn has_engine() -> bool {
    let answers = Command::new("docker").arg("info").output();
    let has = answers.is_ok_and(|output| output.status.success());
    if !has {
        eprintln!("skipped: no container engine answers");
    }
    has
}

fn state(fleet: &Fleet) -> Option<String> {
    let listed = fleet.json(&["agents", "list"]).ok()?;
    let found = listed.as_array()?.iter().find(|agent| agent["agent"] == "boxed")?.clone();
    found["state"].as_str().map(str::to_owned)
}

fn await_ready(fleet: &Fleet) {
    until("the agent is ready", LIMIT, || state(fleet).filter(|state| state == "READY"));
}

#[test]
fn an_agent_in_a_container_joins_a_fleet_of_its_host_and_leaves_in_order() {
    if !has_engine() {
        return;
    }
    let fleet = Fleet::open("evaluator");
    let container = Container::image();
    let (store, nats) = (fleet.path().join("store"), fleet.nats());
    let environment = [
        format!("FLOTILLA_NATS={nats}"),
        "FLOTILLA_ROLES=generator".into(),
        "FLOTILLA_NAME=boxed".into(),
    ];
    container.run(&environment, &[format!("{0}:{0}", store.display())], &[]);
    await_ready(&fleet);
    must(&["stop", "-t", "30", &container.name]);
    assert_eq!(state(&fleet).as_deref(), Some("STOPPED"));
    assert_eq!(must(&["inspect", "-f", "{{.State.ExitCode}}", &container.name]), "0");
}

#[test]
fn a_box_in_a_container_joins_a_closed_fleet_once_and_is_a_member_when_it_comes_back() {
    if !has_engine() {
        return;
    }
    let fleet = Fleet::up("evaluator");
    let container = Container::image();
    let made = fleet.json(&["token", "create", "--roles", "generator"]).unwrap();
    let line = made["line"].as_str().unwrap();
    // Nothing of this machine is there: it has the fleet's files from its gateway.
    let environment = [format!("FLOTILLA_TOKEN={line}"), "FLOTILLA_NAME=boxed".into()];
    container.run(&environment, &[], &["join"]);
    await_ready(&fleet);
    let id = made["token"]["id"].as_str().unwrap();
    assert_eq!(fleet.run(&["token", "revoke", id]).code, 0);
    must(&["stop", "-t", "30", &container.name]);
    assert_eq!(state(&fleet).as_deref(), Some("STOPPED"));
    must(&["start", &container.name]);
    await_ready(&fleet);
    let said = docker(&["logs", &container.name]).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("boxed is already a member"), "{said}");
}
