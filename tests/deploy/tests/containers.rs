//! Quadlet units, the compose file and the Containerfile, checked strictly and with the programs
//! that use them.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use deploy::{
    file_name, find_built_program, flag_sources, list_files, output_text, read_file, root,
    run_command,
};
use requirements::{find_program, require_container_engine, require_program, skip_test};
use serde::Deserialize;
use serde_json::Value;

/// Keys of podman-systemd.unit(5), as of Podman 4.6 and later, that these files may use.
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

/// Splits a unit into sections with their keys and values. Comments are whole lines.
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
    [".container", ".volume"].iter().flat_map(|end| list_files("deploy/podman", end)).collect()
}

#[test]
fn quadlets_only_have_documented_keys_and_existing_units() {
    let names: Vec<String> = quadlets().iter().map(|path| file_name(path)).collect();
    for path in quadlets() {
        let sections = sections(&fs::read_to_string(&path).expect("a unit"));
        let unit = path.display();
        for (section, pairs) in &sections {
            let known_keys: &[&str] = match section.as_str() {
                "Container" => &CONTAINER,
                "Volume" => &["VolumeName"],
                "Unit" | "Service" | "Install" => continue,
                other => panic!("{unit}: [{other}]"),
            };
            for (key, value) in pairs {
                assert!(known_keys.contains(&key.as_str()), "{unit}: {key}");
                let other = value.split(':').next().unwrap_or_default();
                let is_unit = other.ends_with(".volume");
                assert!(!is_unit || names.iter().any(|name| name == other), "{unit}: {other}");
            }
        }
        let Some(container) = sections.get("Container") else { continue };
        let has = |key: &str, value: &str| {
            assert!(container.iter().any(|pair| pair.0 == key && pair.1 == value), "{unit}: {key}");
        };
        has("DropCapability", "all");
        has("NoNewPrivileges", "true");
        has("ReadOnly", "true");
        // The watchdog messages of a container do not reach systemd.
        assert!(!sections["Service"].iter().any(|(key, _)| key == "WatchdogSec"), "{unit}");
    }
    let agent = sections(&read_file("deploy/podman/flotilla-agent.container"));
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
fn podmans_generator_accepts_the_quadlets() {
    let Some(quadlet) = require_program("quadlet") else { return };
    let mut command = Command::new(quadlet);
    command.env("QUADLET_UNIT_DIRS", root().join("deploy/podman"));
    let output = run_command(command.arg("-dryrun"));
    let text = output_text(&output);
    assert!(output.status.success(), "{text}");
    for path in quadlets() {
        let (name, kind) = (file_name(&path), path.extension().expect("a kind").to_string_lossy());
        let stem = name.trim_end_matches(&format!(".{kind}"));
        let service = if kind == "container" { stem.into() } else { format!("{stem}-{kind}") };
        assert!(text.contains(&format!("---{service}.service---")), "{service}: {text}");
    }
    for wrong in ["unsupported", "converting", "error"] {
        assert!(!text.to_lowercase().contains(wrong), "{text}");
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
fn the_compose_file_is_complete_and_only_accepts_members() {
    let compose: Compose = serde_saphyr::from_str(&read_file("deploy/compose.yaml")).expect("YAML");
    let sources = flag_sources();
    for (name, service) in &compose.services {
        for volume in &service.volumes {
            let source = volume.split(':').next().expect("a volume has a source");
            let exists = match source.strip_prefix("./") {
                Some(path) => root().join("deploy").join(path).exists(),
                None => compose.volumes.contains_key(source),
            };
            assert!(exists, "{name}: no {source}");
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
    // Not `--open`, because the ports are reachable from the whole network.
    assert_eq!(compose.services["fleet"].command, ["up"]);
    assert_eq!(compose.services["fleet"].ports, ["4222:4222", "7070:7070"]);
    assert_eq!(compose.services["agent"].command, ["join"]);
    assert_eq!(compose.services["agent"].network_mode.as_deref(), Some("host"));
    assert!(compose.services["agent"].ports.is_empty());
    // Equal to TimeoutStopSec= of the unit.
    assert_eq!(compose.services["agent"].stop_grace_period.as_deref(), Some("90s"));
    let Some(docker_compose) = require_program("docker-compose") else { return };
    let mut command = Command::new(docker_compose);
    let output = run_command(
        command.arg("-f").arg(root().join("deploy/compose.yaml")).args(["config", "-q"]),
    );
    assert!(output.status.success(), "{}", output_text(&output));
}

/// An image that is removed when it is dropped.
struct Image {
    docker: PathBuf,
    tag: String,
}

impl Image {
    fn build(docker: &Path, binary: &Path) -> Self {
        let context = tempfile::tempdir().expect("a directory");
        fs::copy(binary, context.path().join("flotilla")).expect("a binary");
        fs::write(context.path().join("notices"), "notices").expect("a file");
        let tag = format!("flotilla-test-{}", std::process::id());
        let mut command = Command::new(docker);
        command.args([
            "build",
            "--target",
            "agent",
            "--build-arg",
            "BINARY=flotilla",
            "--build-arg",
            "NOTICES=notices",
            "--build-arg",
            "BASE=scratch",
            "-t",
            &tag,
            "-f",
        ]);
        let output =
            run_command(command.arg(root().join("deploy/Containerfile")).arg(context.path()));
        assert!(output.status.success(), "{}", output_text(&output));
        Self { docker: docker.to_owned(), tag }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = Command::new(&self.docker).args(["rmi", "-f", &self.tag]).output();
    }
}

#[test]
fn the_containerfile_builds_and_the_program_runs_in_it() {
    let Some(docker) = require_container_engine(&["docker", "podman"]) else { return };
    let Some(binary) = find_built_program() else {
        skip_test("flotilla", "run cargo build -p flotilla");
        return;
    };
    let image = Image::build(&docker, &binary);
    let mut command = Command::new(&docker);
    command.args(["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]);
    // The program needs the libraries of this machine, which stand for those of the base image.
    for library in ["/lib", "/lib64", "/usr/lib"].iter().filter(|path| Path::new(path).exists()) {
        let real = fs::canonicalize(library).expect("a directory");
        command.args(["-v", &format!("{}:{library}:ro", real.display())]);
    }
    let output = run_command(command.args([&image.tag, "--version"]));
    assert!(output_text(&output).starts_with("flotilla "), "{}", output_text(&output));
}

/// Returns the stages of the Containerfile: the image that each begins with, and its text.
fn stages() -> Vec<(String, String)> {
    let text = read_file("deploy/Containerfile");
    let stages = text.split("\nFROM ").skip(1);
    let stages = stages.map(|stage| stage.split_once(" AS ").expect("each stage has a name"));
    stages.map(|(image, text)| (image.to_owned(), text.to_owned())).collect()
}

#[test]
fn every_image_has_the_certificates_of_public_authorities() {
    let stages = stages();
    assert_eq!(stages.len(), 4);
    for (image, text) in &stages {
        let inherits = match image.as_str() {
            "${BASE}" => read_file("deploy/Containerfile").contains("BASE=gcr.io/distroless/cc-"),
            "agent" => true,
            _ => false,
        };
        assert!(inherits || text.contains(" ca-certificates "), "{image}: {text}");
    }
}

/// Writes programs that print their names and arguments instead of changing this machine.
fn write_fakes(directory: &Path, names: &[&str]) {
    for name in names {
        let fake = directory.join(name);
        fs::write(&fake, format!("#!/bin/sh\necho {name} \"$@\"\n")).expect("a program");
        fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).expect("its mode");
    }
}

#[test]
fn the_image_for_an_amd_gpu_installs_what_the_profile_of_the_gpu_names() {
    let stages = stages();
    let (_, stage) = stages.iter().find(|(_, text)| text.starts_with("rocm\n")).expect("rocm");
    let (_, script) = stage.split_once("\nRUN ").expect("a script");
    let (script, _) = script.split_once("\nCOPY ").expect("its end");
    // Nothing else is on the path, because the script removes files.
    let programs = tempfile::tempdir().expect("a directory");
    write_fakes(programs.path(), &["apt-get", "pipx", "rm"]);
    for name in ["sed", "tr"] {
        let program = find_program(name).unwrap_or_else(|| panic!("no {name}"));
        symlink(program, programs.path().join(name)).expect("a link");
    }
    for gpu in ["gfx1151", "gfx1201", "gfx906"] {
        assert!(read_file("deploy/build-release.sh").contains(gpu), "no image for {gpu}");
        let path = root().join("agents/hardware/profiles").join(format!("{gpu}.yaml"));
        let profile = fs::read_to_string(&path).expect("a profile");
        let profile: Value = serde_saphyr::from_str(&profile).expect("YAML");
        let text = |key: &str| profile.pointer(key).and_then(Value::as_str).expect("a text");
        let packages = profile["stack"]["packages"].as_array().expect("packages").iter();
        let packages: Vec<&str> = packages.map(|it| it.as_str().expect("a text")).collect();
        let script = script.replace("/tmp/profile.yaml", &path.display().to_string());
        let mut shell = Command::new("/bin/sh");
        shell.env_clear().env("PATH", programs.path()).args(["-euc", &script]);
        let output = run_command(&mut shell);
        let printed = output_text(&output);
        assert!(output.status.success(), "{printed}");
        let create = format!("pipx run uv venv --python {} /opt/torch\n", text("/stack/python"));
        let install = format!(
            "pipx run uv pip install --python /opt/torch/bin/python --index {} torch=={} {}\n",
            text("/python/index"),
            text("/stack/torch"),
            packages.join(" ")
        );
        assert!(printed.contains(&(create + &install)), "{printed}");
    }
}
