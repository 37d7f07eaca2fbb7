//! Verifiers that run programs: what models wrote, contained; and an executable of the fleet's
//! owner, which is not.

use serde::Deserialize;
use wire::v1::verifier::{Command, Compile, Limits, Match, Output, Pytest, Python, Stdio};

use crate::check::{Checked, count, ensure, within};

const LANGUAGES: [&str; 5] = ["python", "c", "c++", "rust", "go"];

/// What a program may take, each time one is run.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSpec {
    pub timeout_s: f64,
    pub memory_mib: u32,
    pub processes: u32,
    pub disk_mib: u32,
    pub output_kib: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PythonSpec {
    pub limits: LimitsSpec,
    pub partial: bool,
    pub challenge: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PytestSpec {
    pub limits: LimitsSpec,
    pub partial: bool,
    pub module: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StdioSpec {
    /// Empty: by the prompt's field, or the fence.
    pub language: String,
    pub output: OutputSpec,
    pub limits: LimitsSpec,
    pub partial: bool,
    pub compile_timeout_s: f64,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CompileSpec {
    pub language: String,
    pub run: bool,
    pub output: OutputSpec,
    pub limits: LimitsSpec,
    pub compile_timeout_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutputSpec {
    #[serde(rename = "match")]
    pub matching: MatchSpec,
    pub tolerance: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MatchSpec {
    Exact,
    Lines,
    Words,
    Numbers,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    pub argv: Vec<String>,
    #[serde(default = "ten_seconds")]
    pub timeout_s: f64,
}

fn ten_seconds() -> f64 {
    10.0
}

/// Of a compiler, on a slow box.
const COMPILE_TIMEOUT_S: f64 = 60.0;

impl Default for LimitsSpec {
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
        Self { limits: LimitsSpec::default(), partial: false, module: "solution".into() }
    }
}

impl Default for StdioSpec {
    fn default() -> Self {
        Self {
            language: String::new(),
            output: OutputSpec::default(),
            limits: LimitsSpec::default(),
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
            limits: LimitsSpec::default(),
            compile_timeout_s: COMPILE_TIMEOUT_S,
        }
    }
}

impl Default for OutputSpec {
    fn default() -> Self {
        Self { matching: MatchSpec::Lines, tolerance: 1e-6 }
    }
}

impl LimitsSpec {
    fn check(&self, field: &str) -> Checked {
        let at = |name: &str| format!("{field}.limits.{name}");
        within(&at("timeout_s"), self.timeout_s, 0.1, 3600.0)?;
        count(&at("memory_mib"), self.memory_mib, 16, 1 << 20)?;
        count(&at("processes"), self.processes, 1, 4096)?;
        count(&at("disk_mib"), self.disk_mib, 1, 1 << 20)?;
        count(&at("output_kib"), self.output_kib, 1, 65_536)
    }
}

impl PythonSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        self.limits.check(field)
    }
}

impl PytestSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        let mut chars = self.module.chars();
        let first = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let legal = first && chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
        let legal = legal && !self.module.starts_with("test_");
        let remedy = "must be a Python identifier that does not start with test_, such as solution";
        ensure(legal, &format!("{field}.module"), remedy)?;
        self.limits.check(field)
    }
}

impl StdioSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        language(field, &self.language, &LANGUAGES)?;
        self.output.check(field)?;
        compile_timeout(field, self.compile_timeout_s)?;
        self.limits.check(field)
    }
}

impl CompileSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        language(field, &self.language, &LANGUAGES[1..])?;
        self.output.check(field)?;
        compile_timeout(field, self.compile_timeout_s)?;
        self.limits.check(field)
    }
}

impl OutputSpec {
    fn check(&self, field: &str) -> Checked {
        within(&format!("{field}.output.tolerance"), self.tolerance, 0.0, f64::MAX)
    }
}

impl CommandSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        let program = self.argv.first().is_some_and(|program| !program.is_empty());
        ensure(program, &format!("{field}.argv"), "name an executable")?;
        within(&format!("{field}.timeout_s"), self.timeout_s, 0.01, 3600.0)
    }
}

fn language(field: &str, language: &str, known: &[&str]) -> Checked {
    let legal = language.is_empty() || known.contains(&language);
    ensure(legal, &format!("{field}.language"), format!("must be one of {}", known.join(", ")))
}

fn compile_timeout(field: &str, seconds: f64) -> Checked {
    within(&format!("{field}.compile_timeout_s"), seconds, 0.1, 3600.0)
}

impl From<LimitsSpec> for Limits {
    fn from(spec: LimitsSpec) -> Self {
        let LimitsSpec { timeout_s, memory_mib, processes, disk_mib, output_kib } = spec;
        Self { timeout_s, memory_mib, processes, disk_mib, output_kib }
    }
}

impl From<OutputSpec> for Output {
    fn from(spec: OutputSpec) -> Self {
        let matching = match spec.matching {
            MatchSpec::Exact => Match::Exact,
            MatchSpec::Lines => Match::Lines,
            MatchSpec::Words => Match::Words,
            MatchSpec::Numbers => Match::Numbers,
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
        Self { argv: spec.argv.clone(), timeout_s: spec.timeout_s }
    }
}
