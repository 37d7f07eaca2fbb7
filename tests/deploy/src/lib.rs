//! The files in `deploy/`, for tests. Helpers panic on errors.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the program of this build, if it was built.
pub fn find_built_program() -> Option<PathBuf> {
    let test = std::env::current_exe().expect("a path");
    let program = test.ancestors().nth(2).expect("target/PROFILE").join("flotilla");
    program.exists().then_some(program)
}

/// Reads a file of the repository.
pub fn read_file(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the sources of the flags, and their variables, of the commands that run as services.
pub fn flag_sources() -> String {
    let arguments = ["access", "agent", "converters", "fleet", "members", "stack", "verify"];
    let arguments = arguments.map(|name| read_file(format!("services/cli/src/args/{name}.rs")));
    arguments.concat() + &read_file("services/cli/src/fleet.rs")
}

/// Returns the files of a directory with this ending, sorted. Panics if there are none.
pub fn list_files(directory: &str, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).expect("a directory");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(ending));
    files.sort();
    assert!(!files.is_empty(), "no {ending} in {directory}");
    files
}

/// Returns the name of a file.
pub fn file_name(path: &Path) -> String {
    path.file_name().expect("a file has a name").to_string_lossy().into_owned()
}

/// Runs a program to its end.
pub fn run_command(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().expect("a program starts")
}

/// Returns stdout and stderr together.
pub fn output_text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}
