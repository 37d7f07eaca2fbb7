//! Where the files in `deploy/` are, and the programs that judge them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// # Panics
/// When there is no such file.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The sources of the flags of commands that run as services, with their variables.
///
/// # Panics
/// When one is not there.
pub fn flag_sources() -> String {
    ["args/access", "args/agent", "args/fleet", "args/members", "args/verify", "fleet"]
        .map(|name| read(format!("services/cli/src/{name}.rs")))
        .concat()
}

/// The files of a directory with this ending, sorted.
///
/// # Panics
/// When there are none: then nothing would be tested.
pub fn files(directory: &str, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).expect("a directory");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(ending));
    files.sort();
    assert!(!files.is_empty(), "no {ending} in {directory}");
    files
}

/// A file's name.
///
/// # Panics
/// When the path has none.
pub fn name(path: &Path) -> String {
    path.file_name().expect("a file has a name").to_string_lossy().into_owned()
}

/// A program, if this machine has it: where the environment says, one of these places, or on PATH.
pub fn program(variable: &str, names: &[&str]) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    places.push(root().join(".tools"));
    let found = names.iter().find_map(|name| {
        places.iter().map(|place| place.join(name)).find(|candidate| candidate.is_file())
    });
    if found.is_none() {
        eprintln!("skipped: no {} on this machine ({variable} names one)", names[0]);
    }
    found
}

/// Runs a program to its end.
///
/// # Panics
/// When it cannot be started.
pub fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().expect("a program starts")
}

/// Both outputs together.
pub fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}
