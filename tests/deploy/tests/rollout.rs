//! The rollout script against boxes that are directories: `ssh HOST COMMAND` runs the command with
//! the host's directory in place of the places it writes to.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use deploy::{files, program, root, run, said};
use tempfile::TempDir;

/// Takes what ssh takes, and runs it here; a host called `dead` does not answer.
const SSH: &str = r#"#!/bin/bash
while [ "$1" != -- ]; do shift; done; shift
host=$1; shift
echo "$host: $*" >> "$RACK/ssh.log"
[ "$host" != dead ] || { echo "ssh: no route to host" >&2; exit 255; }
home=$RACK/$host
mkdir -p "$home/tmp" "$home/bin"
command="$*"
command=${command//"mktemp -d /tmp"/mktemp -d $home/tmp}
for place in /usr/local /var/lib; do
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

/// What it is told, and what it reads, goes into a file beside it.
const PROGRAM: &str = r#"#!/bin/bash
[ "$1" != --version ] || { echo "flotilla 0.2.0+gtest"; exit; }
{ echo "told: $*"; cat; } >> "$0.log"
case $PWD in */stubborn) exit 1;; esac
"#;

struct Rack {
    directory: TempDir,
}

impl Rack {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let this = Self { directory };
        fs::create_dir(this.path().join("bin")).expect("a directory");
        let systemctl = "#!/bin/sh\nprintf 'active\\n2 jobs, 412 tokens/s\\n'\n";
        let id = "#!/bin/sh\necho 0\n";
        for (name, text) in [("ssh", SSH), ("scp", SCP), ("id", id), ("systemctl", systemctl)] {
            this.executable(&format!("bin/{name}"), text);
        }
        this.executable("program", PROGRAM);
        this
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn executable(&self, name: &str, text: &str) -> PathBuf {
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
        for name in ["FLOTILLA_NATS", "ROLES", "TOKEN_FILE"] {
            command.env_remove(name);
        }
        run(command.args(arguments).envs(environment.iter().copied()))
    }

    fn told(&self, host: &str) -> String {
        let log = self.path().join(host).join("usr/local/bin/flotilla.log");
        fs::read_to_string(log).unwrap_or_default()
    }
}

#[test]
fn boxes_get_the_program_join_and_are_asked_how_they_are() {
    let rack = Rack::new();
    let output = rack.rollout(&["install", "one", "two"], &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(said(&output).matches("flotilla 0.2.0+gtest").count(), 2, "{}", said(&output));
    for host in ["one", "two"] {
        let installed = rack.path().join(host).join("usr/local/bin/flotilla");
        assert_eq!(installed.metadata().expect("a program").permissions().mode() & 0o777, 0o755);
        assert_eq!(
            fs::read_dir(rack.path().join(host).join("tmp")).expect("a directory").count(),
            0
        );
    }
    let token = rack.path().join("token");
    fs::write(&token, "fleet1.secret\n").expect("a file");
    let output = rack.rollout(&["join", "one"], &[("TOKEN_FILE", token.to_str().expect("a path"))]);
    assert!(output.status.success(), "{}", said(&output));
    let told = rack.told("one");
    assert!(told.contains("told: join - --dir") && told.contains("--service"), "{told}");
    assert!(told.ends_with("fleet1.secret\n"), "the token is read: {told}");
    let commands = fs::read_to_string(rack.path().join("ssh.log")).expect("a log");
    assert!(!commands.contains("secret"), "arguments are everybody's to read: {commands}");
    let open = [("FLOTILLA_NATS", "nats://hub:4222"), ("ROLES", "generator,evaluator")];
    let output = rack.rollout(&["join", "two"], &open);
    assert!(output.status.success(), "{}", said(&output));
    let wanted = "service install --nats nats://hub:4222 --roles generator,evaluator";
    assert!(rack.told("two").contains(wanted), "{}", rack.told("two"));
    let output = said(&rack.rollout(&["status", "two"], &[]));
    assert!(output.contains("active 2 jobs, 412 tokens/s\nflotilla 0.2.0+gtest"), "{output}");
}

#[test]
fn an_upgrade_goes_no_further_than_the_first_box_it_fails_on() {
    let rack = Rack::new();
    let hosts = ["one", "stubborn", "three"];
    assert!(rack.rollout(&["install", hosts[0], hosts[1], hosts[2]], &[]).status.success());
    let output = rack.rollout(&["upgrade", hosts[0], hosts[1], hosts[2]], &[]);
    assert!(!output.status.success());
    assert!(said(&output).contains("stubborn was not upgraded, and nothing after it"));
    let told = rack.told("one");
    assert!(told.contains("upgrade --binary") && told.contains("--service --dir"), "{told}");
    assert!(rack.told("stubborn").contains("upgrade"));
    assert_eq!(rack.told("three"), "");
    // What was copied is gone, also where it failed.
    for host in ["one", "stubborn"] {
        assert_eq!(
            fs::read_dir(rack.path().join(host).join("tmp")).expect("a directory").count(),
            0
        );
    }
}

#[test]
fn a_box_that_does_not_answer_is_named_and_the_others_get_theirs() {
    let rack = Rack::new();
    let output = rack.rollout(&["install", "dead", "two"], &[]);
    assert!(!output.status.success());
    assert!(said(&output).contains("install failed on dead"), "{}", said(&output));
    assert!(rack.path().join("two/usr/local/bin/flotilla").exists());
}

#[test]
fn what_a_shell_would_read_and_what_is_missing_is_refused_before_any_box_is_asked() {
    let rack = Rack::new();
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
        (vec!["erase", "one"], vec![], "usage"),
    ] {
        let output = rack.rollout(&arguments, &environment);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(said(&output).contains(reason), "{reason}: {}", said(&output));
    }
    assert!(!rack.path().join("ssh.log").exists());
}

#[test]
fn shellcheck_finds_nothing_in_any_script() {
    let Some(shellcheck) = program("SHELLCHECK", &["shellcheck"]) else { return };
    let mut command = Command::new(shellcheck);
    command.args(files("deploy", ".sh")).args(files("tests/e2e/systemd", ".sh"));
    let output = run(&mut command);
    assert!(output.status.success(), "{}", said(&output));
}
