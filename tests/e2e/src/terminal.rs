//! A command of the program at a terminal, for what only people see.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    time::Duration,
};

use requirements::require_program;

use crate::{program_path, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

/// A command in a pseudo-terminal of `script` (util-linux). It is killed when it is dropped.
pub struct Terminal {
    script: Child,
    keys: ChildStdin,
    transcript: PathBuf,
}

impl Terminal {
    /// Starts a command in a working directory, without a fleet in its environment. Records this
    /// test as skipped and returns `None` without `script`.
    pub fn start(arguments: &[&str], directory: &Path) -> Option<Self> {
        let transcript = directory.join("transcript");
        let command = format!("exec {} {}", program_path().display(), arguments.join(" "));
        let mut script = Command::new(require_program("script")?)
            .args(["--quiet", "--flush", "--return", "--command", &command])
            .arg(&transcript)
            .current_dir(directory)
            .env_remove("FLOTILLA_DIR")
            .env_remove("FLOTILLA_NATS")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("script starts");
        let keys = script.stdin.take().expect("a pipe");
        Some(Self { script, keys, transcript })
    }

    /// Returns everything that was printed so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.transcript).unwrap_or_default()).into_owned()
    }

    /// Waits until a text was printed.
    pub fn wait_for(&self, text: &str) {
        self.wait_for_word(text);
    }

    /// Waits for a word that contains a text, and returns it.
    pub fn wait_for_word(&self, part: &str) -> String {
        let began = std::time::Instant::now();
        loop {
            let text = self.text();
            if let Some(at) = text.find(part) {
                let start = text[..at].rfind(char::is_whitespace).map_or(0, |space| space + 1);
                let word = text[start..].split_whitespace().next();
                return word.unwrap_or_default().to_owned();
            }
            assert!(began.elapsed() < LIMIT, "no {part:?} in:\n{text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Types text, which may contain line breaks and control characters.
    pub fn enter(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("it reads");
    }

    /// Answers a question.
    pub fn answer(&mut self, question: &str, answer: &str) {
        self.wait_for(question);
        self.enter(&format!("{answer}\n"));
    }

    /// Waits for the end of the command.
    pub fn wait_end(&mut self) -> ExitStatus {
        wait_until("the command ends", LIMIT, || self.script.try_wait().expect("our own process"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}
