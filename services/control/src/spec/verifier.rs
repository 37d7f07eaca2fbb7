//! How a spec says what judges its samples.

use regex::RegexBuilder;
use serde::Deserialize;
use wire::v1;

use crate::check::{Checked, ensure, within};

/// Longest regular expression as written; a longer one takes memory out of proportion.
const PATTERN_BYTES_MAX: usize = 4096;

/// Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifierSpec {
    pub exact: Option<ExactSpec>,
    pub numeric: Option<NumericSpec>,
    pub regex: Option<RegexSpec>,
    pub command: Option<CommandSpec>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExactSpec {
    pub extract: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NumericSpec {
    pub extract: String,
    pub tolerance: f64,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexSpec {
    pub pattern: String,
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

impl Default for NumericSpec {
    fn default() -> Self {
        Self { extract: String::new(), tolerance: 1e-6 }
    }
}

impl VerifierSpec {
    /// `None` unless exactly one verifier is named.
    pub(crate) fn resolve(&self) -> Option<v1::Verifier> {
        use v1::verifier::{Command, Exact, How, Numeric, Regex};
        let hows = [
            self.exact.as_ref().map(|spec| How::Exact(Exact { extract: spec.extract.clone() })),
            self.numeric.as_ref().map(|spec| {
                let extract = spec.extract.clone();
                How::Numeric(Numeric { extract, tolerance: spec.tolerance })
            }),
            self.regex.as_ref().map(|spec| How::Regex(Regex { pattern: spec.pattern.clone() })),
            self.command.as_ref().map(|spec| {
                How::Command(Command { argv: spec.argv.clone(), timeout_s: spec.timeout_s })
            }),
        ];
        let mut named = hows.into_iter().flatten();
        match (named.next(), named.next()) {
            (Some(how), None) => Some(v1::Verifier { how: Some(how) }),
            _ => None,
        }
    }
}

impl VerifierSpec {
    pub(super) fn check(&self) -> Checked {
        let field = "raft.verifier";
        let one = self.resolve().is_some();
        ensure(one, field, "write exactly one of exact, numeric, regex and command")?;
        let extract = self.exact.as_ref().map(|spec| &spec.extract);
        let extract = extract.or(self.numeric.as_ref().map(|spec| &spec.extract));
        let pattern = extract.or(self.regex.as_ref().map(|spec| &spec.pattern));
        let bytes = pattern.map_or(0, String::len);
        let remedy = format!("the pattern has {bytes} bytes, the limit is {PATTERN_BYTES_MAX}");
        ensure(bytes <= PATTERN_BYTES_MAX, field, remedy)?;
        // What the verifier accepts once the answer is in it.
        let compiled_max = if self.regex.is_some() { 1 << 20 } else { 10 << 20 };
        let build = |pattern: &String| RegexBuilder::new(pattern).size_limit(compiled_max).build();
        if let Some(Err(error)) = pattern.map(build) {
            return ensure(false, field, format!("not a regular expression: {error}"));
        }
        if let Some(numeric) = &self.numeric {
            within("raft.verifier.numeric.tolerance", numeric.tolerance, 0.0, f64::MAX)?;
        }
        if let Some(command) = &self.command {
            ensure(!command.argv.is_empty(), "raft.verifier.command.argv", "name an executable")?;
            within("raft.verifier.command.timeout_s", command.timeout_s, 0.01, 3600.0)?;
        }
        Ok(())
    }
}
