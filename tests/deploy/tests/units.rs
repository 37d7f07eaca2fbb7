//! The systemd units, checked by systemd.

use std::{fs, path::Path, process::Command};

use deploy::{file_name, flag_sources, list_files, output_text, read_file, root, run_command};
use requirements::require_program;

const UNITS: &str = "deploy/systemd";
const DROP_INS: &str = "deploy/systemd/flotilla-agent.service.d";

/// The maximum exposure levels of the units as they are installed, from `systemd-analyze security`
/// of systemd 252: 0 (safe) to 10 (unsafe). docs/DEPLOY.md contains the same numbers.
const EXPOSURE: [(&str, &[&str], f64); 7] = [
    ("flotilla-agent.service", &[], 2.2),
    ("flotilla-agent.service", &["verifier.conf"], 3.6),
    ("flotilla-agent.service", &["verifier.conf", "gpu-faults.conf"], 3.8),
    ("flotilla-up.service", &[], 1.3),
    ("flotilla-coordinator.service", &[], 1.2),
    ("nats-server.service", &[], 1.3),
    ("garage.service", &[], 1.3),
];

/// Writes a unit with its drop-ins, and with programs that exist on this machine.
fn write_unit(unit: &str, drop_ins: &[&str], directory: &Path) -> std::path::PathBuf {
    let mut text = read_file(format!("{UNITS}/{unit}"));
    for program in ["/usr/bin/flotilla", "/usr/bin/garage", "/usr/sbin/nats-server"] {
        text = text.replace(&format!("ExecStart={program} "), "ExecStart=/bin/true ");
    }
    let install = text.find("[Install]").expect("a unit is installed");
    let more: String = drop_ins
        .iter()
        .map(|one| read_file(format!("{DROP_INS}/{one}")))
        .collect::<Vec<_>>()
        .join("\n");
    text.insert_str(install, &more);
    let path = directory.join(unit);
    fs::write(&path, text).expect("a file");
    path
}

#[test]
fn systemd_finds_nothing_wrong_with_any_unit() {
    let Some(analyze) = require_program("systemd-analyze") else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let newer_than_252 = |line: &&str| !line.contains("DelegateSubgroup");
    for unit in list_files(UNITS, ".service").iter().map(|path| file_name(path)) {
        let verifier: &[&str] = if unit == "flotilla-agent.service" {
            &["verifier.conf", "gpu-faults.conf"]
        } else {
            &[]
        };
        for drop_ins in [&[][..], verifier] {
            let path = write_unit(&unit, drop_ins, directory.path());
            let scope = if unit.contains(".user.") { "--user" } else { "--system" };
            let mut command = Command::new(&analyze);
            // The user manager needs a directory for its own files.
            command.env("XDG_RUNTIME_DIR", directory.path());
            let output = run_command(command.args(["verify", scope, "--man=no"]).arg(&path));
            let found = output_text(&output);
            let found: Vec<&str> = found.lines().filter(newer_than_252).collect();
            assert!(found.is_empty() && output.status.success(), "{unit} {drop_ins:?}: {found:?}");
        }
    }
}

#[test]
fn no_unit_exposes_more_than_is_documented() {
    let Some(analyze) = require_program("systemd-analyze") else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let documented = read_file("docs/DEPLOY.md");
    for (unit, drop_ins, most) in EXPOSURE {
        let path = write_unit(unit, drop_ins, directory.path());
        let mut command = Command::new(&analyze);
        let output =
            run_command(command.args(["security", "--offline=true", "--no-pager"]).arg(&path));
        let text = output_text(&output);
        let level = text.lines().find_map(|line| line.split_once("Overall exposure level for "));
        let level = level.and_then(|(_, rest)| rest.split_once(": ")).map(|(_, rest)| rest);
        let level = level.and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
        let level = level.unwrap_or_else(|| panic!("{unit}: {text}"));
        println!("{unit} {drop_ins:?}: {level}");
        assert!(
            level <= most + VERSION_TOLERANCE,
            "{unit} with {drop_ins:?} exposes {level}, more than {most}"
        );
        assert!(documented.contains(&format!("{most:.1}")), "{unit}: DEPLOY.md states no {most}");
    }
}

/// The tolerance for other versions of systemd.
const VERSION_TOLERANCE: f64 = 0.3;

