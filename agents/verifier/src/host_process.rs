//! A program that runs on this host with bounds on its time and its output. It runs in its own
//! process group, which is killed with it. Not for programs that models wrote or that a spec names;
//! those are contained, or masked (`grants`).

use std::{ffi::OsString, process::Command, time::Duration};

use process::RunLimits;

/// The limit of a program's stdout.
pub(crate) const OUTPUT_BYTES_MAX: usize = 64 * 1024;

/// The number of stderr bytes that an error message quotes.
pub(crate) const STDERR_BYTES_MAX: usize = 300;

/// The prefix of the worker's own variables, such as keys of judge models. Programs do not receive
/// them.
const OWN_VARIABLE_PREFIX: &str = "FLOTILLA_";

/// Removes the worker's own variables from the environment of a program.
pub(crate) fn remove_own_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(OWN_VARIABLE_PREFIX.as_bytes()) {
            command.env_remove(name);
        }
    }
}

/// Runs a program to its end and returns its stdout.
///
/// # Errors
/// Returns a description if the program fails, exceeds `limit`, or prints more than
/// `OUTPUT_BYTES_MAX`.
pub(crate) fn run_program(
    argv: &[OsString],
    input: Vec<u8>,
    limit: Duration,
) -> Result<Vec<u8>, String> {
    let (program, arguments) = argv.split_first().ok_or("argv is empty")?;
    let mut command = Command::new(program);
    command.args(arguments);
    remove_own_variables(&mut command);
    let limits = RunLimits {
        time: limit,
        poll: Duration::from_millis(5),
        stdout_bytes: OUTPUT_BYTES_MAX,
        stderr_bytes: STDERR_BYTES_MAX,
        stderr_of_success: false,
    };
    match process::run_program(&mut command, input, limits, |_| ()) {
        Ok(output) => Ok(output.stdout),
        Err(error) => Err(match error.stderr.trim() {
            "" => error.problem,
            stderr => format!("{}: {stderr}", error.problem),
        }),
    }
}
