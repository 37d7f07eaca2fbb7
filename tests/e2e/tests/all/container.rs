//! An agent in a container, with a fleet on the host, and a fleet in a container. With a static
//! program in `FLOTILLA_BIN`, the container has no files of the host.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use e2e::{Fleet, nats, program_path, wait_until};
use requirements::require_container_engine;

const LIMIT: Duration = Duration::from_secs(60);

fn docker(arguments: &[&str]) -> Output {
    Command::new("docker").args(arguments).stdin(Stdio::null()).output().expect("docker starts")
}

#[track_caller]
fn run_docker(arguments: &[&str]) -> String {
    let output = docker(arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// An image from the Containerfile and its container. Both are removed when it is dropped.
struct Container {
    name: String,
}

impl Container {
    /// Builds a target of the Containerfile.
    fn build(target: &str) -> Self {
        let name = format!("flotilla-e2e-{}", std::process::id());
        let context = tempfile::tempdir().expect("a temporary directory");
        fs::copy(program_path(), context.path().join("flotilla")).expect("a file");
        fs::write(context.path().join("notices"), "notices").expect("a file");
        let server = context.path().join("server");
        fs::create_dir(&server).expect("a directory");
        fs::copy(nats::server_program(), server.join("nats-server")).expect("a nats-server");
        fs::write(server.join("LICENSE-nats-server"), "licence").expect("a file");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/Containerfile");
        let (file, context) = (file.display().to_string(), context.path().display().to_string());
        run_docker(&[
            "build",
            "--target",
            target,
            "--build-arg",
            "BASE=scratch",
            "--build-arg",
            "BINARY=flotilla",
            "--build-arg",
            "NOTICES=notices",
            "--build-arg",
            "NATS_SERVER=server",
            "-t",
            &name,
            "-f",
            &file,
            &context,
        ]);
        Self { name }
    }

    /// Starts the container in the host's network, with these arguments and this environment.
    fn run(&self, environment: &[String], mounts: &[String], arguments: &[&str]) {
        let mut run = vec!["run", "-d", "--name", &self.name, "--network", "host", "--read-only"];
        run.extend(["--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]);
        run.extend(["-v", "/var/lib/flotilla"]);
        run.extend(environment.iter().flat_map(|variable| ["-e", variable.as_str()]));
        let libraries = libraries();
        run.extend(mounts.iter().chain(&libraries).flat_map(|mount| ["-v", mount.as_str()]));
        run.push(&self.name);
        run.extend(arguments);
        run_docker(&run);
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        docker(&["rm", "-f", "-v", &self.name]);
        docker(&["rmi", "-f", &self.name]);
    }
}

/// Returns true if the program names no interpreter that loads libraries.
fn is_static(program: &Path) -> bool {
    const INTERPRETER: usize = 3;
    let elf = fs::read(program).expect("a program");
    let number = |at: usize, bytes: usize| {
        elf[at..at + bytes].iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte))
    };
    // The place, size and number of the program headers in a 64-bit file.
    let (first, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).all(|header| number(first + header * size, 4) != INTERPRETER)
}

/// A test build is linked dynamically and needs the libraries of the host.
fn libraries() -> Vec<String> {
    if is_static(&program_path()) {
        return Vec::new();
    }
    let all = ["/lib", "/lib64", "/usr/lib"];
    let existing = all.iter().filter(|path| Path::new(path).exists());
    existing
        .map(|library| {
            let real: PathBuf = fs::canonicalize(library).expect("it was there");
            format!("{}:{library}:ro", real.display())
        })
        .collect()
}

fn agent_state(fleet: &Fleet) -> Option<String> {
    let listed = fleet.run_json(&["agents", "list"]).ok()?;
    let found = listed.as_array()?.iter().find(|agent| agent["agent"] == "boxed")?.clone();
    found["state"].as_str().map(str::to_owned)
}

fn await_ready(fleet: &Fleet) {
    wait_until("the agent is ready", LIMIT, || agent_state(fleet).filter(|state| state == "READY"));
}

#[test]
fn an_agent_in_a_container_joins_a_fleet_of_its_host_and_shuts_down_cleanly() {
    if require_container_engine(&["docker"]).is_none() {
        return;
    }
    let fleet = Fleet::start_open("evaluator");
    let container = Container::build("agent");
    let (store, nats) = (fleet.path().join("store"), fleet.nats_url());
    let environment = [
        format!("FLOTILLA_NATS={nats}"),
        "FLOTILLA_ROLES=generator".into(),
        "FLOTILLA_NAME=boxed".into(),
    ];
    container.run(&environment, &[format!("{0}:{0}", store.display())], &[]);
    await_ready(&fleet);
    run_docker(&["stop", "-t", "30", &container.name]);
    assert_eq!(agent_state(&fleet).as_deref(), Some("STOPPED"));
    assert_eq!(run_docker(&["inspect", "-f", "{{.State.ExitCode}}", &container.name]), "0");
}

#[test]
fn a_container_joins_a_closed_fleet_once_and_is_still_a_member_after_a_restart() {
    if require_container_engine(&["docker"]).is_none() {
        return;
    }
    let fleet = Fleet::start("evaluator");
    let container = Container::build("agent");
    let created = fleet.run_json(&["token", "create", "--roles", "generator"]).unwrap();
    let line = created["line"].as_str().unwrap();
    // The container mounts no files of the host and gets the fleet's files from the gateway.
    let environment = [format!("FLOTILLA_TOKEN={line}"), "FLOTILLA_NAME=boxed".into()];
    container.run(&environment, &[], &["join"]);
    await_ready(&fleet);
    let id = created["token"]["id"].as_str().unwrap();
    assert_eq!(fleet.run(&["token", "revoke", id]).code, 0);
    run_docker(&["stop", "-t", "30", &container.name]);
    assert_eq!(agent_state(&fleet).as_deref(), Some("STOPPED"));
    run_docker(&["start", &container.name]);
    await_ready(&fleet);
    let stderr = docker(&["logs", &container.name]).stderr;
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(stderr.contains("boxed is already a member"), "{stderr}");
}

#[test]
fn the_image_of_a_fleet_has_all_that_a_fleet_needs_and_shuts_down_cleanly() {
    if require_container_engine(&["docker"]).is_none() {
        return;
    }
    let container = Container::build("fleet");
    container.run(&[], &[], &["up"]);
    wait_until("the gateway answers", LIMIT, || {
        let asked =
            docker(&["exec", &container.name, "/usr/bin/flotilla", "agents", "list", "--json"]);
        (asked.status.success() && asked.stdout.starts_with(b"[]")).then_some(())
    });
    let token = ["token", "create", "--roles", "generator"];
    run_docker(&[&["exec", container.name.as_str(), "/usr/bin/flotilla"][..], &token].concat());
    run_docker(&["stop", "-t", "30", &container.name]);
    assert_eq!(run_docker(&["inspect", "-f", "{{.State.ExitCode}}", &container.name]), "0");
}
