//! The program under test, run as a user runs it.

use std::{
    io::Read,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use crate::wait_until;

/// The longest run time of one command. A command that hangs is killed.
const LIMIT: Duration = Duration::from_secs(240);

/// Makes agents record their status each second instead of every ten, because tests wait for it.
pub(crate) const QUICK_RECORDS: (&str, &str) = ("FLOTILLA_STATUS_RECORD_EVERY", "1");

/// The result of a command.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Checks that the command succeeded.
    #[track_caller]
    pub fn assert_success(&self) {
        assert_eq!(self.code, 0, "{self:?}");
    }

    /// Checks that the command failed with one error that contains all of these names, and no
    /// panic.
    #[track_caller]
    pub fn assert_refused(&self, names: &[&str]) {
        assert_eq!(self.code, 1, "{self:?}");
        let text = self.read_error();
        assert_eq!(text.matches("error: ").count(), 1, "{text}");
        assert!(!text.contains("panicked"), "{text}");
        for name in names {
            assert!(text.contains(name), "no {name} in: {text}");
        }
    }

    /// Returns the text of stderr, also of an error that was printed as JSON.
    fn read_error(&self) -> String {
        let last = self.stderr.lines().last().unwrap_or_default();
        match serde_json::from_str::<serde_json::Value>(last) {
            Ok(error) if error["error"].is_string() => {
                let causes = error["causes"].as_array().into_iter().flatten();
                let causes: Vec<&str> = causes.filter_map(|cause| cause.as_str()).collect();
                format!(
                    "error: {}\n{}",
                    error["error"].as_str().unwrap_or_default(),
                    causes.join("\n")
                )
            }
            _ => self.stderr.clone(),
        }
    }
}

/// Returns the path of the program under test: `FLOTILLA_BIN`, or the build next to the test.
pub fn program_path() -> PathBuf {
    if let Some(path) = std::env::var_os("FLOTILLA_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a running program has a path");
    let path = test.ancestors().nth(2).expect("tests lie in target/PROFILE/deps").join("flotilla");
    assert!(path.exists(), "{} is not there: run `cargo build -p flotilla`", path.display());
    path
}

/// Runs a command of the program. It has no fleet unless the environment names one.
pub fn run_flotilla(
    arguments: &[&str],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Output {
    run_prefixed(&[], arguments, environment)
}

pub(crate) fn prefixed_command(prefix: &[String]) -> Command {
    let Some((first, rest)) = prefix.split_first() else { return Command::new(program_path()) };
    let mut command = Command::new(first);
    command.args(rest).arg(program_path());
    command
}

pub(crate) fn run_prefixed(
    prefix: &[String],
    arguments: &[&str],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Output {
    let mut child = prefixed_command(prefix)
        .args(arguments)
        .env_remove("FLOTILLA_DIR")
        .env_remove("FLOTILLA_NATS")
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("flotilla starts");
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = pipe.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let stdout = read(Box::new(child.stdout.take().expect("a pipe")));
    let stderr = read(Box::new(child.stderr.take().expect("a pipe")));
    let began = std::time::Instant::now();
    let status = wait_until(&format!("{arguments:?} ends"), LIMIT * 2, || {
        if began.elapsed() > LIMIT {
            // The output of a killed command says more than a timeout.
            let _ = child.kill();
        }
        child.try_wait().expect("the process can be asked")
    });
    let text = |reader: std::thread::JoinHandle<String>| reader.join().expect("reading a pipe");
    Output { code: status.code().unwrap_or(-1), stdout: text(stdout), stderr: text(stderr) }
}

pub(crate) fn run_checked(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
