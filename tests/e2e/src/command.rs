//! The program under test, as a user calls it.

use std::{
    io::Read,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use crate::until;

/// No command of a test takes longer; one that hangs is killed with the test.
const LIMIT: Duration = Duration::from_secs(60);

/// What a command said.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Checks that it was done.
    ///
    /// # Panics
    /// When it was not.
    #[track_caller]
    pub fn succeeds(&self) {
        assert_eq!(self.code, 0, "{self:?}");
    }

    /// Checks that this is one error that names all of these, and not a panic.
    ///
    /// # Panics
    /// When it is not.
    #[track_caller]
    pub fn refuses(&self, names: &[&str]) {
        assert_eq!(self.code, 1, "{self:?}");
        assert_eq!(self.stderr.matches("error: ").count(), 1, "{}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for name in names {
            assert!(self.stderr.contains(name), "no {name} in: {}", self.stderr);
        }
    }
}

/// The program under test: beside the test's own, or where `FLOTILLA_BIN` says.
///
/// # Panics
/// When it was not built.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("FLOTILLA_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a running program has a path");
    let path = test.ancestors().nth(2).expect("tests lie in target/PROFILE/deps").join("flotilla");
    assert!(path.exists(), "{} is not there: run `cargo build -p flotilla`", path.display());
    path
}

/// Runs a command of the program, on no fleet unless the environment names one.
///
/// # Panics
/// When it cannot be started, or does not end.
pub fn flotilla(
    arguments: &[&str],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Output {
    run_on(&[], arguments, environment)
}

/// The program, behind what goes before it.
pub(crate) fn program_on(on: &[String]) -> Command {
    let Some((first, rest)) = on.split_first() else { return Command::new(binary()) };
    let mut command = Command::new(first);
    command.args(rest).arg(binary());
    command
}

pub(crate) fn run_on(
    on: &[String],
    arguments: &[&str],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Output {
    let mut child = program_on(on)
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
    let status = until(&format!("{arguments:?} ends"), LIMIT * 2, || {
        if began.elapsed() > LIMIT {
            // What it said is worth more than a bare timeout.
            let _ = child.kill();
        }
        child.try_wait().expect("the process can be asked")
    });
    let text = |reader: std::thread::JoinHandle<String>| reader.join().expect("reading a pipe");
    Output { code: status.code().unwrap_or(-1), stdout: text(stdout), stderr: text(stderr) }
}

/// Runs another program to its end; what it said when it failed.
pub(crate) fn done(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
