//! Facts that a user sees in the log while a run is in progress.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use crate::Client;

/// A `flotilla run watch` that collects each line it prints. It is started again while the fleet
/// does not answer.
pub struct FactReader {
    watch: Arc<Mutex<WatchProcess>>,
    lines: JoinHandle<BTreeSet<String>>,
}

#[derive(Default)]
struct WatchProcess {
    child: Option<Child>,
    is_stopped: bool,
}

impl FactReader {
    pub fn start(client: &Client, run: &str) -> Self {
        let mut command = client.command(&["run", "watch", run, "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let watch = Arc::new(Mutex::new(WatchProcess::default()));
        let shared = Arc::clone(&watch);
        let lines = std::thread::spawn(move || {
            let mut lines = BTreeSet::new();
            while collect_lines(&shared, &mut command, &mut lines) {
                std::thread::sleep(Duration::from_millis(300));
            }
            lines
        });
        Self { watch, lines }
    }

    /// Ends the process and returns the lines of all facts that it printed.
    pub fn stop(self) -> BTreeSet<String> {
        {
            let mut watch = self.watch.lock().expect("no panic while it was locked");
            watch.is_stopped = true;
            if let Some(child) = &mut watch.child {
                // It may have ended already.
                let _ = child.kill();
            }
        }
        self.lines.join().expect("no panic")
    }
}

/// Runs the command once. Returns false if the reader was stopped.
fn collect_lines(
    watch: &Mutex<WatchProcess>,
    command: &mut Command,
    lines: &mut BTreeSet<String>,
) -> bool {
    let stdout = {
        let mut watch = watch.lock().expect("no panic while it was locked");
        if watch.is_stopped {
            return false;
        }
        let child = watch.child.insert(command.spawn().expect("flotilla starts"));
        child.stdout.take().expect("a pipe")
    };
    let mut reader = BufReader::new(stdout);
    let mut line = String::new();
    // A killed process may end within a line.
    while reader.read_line(&mut line).is_ok_and(|_| line.ends_with('\n')) {
        lines.insert(line.trim_end().to_owned());
        line.clear();
    }
    let mut watch = watch.lock().expect("no panic while it was locked");
    watch.child.take().expect("it was started").wait().expect("it ends without a reader");
    !watch.is_stopped
}
