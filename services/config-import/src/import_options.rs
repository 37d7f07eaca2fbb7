//! The choices of a user about an import.

use crate::{program::SourceProgram, task::TrainingTask};

/// The choices of a user about an import.
pub struct ImportOptions<'a> {
    /// Name of the run.
    pub name: &'a str,
    /// Default: the program whose keys the configuration has.
    pub program: Option<SourceProgram>,
    /// Default: the task that the keys ask for.
    pub task: Option<TrainingTask>,
    /// File of examples or prompts, in place of those in the configuration.
    pub data: Option<&'a str>,
    /// Name of a built-in verifier, or the YAML of one.
    pub verifier: Option<&'a str>,
    /// Returns the text of a file that the configuration refers to, if it can be read.
    pub read_file: &'a dyn Fn(&str) -> Option<String>,
}
