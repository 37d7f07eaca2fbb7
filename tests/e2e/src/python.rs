//! A Python with what `python/requirements.txt` names, made once in `.tools/python`.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// What only the tests need, beside the client's own requirements.
const FOR_TESTS: [&str; 2] = ["numpy==2.4.6", "safetensors==0.8.0"];

pub struct Python {
    program: PathBuf,
}

impl Python {
    /// `None`, with a word on stdout, where Python or its packages cannot be had.
    ///
    /// # Panics
    /// When the repository cannot be written.
    pub fn find() -> Option<Self> {
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools");
        std::fs::create_dir_all(&tools).expect("a directory");
        // One makes it, the others wait.
        let lock = File::create(tools.join("python.lock")).expect("a lock");
        lock.lock().expect("a lock can be waited for");
        let directory = tools.join("python");
        match install(&directory) {
            Ok(()) => Some(Self { program: directory.join("bin/python") }),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    /// A script of `tests/e2e/python`.
    pub fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(scripts().join(name)).stdin(Stdio::null());
        command
    }

    /// Runs a script and returns what it printed.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.script(name).args(arguments).output().expect("Python starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name} {arguments:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

fn install(directory: &Path) -> Result<(), String> {
    let requirements = scripts().join("requirements.txt");
    let text = std::fs::read_to_string(&requirements).map_err(|error| error.to_string())?;
    let wanted = format!("{text}{}\n", FOR_TESTS.join("\n"));
    let stamp = directory.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    said(Command::new("python3").args(["-m", "venv", "--clear"]).arg(directory))?;
    let mut pip = Command::new(directory.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]);
    said(pip.arg(requirements).args(FOR_TESTS))?;
    std::fs::write(&stamp, wanted).map_err(|error| error.to_string())
}

fn said(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)))
}
