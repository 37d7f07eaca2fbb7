//! The rollout script, with directories in place of hosts. `ssh HOST COMMAND` runs the command with
//! the system paths replaced by paths in the host's directory.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use deploy::{list_files, output_text, root, run_command};
use requirements::require_program;
use tempfile::TempDir;

/// A fake ssh that runs the command locally. A host called `dead` does not respond.
const SSH: &str = r#"#!/bin/bash
while [ "$1" != -- ]; do shift; done; shift
host=$1; shift
echo "$host: $*" >> "$RACK/ssh.log"
[ "$host" != dead ] || { echo "ssh: no route to host" >&2; exit 255; }
home=$RACK/$host
mkdir -p "$home/tmp" "$home/bin"
command="$*"
command=${command//"mktemp -d /tmp"/mktemp -d $home/tmp}
for place in /usr/local /var/lib /opt; do
    command=${command//$place/$home$place}
done
cd "$home" && PATH="$RACK/bin:$PATH" bash -c "$command"
"#;

const SCP: &str = r#"#!/bin/bash
while [ "$1" != -- ]; do shift; done; shift
host=${2%%:*}
[ "$host" != dead ] || exit 255
cp "$1" "${2#*:}"
"#;

/// A fake program that logs its arguments and its input to a file next to it.
const PROGRAM: &str = r#"#!/bin/bash
[ "$1" != --version ] || { echo "flotilla 0.2.0+gtest"; exit; }
{ echo "told: $*"; cat; } >> "$0.log"
case $PWD in */stubborn) exit 1;; esac
"#;

/// A fake service manager that logs restarts like those of the program. The agent of a host called
/// `unready` starts with its old stack alone.
const SYSTEMCTL: &str = r#"#!/bin/sh
[ "$1" = restart ] || { printf 'active\n2 jobs, 412 tokens/s\n'; exit; }
echo "told: $*" >> usr/local/bin/flotilla.log
case $PWD in */unready) grep -q roll-back usr/local/bin/flotilla.log;; esac
"#;

/// Runs a program as if for another user, and refuses to run one as root.
const SYSTEMD_RUN: &str = r#"#!/bin/bash
case "$*" in *"-p DynamicUser=yes"*) ;; *) exit 1;; esac
while [ "$1" != "${1#-}" ]; do
    case $1 in -p | -E) shift;; esac
    shift
done
exec "$@"
"#;

struct FakeHosts {
    directory: TempDir,
}

impl FakeHosts {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let fakes = Self { directory };
        fs::create_dir(fakes.path().join("bin")).expect("a directory");
        let root = "#!/bin/sh\necho 0\n";
        // On a host called `open`, others can change the stacks.
        let stat = "#!/bin/sh\ncase $PWD in */open) echo 1000;; esac\necho 0\n";
        for (name, text) in [
            ("ssh", SSH),
            ("scp", SCP),
            ("id", root),
            ("stat", stat),
            ("systemctl", SYSTEMCTL),
            ("systemd-run", SYSTEMD_RUN),
        ] {
            fakes.write_executable(&format!("bin/{name}"), text);
        }
        fakes.write_executable("program", PROGRAM);
        fakes
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn write_executable(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a mode");
        path
    }

    fn rollout(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(root().join("deploy/rollout.sh"));
        command.env("PATH", format!("{}:{path}", self.path().join("bin").display()));
        command.env("RACK", self.path()).env("BINARY", self.path().join("program"));
        for name in ["FLOTILLA_NATS", "FLOTILLA_STACKS", "ROLES", "TOKEN_FILE"] {
            command.env_remove(name);
        }
        run_command(command.args(arguments).envs(environment.iter().copied()))
    }

    fn program_log(&self, host: &str) -> String {
        let log = self.path().join(host).join("usr/local/bin/flotilla.log");
        fs::read_to_string(log).unwrap_or_default()
    }
}

