//! A systemd of a test's own: process 1 of namespaces that end with it.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use crate::{Output, binary, nats, until};

const SYSTEMD: &str = "/lib/systemd/systemd";
const READY_LIMIT: Duration = Duration::from_secs(60);

/// Units started by a real service manager.
pub struct Systemd {
    boot: Child,
    /// Process 1, as this machine counts it.
    init: String,
    directory: TempDir,
}

impl Systemd {
    /// Boots with these units and files, each a path below their place and its text, and with the
    /// tests' nats-server as /usr/sbin/nats-server. `None`, with a word, where that is not possible.
    ///
    /// # Panics
    /// When it could and does not.
    pub fn boot(units: &[(&str, String)], files: &[(&str, String)]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new(SYSTEMD).exists() {
            eprintln!("skipped: only root can boot a systemd, where there is one");
            return None;
        }
        let directory = tempfile::tempdir().expect("a temporary directory");
        for (place, texts) in [("units", units), ("files", files)] {
            fs::create_dir(directory.path().join(place)).expect("a directory");
            for (name, text) in texts {
                let path = directory.path().join(place).join(name);
                fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
                fs::write(path, text).expect("a file");
            }
        }
        let sbin = directory.path().join("files/usr/sbin");
        fs::create_dir_all(&sbin).expect("a directory");
        fs::copy(nats::program(), sbin.join("nats-server")).expect("a nats-server");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/boot.sh");
        let log = fs::File::create(directory.path().join("boot.log")).expect("a log");
        let mut boot = Command::new(script)
            .arg(directory.path())
            .arg(binary())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("a script starts");
        let children = format!("/proc/{0}/task/{0}/children", boot.id());
        let init = until("process 1 is there", READY_LIMIT, || {
            let log = || fs::read_to_string(directory.path().join("boot.log")).unwrap_or_default();
            let ended = boot.try_wait().expect("the process can be asked");
            assert!(ended.is_none(), "no systemd: {}", log());
            let child = fs::read_to_string(&children).ok()?.trim().to_owned();
            let name = fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
            (name.trim() == "systemd").then_some(child)
        });
        let this = Self { boot, init, directory };
        until("systemd has started", READY_LIMIT, || {
            let state = this.run(&["systemctl", "is-active", "test.target"]);
            (state.stdout.trim() == "active").then_some(())
        });
        Some(this)
    }

    /// Runs a command beside it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run(&self, command: &[&str]) -> Output {
        let output = Command::new("nsenter")
            .args(["-t", &self.init, "-m", "-p", "-C", "-u", "-i", "--"])
            .args(command)
            .stdin(Stdio::null())
            .output()
            .expect("nsenter starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code().unwrap_or(-1);
        Output { code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// As `run`, of what must succeed.
    ///
    /// # Panics
    /// When it fails.
    pub fn must(&self, command: &[&str]) -> String {
        let output = self.run(command);
        let told = || {
            let journal = self.run(&["journalctl", "--no-pager", "-n", "60"]).stdout;
            let log = fs::read_to_string(self.directory.path().join("boot.log"));
            format!("{journal}\n{}", log.unwrap_or_default())
        };
        assert_eq!(output.code, 0, "{command:?}: {} {}", output.stderr, told());
        output.stdout
    }

    /// What systemd knows of a unit.
    pub fn property(&self, unit: &str, name: &str) -> String {
        let shown = self.run(&["systemctl", "show", "--value", "-p", name, unit]);
        shown.stdout.trim().to_owned()
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Process 1 ends with what started it, and everything with process 1.
        let _ = self.boot.kill();
        let _ = self.boot.wait();
        let name = format!("flotilla-test-{}", self.boot.id());
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            remove_groups(&Path::new(root).join(&name));
        }
    }
}

/// Groups are empty a moment after their processes ended.
fn remove_groups(group: &Path) {
    let Ok(entries) = fs::read_dir(group) else { return };
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        remove_groups(&entry.path());
    }
    for _ in 0..50 {
        if fs::remove_dir(group).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
