//! Quadlet, compose and the Containerfile: read strictly, and by the programs that use them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use deploy::{files, flag_sources, name, program, read, root, run, said};
use serde::Deserialize;

/// Keys of podman-systemd.unit(5), as of Podman 4.6 and later, that these files use or may use.
const CONTAINER: [&str; 22] = [
    "AddDevice",
    "ContainerName",
    "DropCapability",
    "Environment",
    "EnvironmentFile",
    "Exec",
    "GroupAdd",
    "Image",
    "Network",
    "NoNewPrivileges",
    "Notify",
    "PodmanArgs",
    "PublishPort",
    "ReadOnly",
    "SeccompProfile",
    "SecurityLabelDisable",
    "SecurityLabelType",
    "Tmpfs",
    "Unmask",
    "User",
    "Volume",
    "WorkingDir",
];

/// Sections of a unit, each a list of keys and values. Comments are whole lines.
fn sections(text: &str) -> BTreeMap<String, Vec<(String, String)>> {
    let mut sections: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    let mut section = String::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.to_owned();
        } else {
            let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("no key: {line:?}"));
            sections.entry(section.clone()).or_default().push((key.into(), value.into()));
        }
    }
    sections
}

fn quadlets() -> Vec<PathBuf> {
    [".container", ".volume"].iter().flat_map(|end| files("deploy/podman", end)).collect()
}

#[test]
fn quadlets_have_only_keys_that_podman_documents_and_name_what_is_there() {
    let here: Vec<String> = quadlets().iter().map(|path| name(path)).collect();
    for path in quadlets() {
        let sections = sections(&fs::read_to_string(&path).expect("a unit"));
        let of = path.display();
        for (section, pairs) in &sections {
            let known: &[&str] = match section.as_str() {
                "Container" => &CONTAINER,
                "Volume" => &["VolumeName"],
                "Unit" | "Service" | "Install" => continue,
                other => panic!("{of}: [{other}]"),
            };
            for (key, value) in pairs {
                assert!(known.contains(&key.as_str()), "{of}: {key}");
                let other = value.split(':').next().unwrap_or_default();
                let is_unit = other.ends_with(".volume");
                assert!(!is_unit || here.iter().any(|name| name == other), "{of}: {other}");
            }
        }
        let Some(container) = sections.get("Container") else { continue };
        let has = |key: &str, value: &str| {
            assert!(container.iter().any(|pair| pair.0 == key && pair.1 == value), "{of}: {key}");
        };
        has("DropCapability", "all");
        has("NoNewPrivileges", "true");
        has("ReadOnly", "true");
        // Nobody passes the words of a container's watchdog on.
        assert!(!sections["Service"].iter().any(|(key, _)| key == "WatchdogSec"), "{of}");
    }
    let agent = sections(&read("deploy/podman/flotilla-agent.container"));
    for (key, value) in [
        ("AddDevice", "-/dev/kfd"),
        ("AddDevice", "-/dev/dri"),
        ("GroupAdd", "keep-groups"),
        ("SecurityLabelType", "container_device_t"),
    ] {
        assert!(agent["Container"].contains(&(key.into(), value.into())), "{key}={value}");
    }
}

