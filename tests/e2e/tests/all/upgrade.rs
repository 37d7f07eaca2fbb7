//! Upgrades of the program of a running agent, with good and bad new programs.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{Fleet, Output, program_path, run_flotilla, wait_until, write_executable, write_script};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A host: an installed program, an agent that runs it, and a script in place of a service manager,
/// which restarts the agent.
struct UpgradeHost {
    fleet: Fleet,
    home: PathBuf,
}

impl UpgradeHost {
    fn with_agent() -> Self {
        let fleet = Fleet::start_open("evaluator");
        let home = fleet.path().join("box");
        fs::create_dir_all(&home).expect("a file");
        fs::copy(program_path(), home.join("flotilla")).expect("a file");
        let start = format!(
            "#!/bin/sh\nkill $(cat {home}/pid 2>/dev/null) 2>/dev/null\n\
             {home}/flotilla agent --nats {nats} --roles generator --name halo \
             --agent-dir {home}/agent >> {home}/agent.log 2>&1 &\necho $! > {home}/pid\n",
            home = home.display(),
            nats = fleet.nats_url(),
        );
        fs::write(home.join("start"), start).expect("a file");
        let host = Self { fleet, home };
        assert!(
            Command::new("sh")
                .arg(host.home.join("start"))
                .status()
                .expect("a program starts")
                .success()
        );
        wait_until("the agent is ready", LIMIT, || {
            host.agent().filter(|agent| agent["state"] == "READY").map(drop)
        });
        host
    }

    fn agent(&self) -> Option<Value> {
        let listed = self.fleet.run_json(&["agents", "list"]).ok()?;
        listed.as_array()?.iter().find(|agent| agent["agent"] == "halo").cloned()
    }

    fn pid(&self) -> String {
        fs::read_to_string(self.home.join("pid")).expect("a file").trim().to_owned()
    }

    fn installed(&self) -> Vec<u8> {
        fs::read(self.home.join("flotilla")).expect("a file")
    }

    /// Returns another build of the same program. Programs ignore bytes after their end.
    fn another_build(&self) -> String {
        let mut bytes = fs::read(program_path()).expect("a file");
        bytes.extend(b"another build");
        write_executable(&self.home.join("download"), bytes)
    }

    fn upgrade(&self, new: &str, more: &[&str]) -> Output {
        let at = |name: &str| self.home.join(name).display().to_string();
        let (installed, agent) = (at("flotilla"), at("agent"));
        let restart = format!("sh {}", at("start"));
        let mut arguments = vec!["upgrade", "--binary", new, "--installed", &installed];
        arguments.extend(["--agent-dir", &agent, "--restart-command", &restart]);
        arguments.extend(more);
        run_flotilla(&arguments, [("FLOTILLA_NATS".to_owned(), self.fleet.nats_url())])
    }
}

impl Drop for UpgradeHost {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-9", &self.pid()]).stderr(Stdio::null()).status();
    }
}

#[test]
fn a_running_agent_is_restarted_with_the_new_program() {
    let host = UpgradeHost::with_agent();
    let (before, old) = (host.pid(), host.installed());
    let new = host.another_build();
    let output = host.upgrade(&new, &[]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.stderr.contains("upgraded to"), "{output:?}");
    assert_eq!(host.installed(), fs::read(&new).unwrap());
    assert_eq!(fs::read(host.home.join("flotilla.previous")).unwrap(), old);
    assert_ne!(host.pid(), before);
    assert_eq!(host.agent().unwrap()["state"], "READY");
    // It was drained, not killed.
    let log = fs::read_to_string(host.home.join("agent.log")).unwrap();
    assert!(!log.contains("error"), "{log}");
    // The same upgrade again changes nothing.
    let output = host.upgrade(&new, &[]);
    assert!(output.code == 0 && output.stderr.contains("already"), "{output:?}");
}

#[test]
fn a_program_that_does_not_work_is_rolled_back() {
    let host = UpgradeHost::with_agent();
    let old = host.installed();
    let script = "[ \"$1\" = --version ] && exec echo flotilla 9.9.9\nexit 1";
    let new = write_script(&host.home.join("broken"), script);
    let output = host.upgrade(&new, &["--ready-limit", "3"]);
    output.assert_refused(&["9.9.9", "halo", "was put back and works"]);
    assert_eq!(host.installed(), old);
    assert_eq!(host.agent().unwrap()["state"], "READY");
}

#[test]
fn an_agent_that_restarts_with_another_version_is_rolled_back() {
    let host = UpgradeHost::with_agent();
    let old = host.installed();
    let script = format!(
        "[ \"$1\" = --version ] && exec echo flotilla 9.9.9\nexec {} \"$@\"",
        program_path().display()
    );
    let new = write_script(&host.home.join("liar"), &script);
    let output = host.upgrade(&new, &["--ready-limit", "5"]);
    output.assert_refused(&["halo reports version", "was put back and works"]);
    assert_eq!(host.installed(), old);
}

#[test]
fn other_programs_are_refused_before_any_agent_is_drained() {
    let host = UpgradeHost::with_agent();
    let before = host.agent().unwrap()["startedAt"].clone();
    let output = host.upgrade("/bin/true", &[]);
    output.assert_refused(&["/bin/true", "is not a flotilla binary"]);
    let output = host.upgrade("/missing", &[]);
    output.assert_refused(&["missing", "does not run here"]);
    assert_eq!(host.agent().unwrap()["startedAt"], before);
    assert!(!host.home.join("flotilla.previous").exists());
}