#[test]
fn hosts_are_installed_joined_and_queried() {
    let fakes = FakeHosts::new();
    let output = fakes.rollout(&["install", "one", "two"], &[]);
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(
        output_text(&output).matches("flotilla 0.2.0+gtest").count(),
        2,
        "{}",
        output_text(&output)
    );
    for host in ["one", "two"] {
        let installed = fakes.path().join(host).join("usr/local/bin/flotilla");
        assert_eq!(installed.metadata().expect("a program").permissions().mode() & 0o777, 0o755);
        assert_eq!(
            fs::read_dir(fakes.path().join(host).join("tmp")).expect("a directory").count(),
            0
        );
    }
    let token = fakes.path().join("token");
    fs::write(&token, "fleet1.secret\n").expect("a file");
    let output =
        fakes.rollout(&["join", "one"], &[("TOKEN_FILE", token.to_str().expect("a path"))]);
    assert!(output.status.success(), "{}", output_text(&output));
    let log = fakes.program_log("one");
    assert!(log.contains("told: join - --dir") && log.contains("--service"), "{log}");
    assert!(log.ends_with("fleet1.secret\n"), "the token is read: {log}");
    let commands = fs::read_to_string(fakes.path().join("ssh.log")).expect("a log");
    assert!(!commands.contains("secret"), "arguments are everybody's to read: {commands}");
    let open = [("FLOTILLA_NATS", "nats://hub:4222"), ("ROLES", "generator,evaluator")];
    let output = fakes.rollout(&["join", "two"], &open);
    assert!(output.status.success(), "{}", output_text(&output));
    let wanted = "service install --nats nats://hub:4222 --roles generator,evaluator";
    assert!(fakes.program_log("two").contains(wanted), "{}", fakes.program_log("two"));
    let output = output_text(&fakes.rollout(&["status", "two"], &[]));
    assert!(output.contains("active 2 jobs, 412 tokens/s\nflotilla 0.2.0+gtest"), "{output}");
}

#[test]
fn an_upgrade_stops_at_the_first_host_that_fails() {
    let fakes = FakeHosts::new();
    let hosts = ["one", "stubborn", "three"];
    assert!(fakes.rollout(&["install", hosts[0], hosts[1], hosts[2]], &[]).status.success());
    let output = fakes.rollout(&["upgrade", hosts[0], hosts[1], hosts[2]], &[]);
    assert!(!output.status.success());
    assert!(output_text(&output).contains("stubborn was not upgraded, and nothing after it"));
    let log = fakes.program_log("one");
    assert!(log.contains("upgrade --binary") && log.contains("--service --dir"), "{log}");
    assert!(fakes.program_log("stubborn").contains("upgrade"));
    assert_eq!(fakes.program_log("three"), "");
    // The copied files are deleted, also after a failure.
    for host in ["one", "stubborn"] {
        assert_eq!(
            fs::read_dir(fakes.path().join(host).join("tmp")).expect("a directory").count(),
            0
        );
    }
}

/// Returns the commands of a host's program and of its service manager, without paths.
fn read_commands(fakes: &FakeHosts, host: &str) -> Vec<String> {
    let log = fakes.program_log(host);
    let told = log.lines().filter_map(|line| line.strip_prefix("told: "));
    let parts = told.map(|line| line.split(" --stacks").next().unwrap_or(line).to_owned());
    parts.collect()
}

