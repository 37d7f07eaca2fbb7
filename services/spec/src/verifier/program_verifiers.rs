//! Verifiers that run programs: programs that a model wrote, in a sandbox, and executables that a
//! run's spec names, in a sandbox unless the host's owner allows them to run outside it.

use std::path::{Component, Path};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1::verifier::{Command, Compile, Limits, Match, Output, Pytest, Python, Stdio};

use crate::{
    field_checks::{FieldResult, check_count, check_range, ensure_field},
    yaml::describe_choice,
};

/// The first one is not compiled.
const LANGUAGES: [&str; 5] = ["python", "c", "c++", "rust", "go"];

/// The limits of one execution of a program.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "Limits of a program")]
pub struct ProgramLimitsSpec {
    /// Wall-clock time, in seconds.
    #[schemars(range(min = 0.1, max = 3600.0))]
    pub timeout_s: f64,
    /// Memory of the program and all its children, in MiB.
    #[schemars(range(min = 16, max = 1_048_576))]
    pub memory_mib: u32,
    /// Largest number of processes and threads at the same time.
    #[schemars(range(min = 1, max = 4096))]
    pub processes: u32,
    /// Files in the program's own directory, in MiB.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub disk_mib: u32,
    /// Size of stdout and stderr, in KiB.
    #[schemars(range(min = 1, max = 65_536))]
    pub output_kib: u32,
}

/// A verifier that runs a Python function against the prompt's tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PythonSpec {
    /// The limits of an execution.
    pub limits: ProgramLimitsSpec,
    /// Reward the share of tests that pass.
    pub partial: bool,
    /// Run `challenge_test_list` too.
    pub challenge: bool,
}

/// A verifier that runs the prompt's tests with pytest.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PytestSpec {
    /// The limits of an execution.
    pub limits: ProgramLimitsSpec,
    /// Reward the share of tests that pass.
    pub partial: bool,
    /// Name of the module under which tests import the completion. Does not start with `test_`.
    #[schemars(regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
    pub module: String,
}

/// A verifier that runs a program and compares its output with the prompt's cases.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StdioSpec {
    /// Empty: that of the prompt's field `language`, or of the last code fence that names one.
    #[schemars(extend("enum" = ["", "python", "c", "c++", "rust", "go"]))]
    pub language: String,
    /// The comparison of the output with the expected one.
    pub output: OutputSpec,
    /// The limits of an execution.
    pub limits: ProgramLimitsSpec,
    /// Reward the share of cases that pass.
    pub partial: bool,
    /// Seconds that compiling may take.
    #[schemars(range(min = 0.1, max = 3600.0))]
    pub compile_timeout_s: f64,
}

/// A verifier that compiles a program, and optionally runs it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CompileSpec {
    /// Empty: that of the prompt's field `language`, or of a code fence.
    #[schemars(extend("enum" = ["", "c", "c++", "rust", "go"]))]
    pub language: String,
    /// A program must run to pass when the prompt has no cases.
    pub run: bool,
    /// The comparison of the output with the expected one.
    pub output: OutputSpec,
    /// The limits of an execution.
    pub limits: ProgramLimitsSpec,
    /// Seconds that compiling may take.
    #[schemars(range(min = 0.1, max = 3600.0))]
    pub compile_timeout_s: f64,
}

/// The comparison of a program's output with the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "Comparison of outputs")]
pub struct OutputSpec {
    /// The kind of comparison.
    #[serde(rename = "match")]
    pub matching: OutputMatchSpec,
    /// Absolute or relative tolerance of `numbers`.
    #[schemars(range(min = 0.0))]
    pub tolerance: f64,
}

/// The kinds of comparison of outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutputMatchSpec {
    /// Equal bytes.
    Exact,
    /// Equal lines, ignoring white space at their ends and at the end of the text.
    Lines,
    /// Equal words.
    Words,
    /// Equal words, and numbers within the tolerance.
    Numbers,
}

