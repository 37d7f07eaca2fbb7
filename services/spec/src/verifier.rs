//! The verifiers of a spec, which judge samples.

mod answer_verifiers;
mod llm_judge;
mod program_verifiers;

use serde::Deserialize;
use wire::v1::{self, verifier::How};

use self::{
    answer_verifiers::{ExactSpec, JsonSchemaSpec, NumericSpec, RegexSpec, ToolCallSpec},
    llm_judge::LlmJudgeSpec,
    program_verifiers::{CommandSpec, CompileSpec, PytestSpec, PythonSpec, StdioSpec},
};
use crate::{
    error::FieldError,
    field_checks::{FieldResult, check_count, check_range, ensure_field},
};

const STAGES_MAX: usize = 16;

/// A verifier. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifierSpec {
    pub exact: Option<ExactSpec>,
    pub numeric: Option<NumericSpec>,
    pub regex: Option<RegexSpec>,
    pub json_schema: Option<JsonSchemaSpec>,
    pub tool_call: Option<ToolCallSpec>,
    pub python: Option<PythonSpec>,
    pub pytest: Option<PytestSpec>,
    pub stdio: Option<StdioSpec>,
    pub compile: Option<CompileSpec>,
    pub command: Option<CommandSpec>,
    pub chain: Option<ChainSpec>,
    pub llm_judge: Option<LlmJudgeSpec>,
}

/// Several verifiers that run one after the other.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainSpec {
    pub stages: Vec<StageSpec>,
    /// Skip the stages after a failed one.
    #[serde(default = "yes")]
    pub stop_at_failure: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageSpec {
    pub verifier: VerifierSpec,
    /// Weight of the stage in the chain's reward.
    #[serde(default = "one")]
    pub weight: f64,
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

impl VerifierSpec {
    /// Names of all verifiers that a spec can use.
    pub const NAMES: [&str; 12] = [
        "exact",
        "numeric",
        "regex",
        "json_schema",
        "tool_call",
        "python",
        "pytest",
        "stdio",
        "compile",
        "command",
        "chain",
        "llm_judge",
    ];

    /// Checks the verifier and converts it to its form in the `spec` fact. Fails unless exactly one
    /// verifier is set and its fields are valid. `field` is its path in the spec, for the error.
    pub fn to_checked_proto(&self, field: &str) -> Result<v1::Verifier, FieldError> {
        self.check_fields(field)?;
        Ok(self.to_proto().unwrap_or_default())
    }

    /// Converts the verifier to its form in the `spec` fact. Returns `None` unless exactly one
    /// verifier is set.
    pub fn to_proto(&self) -> Option<v1::Verifier> {
        let hows = [
            self.exact.as_ref().map(|spec| How::Exact(spec.into())),
            self.numeric.as_ref().map(|spec| How::Numeric(spec.into())),
            self.regex.as_ref().map(|spec| How::Regex(spec.into())),
            self.json_schema.as_ref().map(|spec| How::JsonSchema(spec.into())),
            self.tool_call.as_ref().map(|spec| How::ToolCall(spec.into())),
            self.python.as_ref().map(|spec| How::Python(spec.into())),
            self.pytest.as_ref().map(|spec| How::Pytest(spec.into())),
            self.stdio.as_ref().map(|spec| How::Stdio(spec.into())),
            self.compile.as_ref().map(|spec| How::Compile(spec.into())),
            self.command.as_ref().map(|spec| How::Command(spec.into())),
            self.chain.as_ref().map(|spec| How::Chain(spec.into())),
            self.llm_judge.as_ref().map(|spec| How::LlmJudge(spec.into())),
        ];
        let mut named = hows.into_iter().flatten();
        match (named.next(), named.next()) {
            (Some(how), None) => Some(v1::Verifier { how: Some(how) }),
            _ => None,
        }
    }

    /// Returns the fields that a prompt must have so that its samples can be judged: at least one
    /// field of each list. Empty if it needs no field.
    pub fn required_fields(&self) -> Vec<&'static [&'static str]> {
        let answer: &[&str] = &["answer"];
        let tests: &[&str] = &["test", "tests", "test_list"];
        let cases: &[&str] = &["cases", "test_cases", "input_output"];
        let names_answer = |spec: &&RegexSpec| spec.pattern.contains("{answer}");
        let own = |spec: &&JsonSchemaSpec| spec.schema.is_none();
        let stages = self.chain.iter().flat_map(|chain| &chain.stages);
        let each = [
            self.exact.as_ref().map(|_| answer),
            self.numeric.as_ref().map(|_| answer),
            self.regex.as_ref().filter(names_answer).map(|_| answer),
            self.json_schema.as_ref().filter(own).map(|_| &["schema"] as &[&str]),
            self.tool_call.as_ref().map(|_| &["tool_calls", "answer"] as &[&str]),
            self.python.as_ref().map(|_| tests),
            self.pytest.as_ref().map(|_| &tests[..2]),
            self.stdio.as_ref().map(|_| cases),
        ];
        each.into_iter()
            .flatten()
            .chain(stages.flat_map(|stage| stage.verifier.required_fields()))
            .collect()
    }

    /// Returns the highest reward; `None` if a program may give any.
    pub fn max_reward(&self) -> Option<f64> {
        self.list_command_programs().is_empty().then_some(1.0)
    }

    /// Returns the programs of the `command` verifiers among the verifier and its stages: the first
    /// element of each `argv`. Empty if there are none; programs that other verifiers start are not
    /// listed.
    pub fn list_command_programs(&self) -> Vec<&str> {
        let own = self.command.iter().filter_map(|command| command.argv.first());
        let stages = self.chain.iter().flat_map(|chain| &chain.stages);
        let below = stages.flat_map(|stage| stage.verifier.list_command_programs());
        own.map(String::as_str).chain(below).collect()
    }

    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        let [others @ .., last] = Self::NAMES;
        let remedy = format!("write exactly one of {} and {last}", others.join(", "));
        ensure_field(self.to_proto().is_some(), field, remedy)?;
        let at = |name: &str| format!("{field}.{name}");
        let Self { exact, numeric, regex, json_schema, tool_call: _, .. } = self;
        exact.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("exact")))?;
        numeric.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("numeric")))?;
        regex.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("regex")))?;
        json_schema.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("json_schema")))?;
        let Self { python, pytest, stdio, compile, command, chain, llm_judge, .. } = self;
        python.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("python")))?;
        pytest.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("pytest")))?;
        stdio.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("stdio")))?;
        compile.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("compile")))?;
        command.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("command")))?;
        chain.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("chain")))?;
        llm_judge.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("llm_judge")))
    }
}

