//! A box's program replaced under a working agent, whatever the new one is like.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{Fleet, Output, binary, flotilla, until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A box: an installed program, an agent that runs it, and a stand-in for its service manager,
/// which starts the agent whenever it is told to.
struct Box {
    fleet: Fleet,
    home: PathBuf,
}

impl Box {
    fn with_agent() -> Self {
        let fleet = Fleet::open("evaluator");
        let home = fleet.path().join("box");
        fs::create_dir_all(&home).expect("a file");
        fs::copy(binary(), home.join("flotilla")).expect("a file");
        let start = format!(
            "#!/bin/sh\nkill $(cat {home}/pid 2>/dev/null) 2>/dev/null\n\
             {home}/flotilla agent --nats {nats} --roles generator --name halo \
             --agent-dir {home}/agent >> {home}/agent.log 2>&1 &\necho $! > {home}/pid\n",
            home = home.display(),
            nats = fleet.nats(),
        );
        fs::write(home.join("start"), start).expect("a file");
        let this = Self { fleet, home };
        assert!(
            Command::new("sh")
                .arg(this.home.join("start"))
                .status()
                .expect("a program starts")
                .success()
        );
        until("the agent is ready", LIMIT, || {
            this.agent().filter(|agent| agent["state"] == "READY").map(drop)
        });
        this
    }

    fn agent(&self) -> Option<Value> {
        let listed = self.fleet.json(&["agents", "list"]).ok()?;
        listed.as_array()?.iter().find(|agent| agent["agent"] == "halo").cloned()
    }

    fn pid(&self) -> String {
        fs::read_to_string(self.home.join("pid")).expect("a file").trim().to_owned()
    }

    fn installed(&self) -> Vec<u8> {
        fs::read(self.home.join("flotilla")).expect("a file")
    }

    /// Another build of the same program: bytes after the end of a program are no part of it.
    fn another_build(&self) -> PathBuf {
        let mut bytes = fs::read(binary()).expect("a file");
        bytes.extend(b"another build");
        executable(&self.home.join("download"), &bytes)
    }

    fn upgrade(&self, new: &Path, more: &[&str]) -> Output {
        let at = |name: &str| self.home.join(name).display().to_string();
        let (installed, agent, new) = (at("flotilla"), at("agent"), new.display().to_string());
        let restart = format!("sh {}", at("start"));
        let mut arguments = vec!["upgrade", "--binary", &new, "--installed", &installed];
        arguments.extend(["--agent-dir", &agent, "--restart-command", &restart]);
        arguments.extend(more);
        flotilla(&arguments, [("FLOTILLA_NATS".to_owned(), self.fleet.nats())])
    }
}

impl Drop for Box {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-9", &self.pid()]).stderr(Stdio::null()).status();
    }
}

fn executable(path: &Path, bytes: &[u8]) -> PathBuf {
    fs::write(path, bytes).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a file");
    path.to_owned()
}

#[test]
fn a_working_agent_leaves_and_is_back_with_the_new_program() {
    let this = Box::with_agent();
    let (before, old) = (this.pid(), this.installed());
    let new = this.another_build();
    let output = this.upgrade(&new, &[]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.stderr.contains("upgraded to"), "{output:?}");
    assert_eq!(this.installed(), fs::read(&new).unwrap());
    assert_eq!(fs::read(this.home.join("flotilla.previous")).unwrap(), old);
    assert_ne!(this.pid(), before);
    assert_eq!(this.agent().unwrap()["state"], "READY");
    // It was drained, not ended.
    let log = fs::read_to_string(this.home.join("agent.log")).unwrap();
    assert!(!log.contains("error"), "{log}");
    // The same once more is nothing to do.
    let output = this.upgrade(&new, &[]);
    assert!(output.code == 0 && output.stderr.contains("already"), "{output:?}");
}

#[test]
fn a_program_that_says_a_version_but_does_no_work_is_taken_back() {
    let this = Box::with_agent();
    let old = this.installed();
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && exec echo flotilla 9.9.9\nexit 1\n";
    let new = executable(&this.home.join("broken"), script.as_bytes());
    let output = this.upgrade(&new, &["--ready-limit", "3"]);
    output.refuses(&["9.9.9", "halo", "was put back and works"]);
    assert_eq!(this.installed(), old);
    assert_eq!(this.agent().unwrap()["state"], "READY");
}

#[test]
fn an_agent_that_comes_back_as_another_version_than_it_was_to_be_is_not_taken_for_it() {
    let this = Box::with_agent();
    let old = this.installed();
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo flotilla 9.9.9\nexec {} \"$@\"\n",
        binary().display()
    );
    let new = executable(&this.home.join("liar"), script.as_bytes());
    let output = this.upgrade(&new, &["--ready-limit", "5"]);
    output.refuses(&["halo reports version", "was put back and works"]);
    assert_eq!(this.installed(), old);
}

#[test]
fn what_is_no_flotilla_is_refused_before_any_agent_is_told() {
    let this = Box::with_agent();
    let before = this.agent().unwrap()["startedAt"].clone();
    let output = this.upgrade(Path::new("/bin/true"), &[]);
    output.refuses(&["/bin/true", "is not a flotilla binary"]);
    let output = this.upgrade(&this.home.join("missing"), &[]);
    output.refuses(&["missing", "does not run here"]);
    assert_eq!(this.agent().unwrap()["startedAt"], before);
    assert!(!this.home.join("flotilla.previous").exists());
}