/// A verifier that is an executable on the verifier's host. It runs in a sandbox unless the host's
/// owner allows it to run outside.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    /// The executable and its arguments.
    #[schemars(length(min = 1))]
    pub argv: Vec<String>,
    /// Wall-clock time, in seconds.
    #[schemars(range(min = 0.01, max = 3600.0))]
    #[serde(default = "ten_seconds")]
    pub timeout_s: f64,
    /// Absolute paths that the executable reads besides the system directories and its own
    /// directory. The host's owner must grant them.
    #[schemars(length(max = 32), inner(regex(pattern = "^/")))]
    #[serde(default)]
    pub paths: Vec<String>,
    /// Keep the executable running: it reads requests and writes verdicts as lines of JSON, and
    /// repeats the `id` of each request in its verdict.
    #[serde(default)]
    pub serve: bool,
    /// With `serve`: most processes on a host. 0: one for each completion that the host judges at
    /// once.
    #[schemars(range(min = 0, max = 1024))]
    #[serde(default)]
    pub processes: u32,
    /// With `serve`: most requests that a process has at the same time. It may answer them in any
    /// order.
    #[schemars(range(min = 1, max = 256))]
    #[serde(default = "one_request")]
    pub concurrent: u32,
    /// With `serve`: seconds that the first verdict of a process may take in addition to
    /// `timeout_s`, for imports and models.
    #[schemars(range(min = 0.0, max = 600.0))]
    #[serde(default = "start_seconds")]
    pub start_timeout_s: f64,
}

fn one_request() -> u32 {
    1
}

fn start_seconds() -> f64 {
    60.0
}

const PATHS_MAX: usize = 32;

pub(super) fn ten_seconds() -> f64 {
    10.0
}

/// Sufficient for a slow host.
const COMPILE_TIMEOUT_S: f64 = 60.0;

impl Default for ProgramLimitsSpec {
    fn default() -> Self {
        Self {
            timeout_s: ten_seconds(),
            memory_mib: 1024,
            processes: 64,
            disk_mib: 64,
            output_kib: 1024,
        }
    }
}

impl Default for PytestSpec {
    fn default() -> Self {
        Self { limits: ProgramLimitsSpec::default(), partial: false, module: "solution".into() }
    }
}

impl Default for StdioSpec {
    fn default() -> Self {
        Self {
            language: String::new(),
            output: OutputSpec::default(),
            limits: ProgramLimitsSpec::default(),
            partial: false,
            compile_timeout_s: COMPILE_TIMEOUT_S,
        }
    }
}

impl Default for CompileSpec {
    fn default() -> Self {
        Self {
            language: String::new(),
            run: false,
            output: OutputSpec::default(),
            limits: ProgramLimitsSpec::default(),
            compile_timeout_s: COMPILE_TIMEOUT_S,
        }
    }
}

impl Default for OutputSpec {
    fn default() -> Self {
        Self { matching: OutputMatchSpec::Lines, tolerance: 1e-6 }
    }
}

impl ProgramLimitsSpec {
    fn check_fields(&self, field: &str) -> FieldResult {
        let at = |name: &str| format!("{field}.limits.{name}");
        check_range(&at("timeout_s"), self.timeout_s, 0.1, 3600.0)?;
        check_count(&at("memory_mib"), self.memory_mib, 16, 1 << 20)?;
        check_count(&at("processes"), self.processes, 1, 4096)?;
        check_count(&at("disk_mib"), self.disk_mib, 1, 1 << 20)?;
        check_count(&at("output_kib"), self.output_kib, 1, 65_536)
    }
}

impl PythonSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        self.limits.check_fields(field)
    }
}

impl PytestSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        let mut chars = self.module.chars();
        let first = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let legal = first && chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
        let legal = legal && !self.module.starts_with("test_");
        let remedy = "must be a Python identifier that does not start with test_, such as solution";
        ensure_field(legal, &format!("{field}.module"), remedy)?;
        self.limits.check_fields(field)
    }
}

impl StdioSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_language(field, &self.language, &LANGUAGES)?;
        self.output.check_fields(field)?;
        check_compile_timeout(field, self.compile_timeout_s)?;
        self.limits.check_fields(field)
    }
}

impl CompileSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_language(field, &self.language, &LANGUAGES[1..])?;
        self.output.check_fields(field)?;
        check_compile_timeout(field, self.compile_timeout_s)?;
        self.limits.check_fields(field)
    }
}

impl OutputSpec {
    fn check_fields(&self, field: &str) -> FieldResult {
        check_range(&format!("{field}.output.tolerance"), self.tolerance, 0.0, f64::MAX)
    }
}