#[test]
fn podman_s_own_generator_makes_services_of_the_quadlets() {
    let names = ["quadlet", "podman-system-generator"];
    let Some(quadlet) = program("QUADLET", &names) else { return };
    let mut command = Command::new(quadlet);
    command.env("QUADLET_UNIT_DIRS", root().join("deploy/podman"));
    let output = run(command.arg("-dryrun"));
    let made = said(&output);
    assert!(output.status.success(), "{made}");
    for path in quadlets() {
        let (name, kind) = (name(&path), path.extension().expect("a kind").to_string_lossy());
        let stem = name.trim_end_matches(&format!(".{kind}"));
        let service = if kind == "container" { stem.into() } else { format!("{stem}-{kind}") };
        assert!(made.contains(&format!("---{service}.service---")), "{service}: {made}");
    }
    for wrong in ["unsupported", "converting", "error"] {
        assert!(!made.to_lowercase().contains(wrong), "{made}");
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Compose {
    services: BTreeMap<String, Service>,
    volumes: BTreeMap<String, Option<()>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    image: String,
    command: Vec<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    volumes: Vec<String>,
    #[serde(default)]
    ports: Vec<String>,
    #[serde(default)]
    depends_on: Vec<String>,
    #[serde(default)]
    cap_drop: Vec<String>,
    #[serde(default)]
    security_opt: Vec<String>,
    #[serde(default)]
    read_only: bool,
    #[serde(default)]
    #[expect(dead_code, reason = "what may be said")]
    tmpfs: Vec<String>,
    stop_grace_period: Option<String>,
    restart: String,
    network_mode: Option<String>,
}

#[test]
fn the_compose_file_is_whole_and_lets_in_members_alone() {
    let compose: Compose = serde_saphyr::from_str(&read("deploy/compose.yaml")).expect("YAML");
    let sources = flag_sources();
    for (name, service) in &compose.services {
        for volume in &service.volumes {
            let source = volume.split(':').next().expect("a volume has a source");
            let there = match source.strip_prefix("./") {
                Some(path) => root().join("deploy").join(path).exists(),
                None => compose.volumes.contains_key(source),
            };
            assert!(there, "{name}: no {source}");
        }
        for other in &service.depends_on {
            assert!(compose.services.contains_key(other), "{name}: no {other}");
        }
        for variable in service.environment.keys() {
            assert!(
                sources.contains(&format!("\"{variable}\"")),
                "{name}: no command reads {variable}"
            );
        }
        assert_eq!(service.restart, "on-failure", "{name}: an agent that was drained stays away");
        assert!(["flotilla", "flotilla-fleet"].contains(&service.image.as_str()), "{name}");
        assert!(service.read_only && service.cap_drop == ["ALL"], "{name}");
        assert_eq!(service.security_opt, ["no-new-privileges:true"], "{name}");
    }
    // Not `--open`, as everybody on the network reaches it.
    assert_eq!(compose.services["fleet"].command, ["up"]);
    assert_eq!(compose.services["fleet"].ports, ["4222:4222", "7070:7070"]);
    assert_eq!(compose.services["agent"].command, ["join"]);
    assert_eq!(compose.services["agent"].network_mode.as_deref(), Some("host"));
    assert!(compose.services["agent"].ports.is_empty());
    // As long as the unit's TimeoutStopSec=.
    assert_eq!(compose.services["agent"].stop_grace_period.as_deref(), Some("90s"));
    let Some(docker_compose) = program("DOCKER_COMPOSE", &["docker-compose"]) else { return };
    let mut command = Command::new(docker_compose);
    let output =
        run(command.arg("-f").arg(root().join("deploy/compose.yaml")).args(["config", "-q"]));
    assert!(output.status.success(), "{}", said(&output));
}

/// The engine that builds here, if one answers.
fn docker() -> Option<PathBuf> {
    let docker = program("DOCKER", &["docker", "podman"])?;
    let answers = run(Command::new(&docker).arg("info")).status.success();
    if !answers {
        eprintln!("skipped: no container engine answers");
    }
    answers.then_some(docker)
}

/// An image that goes with the test.
struct Image {
    docker: PathBuf,
    tag: String,
}

impl Image {
    fn build(docker: &Path, binary: &Path) -> Self {
        let context = tempfile::tempdir().expect("a directory");
        fs::copy(binary, context.path().join("flotilla")).expect("a binary");
        let tag = format!("flotilla-test-{}", std::process::id());
        let mut command = Command::new(docker);
        command.args([
            "build",
            "--target",
            "agent",
            "--build-arg",
            "BINARY=flotilla",
            "-t",
            &tag,
            "-f",
        ]);
        let output = run(command.arg(root().join("deploy/Containerfile")).arg(context.path()));
        assert!(output.status.success(), "{}", said(&output));
        Self { docker: docker.to_owned(), tag }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = Command::new(&self.docker).args(["rmi", "-f", &self.tag]).output();
    }
}

#[test]
fn the_containerfile_builds_from_nothing_and_the_program_runs_in_it() {
    let Some(docker) = docker() else { return };
    let fixed = root().join("target/x86_64-unknown-linux-musl/release/flotilla");
    let test = std::env::current_exe().expect("a path");
    let built = test.ancestors().nth(2).expect("target/PROFILE").join("flotilla");
    let (binary, libraries) = if fixed.exists() { (fixed, false) } else { (built, true) };
    if !binary.exists() {
        eprintln!("skipped: {} was not built", binary.display());
        return;
    }
    let image = Image::build(&docker, &binary);
    let mut command = Command::new(&docker);
    command.args(["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]);
    if libraries {
        // This machine's, as a debug build has them.
        for library in ["/lib", "/lib64", "/usr/lib"].iter().filter(|path| Path::new(path).exists())
        {
            let real = fs::canonicalize(library).expect("a directory");
            command.args(["-v", &format!("{}:{library}:ro", real.display())]);
        }
    }
    let output = run(command.args([&image.tag, "--version"]));
    assert!(said(&output).starts_with("flotilla "), "{}", said(&output));
}
