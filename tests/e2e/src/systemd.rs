//! A systemd instance for one test, as process 1 of its own namespaces.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use requirements::{require_root, skip_test};
use tempfile::TempDir;

use crate::{Output, nats, program_path, wait_until};

const SYSTEMD: &str = "/lib/systemd/systemd";
const READY_LIMIT: Duration = Duration::from_secs(60);

/// A systemd instance that ends when it is dropped.
pub struct Systemd {
    boot: Child,
    /// Process id of process 1 outside of its namespace.
    init: String,
    directory: TempDir,
}

impl Systemd {
    /// Boots systemd with these units and files (relative path and content), and with the
    /// nats-server of the tests as /usr/sbin/nats-server. Records this test as skipped and returns
    /// `None` without root or systemd.
    pub fn boot(units: &[(&str, String)], files: &[(&str, String)]) -> Option<Self> {
        if !require_root() {
            return None;
        }
        if !Path::new(SYSTEMD).exists() {
            skip_test("systemd", "run deploy/fetch-test-tools.sh systemd");
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
        fs::copy(nats::server_program(), sbin.join("nats-server")).expect("a nats-server");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/boot.sh");
        let log = fs::File::create(directory.path().join("boot.log")).expect("a log");
        let mut boot = Command::new(script)
            .arg(directory.path())
            .arg(program_path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("a script starts");
        let children = format!("/proc/{0}/task/{0}/children", boot.id());
        let init = wait_until("process 1 is there", READY_LIMIT, || {
            let log = || fs::read_to_string(directory.path().join("boot.log")).unwrap_or_default();
            let ended = boot.try_wait().expect("the process can be asked");
            assert!(ended.is_none(), "no systemd: {}", log());
            let child = fs::read_to_string(&children).ok()?.trim().to_owned();
            let name = fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
            (name.trim() == "systemd").then_some(child)
        });
        let systemd = Self { boot, init, directory };
        wait_until("systemd has started", READY_LIMIT, || {
            let state = systemd.run(&["systemctl", "is-active", "test.target"]);
            (state.stdout.trim() == "active").then_some(())
        });
        Some(systemd)
    }

    /// Runs a command inside.
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

    /// Runs a command inside, checks that it succeeds, and returns its output.
    pub fn run_checked(&self, command: &[&str]) -> String {
        let output = self.run(command);
        let diagnostics = || {
            let journal = self.run(&["journalctl", "--no-pager", "-n", "60"]).stdout;
            let log = fs::read_to_string(self.directory.path().join("boot.log"));
            format!("{journal}\n{}", log.unwrap_or_default())
        };
        assert_eq!(output.code, 0, "{command:?}: {} {}", output.stderr, diagnostics());
        output.stdout
    }

    /// Returns a property of a unit.
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
        // Process 1 and all others end with the script.
        let _ = self.boot.kill();
        let _ = self.boot.wait();
        let name = format!("flotilla-test-{}", self.boot.id());
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            remove_groups(&Path::new(root).join(&name));
        }
    }
}

/// Retries, because control groups are busy until their processes are gone.
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