impl ChainSpec {
    fn check_fields(&self, field: &str) -> FieldResult {
        let at = format!("{field}.stages");
        let stages = u32::try_from(self.stages.len()).unwrap_or(u32::MAX);
        check_count(&at, stages, 1, STAGES_MAX as u32)?;
        for (index, stage) in self.stages.iter().enumerate() {
            let at = format!("{at}[{index}]");
            check_range(&format!("{at}.weight"), stage.weight, 0.0, 1e6)?;
            let field = format!("{at}.verifier");
            ensure_field(
                stage.verifier.chain.is_none(),
                &field,
                "a chain in a chain: name its stages",
            )?;
            stage.verifier.check_fields(&field)?;
        }
        let total: f64 = self.stages.iter().map(|stage| stage.weight).sum();
        ensure_field(total > 0.0, &at, "one of them must have a weight above 0")
    }
}

impl From<&ChainSpec> for v1::verifier::Chain {
    fn from(spec: &ChainSpec) -> Self {
        let stage = |stage: &StageSpec| v1::verifier::chain::Stage {
            verifier: stage.verifier.to_proto(),
            weight: stage.weight,
        };
        let stages = spec.stages.iter().map(stage).collect();
        Self { stages, stop_at_failure: spec.stop_at_failure }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verifier(yaml: &str) -> Result<v1::Verifier, FieldError> {
        let spec: VerifierSpec = serde_saphyr::from_str(yaml).unwrap();
        spec.to_checked_proto("verifier")
    }

    #[test]
    fn each_that_needs_no_setting_is_named_by_itself() {
        let needs_some = ["regex", "command", "chain", "llm_judge"];
        for name in VerifierSpec::NAMES.iter().filter(|name| !needs_some.contains(name)) {
            assert!(verifier(&format!("{name}: {{}}")).is_ok(), "{name}");
        }
    }

    #[test]
    fn what_cannot_work_is_named_where_it_stands() {
        let cases = [
            ("{}", "verifier"),
            ("{ exact: {}, python: {} }", "verifier"),
            ("python: { limits: { timeout_s: 0 } }", "verifier.python.limits.timeout_s"),
            ("pytest: { module: 'a.b' }", "verifier.pytest.module"),
            ("stdio: { language: cobol }", "verifier.stdio.language"),
            ("compile: { language: python }", "verifier.compile.language"),
            ("json_schema: { schema: { type: 7 } }", "verifier.json_schema.schema"),
            (
                "json_schema: { schema: { pattern: '(\\p{L}{99}){99}' } }",
                "verifier.json_schema.schema",
            ),
            ("json_schema: { schema: { $ref: 'http://a/b' } }", "verifier.json_schema.schema"),
            ("command: { argv: [] }", "verifier.command.argv"),
            ("command: { argv: [a], paths: [opt] }", "verifier.command.paths[0]"),
            ("command: { argv: [a], paths: [/opt, /] }", "verifier.command.paths[1]"),
            ("command: { argv: [a], paths: [/opt/../root] }", "verifier.command.paths[0]"),
            ("chain: { stages: [] }", "verifier.chain.stages"),
            ("chain: { stages: [{ verifier: {} }] }", "verifier.chain.stages[0].verifier"),
            (
                "chain: { stages: [{ verifier: { exact: {} }, weight: 0 }] }",
                "verifier.chain.stages",
            ),
            ("llm_judge: { url: 'x:1', model: m }", "verifier.llm_judge.url"),
            (
                "llm_judge: { url: 'http://a/v1', model: m, key_env: AWS_SECRET }",
                "verifier.llm_judge.key_env",
            ),
        ];
        for (yaml, field) in cases {
            assert_eq!(verifier(yaml).unwrap_err().field, field, "{yaml}");
        }
    }

    #[test]
    fn defaults_are_filled_in() {
        let How::Python(python) = verifier("python: {}").unwrap().how.unwrap() else { panic!() };
        assert_eq!(python.limits.unwrap().memory_mib, 1024);
        let command = verifier("command: { argv: [a], paths: [/opt/judge] }").unwrap();
        let How::Command(command) = command.how.unwrap() else { panic!() };
        assert_eq!(command.paths, ["/opt/judge"]);
        let chain = "chain: { stages: [{ verifier: { exact: {} } }] }";
        let How::Chain(chain) = verifier(chain).unwrap().how.unwrap() else { panic!() };
        assert!(chain.stop_at_failure);
        assert_eq!(chain.stages[0].weight.to_bits(), 1_f64.to_bits());
    }
}