#[test]
fn a_stack_is_tried_host_by_host_and_rolled_back_with_one_command() {
    let fakes = FakeHosts::new();
    let hosts = ["one", "stubborn", "three", "unready", "open"];
    assert!(fakes.rollout(&[&["install"], &hosts[..]].concat(), &[]).status.success());
    let output = fakes.rollout(&["stack", "rocm-7.2", "one", "stubborn", "three"], &[]);
    assert!(!output.status.success());
    let text = output_text(&output);
    assert!(text.contains("stubborn was not switched to rocm-7.2, and nothing after it"), "{text}");
    let (tested, used) = ("stack use rocm-7.2 --only-test", "stack use rocm-7.2 --untested");
    let restarted = "restart flotilla-agent";
    assert_eq!(read_commands(&fakes, "one"), [tested, used, restarted]);
    assert_eq!(read_commands(&fakes, "stubborn"), [tested], "no restart after a failed burn-in");
    let commands = fs::read_to_string(fakes.path().join("ssh.log")).expect("a log");
    let is_tested = |line: &&str| line.contains("--only-test");
    assert!(commands.lines().filter(is_tested).all(|line| line.contains("DynamicUser=yes")));
    assert_eq!(fakes.program_log("three"), "");
    let log = fakes.program_log("one");
    assert!(log.contains("/one/opt/flotilla/stacks"), "the agent's stacks: {log}");
    let output = output_text(&fakes.rollout(&["stack", "rocm-7.2", "open"], &[]));
    assert!(output.contains("not owned by root"), "{output}");
    assert_eq!(fakes.program_log("open"), "");

    let rolled_back = "stack roll-back --from rocm-7.2";
    assert!(!fakes.rollout(&["stack", "rocm-7.2", "unready", "three"], &[]).status.success());
    let switched_back = [tested, used, restarted, rolled_back, restarted];
    assert_eq!(read_commands(&fakes, "unready"), switched_back);
    assert_eq!(fakes.program_log("three"), "");

    let elsewhere = [("FLOTILLA_STACKS", "/srv/stacks")];
    let output = fakes.rollout(&["stack-rollback", "rocm-7.2", "dead", "one", "three"], &elsewhere);
    let text = output_text(&output);
    assert!(text.contains("stack-rollback failed on dead"), "{text}");
    assert_eq!(read_commands(&fakes, "one"), switched_back);
    assert_eq!(read_commands(&fakes, "three"), [rolled_back, restarted]);
    assert!(fakes.program_log("three").contains("--stacks /srv/stacks"));
}

#[test]
fn an_unreachable_host_is_named_and_the_others_are_installed() {
    let fakes = FakeHosts::new();
    let output = fakes.rollout(&["install", "dead", "two"], &[]);
    assert!(!output.status.success());
    assert!(output_text(&output).contains("install failed on dead"), "{}", output_text(&output));
    assert!(fakes.path().join("two/usr/local/bin/flotilla").exists());
}

#[test]
fn shell_metacharacters_and_missing_settings_are_refused_before_any_connection() {
    let fakes = FakeHosts::new();
    for (arguments, environment, reason) in [
        (vec!["join", "one"], vec![], "no fleet given;"),
        (
            vec!["join", "one"],
            vec![("FLOTILLA_NATS", "x;rm -rf /"), ("ROLES", "a")],
            "FLOTILLA_NATS",
        ),
        (vec!["join", "one"], vec![("FLOTILLA_NATS", "x"), ("ROLES", "$(id)")], "ROLES"),
        (vec!["join", "one"], vec![("TOKEN_FILE", "/missing")], "/missing"),
        (vec!["install", "one"], vec![("BINARY", "/missing")], "make static"),
        (vec!["install"], vec![], "which boxes?"),
        (vec!["stack"], vec![], "which stack?"),
        (vec!["stack", "new"], vec![], "which boxes?"),
        (vec!["stack", "new;id", "one"], vec![], "no name of a stack"),
        (vec!["stack-rollback", "--help", "one"], vec![], "no name of a stack"),
        (vec!["stack", "new", "one"], vec![("FLOTILLA_STACKS", "$(id)")], "FLOTILLA_STACKS"),
        (vec!["erase", "one"], vec![], "usage"),
    ] {
        let output = fakes.rollout(&arguments, &environment);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(output_text(&output).contains(reason), "{reason}: {}", output_text(&output));
    }
    assert!(!fakes.path().join("ssh.log").exists());
}

#[test]
fn shellcheck_finds_nothing_in_any_script() {
    let Some(shellcheck) = require_program("shellcheck") else { return };
    let mut command = Command::new(shellcheck);
    command.args(list_files("deploy", ".sh")).args(list_files("tests/e2e/systemd", ".sh"));
    let output = run_command(&mut command);
    assert!(output.status.success(), "{}", output_text(&output));
}
