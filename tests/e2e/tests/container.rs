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
}

impl Drop for Container {
    fn drop(&mut self) {
        docker(&["rm", "-f", "-v", &self.name]);
        docker(&["rmi", "-f", &self.name]);
    }
}

#[test]
fn an_agent_in_a_container_joins_a_fleet_of_its_host_and_leaves_in_order() {
    let answers = Command::new("docker").arg("info").output();
    if !answers.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no container engine answers");
        return;
    }
    let fleet = Fleet::open("evaluator");
    let container = Container::image();
    let (store, nats) = (fleet.path().join("store"), fleet.nats());
    let mut mounts: Vec<String> = vec![format!("{0}:{0}", store.display())];
    // A build for tests needs this machine's libraries, as the static one does not.
    for library in ["/lib", "/lib64", "/usr/lib"].iter().filter(|path| Path::new(path).exists()) {
        let real: PathBuf = fs::canonicalize(library).unwrap();
        mounts.push(format!("{}:{library}:ro", real.display()));
    }
    let nats = format!("FLOTILLA_NATS={nats}");
    let mut run = vec!["run", "-d", "--name", &container.name, "--network", "host", "--read-only"];
    run.extend(["--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]);
    run.extend(["-v", "/var/lib/flotilla", "-e", &nats, "-e", "FLOTILLA_ROLES=generator"]);
    run.extend(["-e", "FLOTILLA_NAME=boxed"]);
    run.extend(mounts.iter().flat_map(|mount| ["-v", mount.as_str()]));
    run.push(&container.name);
    must(&run);
    let state = || {
        let listed = fleet.json(&["agents", "list"]).ok()?;
        let found = listed.as_array()?.iter().find(|agent| agent["agent"] == "boxed")?.clone();
        found["state"].as_str().map(str::to_owned)
    };
    until("the agent is ready", LIMIT, || state().filter(|state| state == "READY"));
    must(&["stop", "-t", "30", &container.name]);
    assert_eq!(state().as_deref(), Some("STOPPED"));
    assert_eq!(must(&["inspect", "-f", "{{.State.ExitCode}}", &container.name]), "0");
}