impl CommandSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_executable(field, &self.argv, self.timeout_s, &self.paths)?;
        self.check_serving(field)
    }

    fn check_serving(&self, field: &str) -> FieldResult {
        let at = |name: &str| format!("{field}.{name}");
        let Self { processes, concurrent, start_timeout_s, .. } = *self;
        check_count(&at("processes"), processes, 0, 1024)?;
        check_count(&at("concurrent"), concurrent, 1, 256)?;
        check_range(&at("start_timeout_s"), start_timeout_s, 0.0, 600.0)?;
        let defaults = [
            ("processes", processes == 0),
            ("concurrent", concurrent == one_request()),
            ("start_timeout_s", start_timeout_s.to_bits() == start_seconds().to_bits()),
        ];
        for (name, is_default) in defaults {
            let remedy = "is for an executable that keeps running: add serve: true, or remove it";
            ensure_field(self.serve || is_default, &at(name), remedy)?;
        }
        Ok(())
    }
}

/// Checks an executable of a spec, and the paths that it may read.
pub(super) fn check_executable(
    field: &str,
    argv: &[String],
    timeout_s: f64,
    paths: &[String],
) -> FieldResult {
    let program = argv.first().is_some_and(|program| !program.is_empty());
    ensure_field(program, &format!("{field}.argv"), "name an executable")?;
    check_range(&format!("{field}.timeout_s"), timeout_s, 0.01, 3600.0)?;
    let given = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    check_count(&format!("{field}.paths"), given, 0, PATHS_MAX as u32)?;
    for (index, path) in paths.iter().enumerate() {
        let remedy = format!(
            "must be an absolute path below /, without \"..\", such as /opt/judge, not {path:?}"
        );
        ensure_field(is_plain_path(Path::new(path)), &format!("{field}.paths[{index}]"), remedy)?;
    }
    Ok(())
}

/// Returns true for an absolute path without `..` that is not the root.
fn is_plain_path(path: &Path) -> bool {
    let mut parts = path.components();
    let below = parts.next() == Some(Component::RootDir);
    below && path.parent().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

fn check_language(field: &str, language: &str, known: &[&str]) -> FieldResult {
    let legal = language.is_empty() || known.contains(&language);
    ensure_field(legal, &format!("{field}.language"), describe_choice(language, known))
}

fn check_compile_timeout(field: &str, seconds: f64) -> FieldResult {
    check_range(&format!("{field}.compile_timeout_s"), seconds, 0.1, 3600.0)
}

impl From<ProgramLimitsSpec> for Limits {
    fn from(spec: ProgramLimitsSpec) -> Self {
        let ProgramLimitsSpec { timeout_s, memory_mib, processes, disk_mib, output_kib } = spec;
        Self { timeout_s, memory_mib, processes, disk_mib, output_kib }
    }
}

impl From<OutputSpec> for Output {
    fn from(spec: OutputSpec) -> Self {
        let matching = match spec.matching {
            OutputMatchSpec::Exact => Match::Exact,
            OutputMatchSpec::Lines => Match::Lines,
            OutputMatchSpec::Words => Match::Words,
            OutputMatchSpec::Numbers => Match::Numbers,
        };
        Self { r#match: matching.into(), tolerance: spec.tolerance }
    }
}

impl From<&PythonSpec> for Python {
    fn from(&PythonSpec { limits, partial, challenge }: &PythonSpec) -> Self {
        Self { limits: Some(limits.into()), partial, challenge }
    }
}

impl From<&PytestSpec> for Pytest {
    fn from(spec: &PytestSpec) -> Self {
        let PytestSpec { limits, partial, module } = spec.clone();
        Self { limits: Some(limits.into()), partial, module }
    }
}

impl From<&StdioSpec> for Stdio {
    fn from(spec: &StdioSpec) -> Self {
        let StdioSpec { language, output, limits, partial, compile_timeout_s } = spec.clone();
        let (output, limits) = (Some(output.into()), Some(limits.into()));
        Self { language, output, limits, partial, compile_timeout_s }
    }
}

impl From<&CompileSpec> for Compile {
    fn from(spec: &CompileSpec) -> Self {
        let CompileSpec { language, run, output, limits, compile_timeout_s } = spec.clone();
        let (output, limits) = (Some(output.into()), Some(limits.into()));
        Self { language, run, output, limits, compile_timeout_s }
    }
}

impl From<&CommandSpec> for Command {
    fn from(spec: &CommandSpec) -> Self {
        let CommandSpec { argv, timeout_s, paths, serve, processes, concurrent, start_timeout_s } =
            spec.clone();
        // The fact of a command that does not keep running has none of the other fields, so that
        // its digest is that of older versions.
        let (concurrent, start_timeout_s) =
            if serve { (concurrent, start_timeout_s) } else { (0, 0.0) };
        Self { argv, timeout_s, paths, serve, processes, concurrent, start_timeout_s }
    }
}