/// Returns the values of a key in a unit.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let start = format!("{key}=");
    text.lines().filter_map(|line| line.strip_prefix(start.as_str())).collect()
}

#[test]
fn our_services_shut_down_cleanly_and_have_watchdogs() {
    for path in list_files(UNITS, ".service") {
        let text = fs::read_to_string(&path).expect("a unit");
        if !text.contains("flotilla agent") && !text.contains("/usr/bin/flotilla") {
            continue;
        }
        let one = |key: &str| values(&text, key).last().copied().unwrap_or_default().to_owned();
        assert_eq!(one("Type"), "notify", "{}", path.display());
        // The default of systemd would end all children at once.
        assert_eq!(one("KillMode"), "mixed", "{}", path.display());
        // Drained agents exit with 0 and stay stopped. Usage errors are not retried.
        assert_eq!(one("Restart"), "on-failure", "{}", path.display());
        assert_eq!(one("RestartPreventExitStatus"), "2", "{}", path.display());
        let seconds = |key: &str| one(key).parse::<u64>().expect("seconds");
        assert!(seconds("WatchdogSec") >= 3 * 10, "a late word ends nothing");
        // The default of --stop-grace plus the time of the shutdown itself.
        let least = if text.contains("flotilla coordinator") { 10 } else { 30 + 10 };
        assert!(seconds("TimeoutStopSec") >= least, "{}", path.display());
    }
}

#[test]
fn settings_name_only_variables_that_the_program_reads() {
    let sources = flag_sources();
    let is_read = |name: &str| sources.contains(&format!("\"{name}\""));
    for path in list_files("deploy/env", ".env").into_iter().chain(list_files(UNITS, ".service")) {
        let text = fs::read_to_string(&path).expect("a file");
        let names = text.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let names = names.filter(|name| name.starts_with("FLOTILLA_"));
        for name in names {
            assert!(is_read(name), "{}: no command reads {name}", path.display());
        }
    }
}

#[test]
fn secrets_are_in_no_unit_and_no_example() {
    let all = [("deploy/env", ".env"), (UNITS, ".service"), (DROP_INS, ".conf")];
    for path in all.iter().flat_map(|(directory, ending)| list_files(directory, ending)) {
        let text = fs::read_to_string(&path).expect("a file");
        for line in text.lines().filter(|line| !line.trim_start().starts_with("# ")) {
            let Some((name, value)) = line.split_once('=') else { continue };
            let secret = ["SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY"];
            let secret = secret.iter().any(|word| name.contains(word));
            assert!(!secret || value.is_empty(), "{}: {line}", path.display());
        }
    }
    let started = list_files(UNITS, ".service");
    let started = started.iter().map(|path| fs::read_to_string(path).expect("a unit"));
    for line in started.flat_map(|text| {
        values(&text, "ExecStart").into_iter().map(str::to_owned).collect::<Vec<_>>()
    }) {
        assert!(!line.contains('$'), "arguments are everybody's to read: {line}");
    }
}

#[test]
fn the_s3_servers_configuration_is_complete_and_durable() {
    let text = read_file("deploy/garage/garage.toml");
    let config: toml::Table = text.parse().expect("TOML");
    assert_eq!(config["replication_factor"].as_integer(), Some(1));
    for key in ["metadata_fsync", "data_fsync"] {
        assert_eq!(config[key].as_bool(), Some(true), "{key}");
    }
    let unit = read_file("deploy/systemd/garage.service");
    let state = values(&unit, "StateDirectory");
    for key in ["metadata_dir", "data_dir"] {
        let path = config[key].as_str().expect("a path");
        assert!(path.starts_with(&format!("/var/lib/{}/", state[0])), "{path} cannot be written");
    }
    // The other ports only listen on loopback, or not at all.
    assert!(config["rpc_bind_addr"].as_str().expect("an address").starts_with("127."));
    assert!(!config.contains_key("rpc_secret"), "secrets are in the environment");
    if let Some(garage) = require_program("garage") {
        let path = root().join("deploy/garage/garage.toml");
        let mut command = Command::new(garage);
        command.env("GARAGE_RPC_SECRET", "ab".repeat(32));
        let output = run_command(command.arg("-c").arg(path).args(["node", "id", "-q"]));
        // It may not write to /var/lib here, but it has parsed the configuration.
        assert!(!output_text(&output).contains("TOML"), "{}", output_text(&output));
    }
}
