//! The verifiers of a spec, which judge samples.

mod answer_verifiers;
mod environment;
mod http;
mod llm_judge;
mod program_verifiers;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1::{self, verifier::How};

use self::{
    answer_verifiers::{ExactSpec, JsonSchemaSpec, NumericSpec, RegexSpec, ToolCallSpec},
    environment::EnvironmentSpec,
    http::HttpSpec,
    llm_judge::LlmJudgeSpec,
    program_verifiers::{CommandSpec, CompileSpec, PytestSpec, PythonSpec, StdioSpec},
};
pub(crate) use self::{http::is_plain_address, llm_judge::check_key_variable};
use crate::{
    error::FieldError,
    field_checks::{FieldResult, check_count, check_range, ensure_field},
};

const STAGES_MAX: usize = 16;

/// A verifier. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Verifier", extend("minProperties" = 1, "maxProperties" = 1))]
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
    pub http: Option<HttpSpec>,
    pub chain: Option<ChainSpec>,
    pub llm_judge: Option<LlmJudgeSpec>,
    pub environment: Option<EnvironmentSpec>,
}

/// Several verifiers that run one after the other.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChainSpec {
    /// The verifiers, in their order. None of them is a chain.
    #[schemars(length(min = 1, max = 16))]
    pub stages: Vec<StageSpec>,
    /// Skip the stages after a failed one.
    #[serde(default = "yes")]
    pub stop_at_failure: bool,
}

/// A stage of a chain.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageSpec {
    /// The verifier of the stage.
    pub verifier: VerifierSpec,
    /// Weight of the stage in the chain's reward. At least one stage has a weight above 0.
    #[schemars(range(min = 0.0, max = 1e6))]
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
    pub const NAMES: [&str; 14] = [
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
        "http",
        "chain",
        "llm_judge",
        "environment",
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
            self.http.as_ref().map(|spec| How::Http(spec.into())),
            self.chain.as_ref().map(|spec| How::Chain(spec.into())),
            self.llm_judge.as_ref().map(|spec| How::LlmJudge(spec.into())),
            self.environment.as_ref().map(|spec| How::Environment(spec.into())),
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

    /// Returns the highest reward; `None` if a program or a server may give any.
    pub(crate) fn max_reward(&self) -> Option<f64> {
        let stages = self.chain.iter().flat_map(|chain| &chain.stages);
        let mut verifiers = stages.map(|stage| &stage.verifier).chain([self]);
        let is_open = verifiers
            .any(|one| one.command.is_some() || one.http.is_some() || one.environment.is_some());
        (!is_open).then_some(1.0)
    }

    /// Returns the programs of the `command` verifiers among the verifier and its stages, or that of
    /// an environment: the first element of each `argv`. Empty if there are none; programs that other
    /// verifiers start are not listed.
    pub fn list_command_programs(&self) -> Vec<&str> {
        let commands = self.command.iter().map(|command| &command.argv);
        let environments = self.environment.iter().map(|environment| &environment.argv);
        let own = commands.chain(environments).filter_map(|argv| argv.first());
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
        let Self { python, pytest, stdio, compile, command, http, chain, .. } = self;
        let Self { llm_judge, environment, .. } = self;
        python.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("python")))?;
        pytest.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("pytest")))?;
        stdio.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("stdio")))?;
        compile.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("compile")))?;
        command.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("command")))?;
        http.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("http")))?;
        chain.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("chain")))?;
        llm_judge.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("llm_judge")))?;
        environment.as_ref().map_or(Ok(()), |spec| spec.check_fields(&at("environment")))
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
            let remedy = "an environment plays whole episodes, so it is the only verifier: remove \
                          the chain";
            ensure_field(stage.verifier.environment.is_none(), &field, remedy)?;
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
        let needs_some = ["regex", "command", "http", "chain", "llm_judge", "environment"];
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
            ("command: { argv: [a], processes: 2 }", "verifier.command.processes"),
            ("command: { argv: [a], concurrent: 2 }", "verifier.command.concurrent"),
            ("command: { argv: [a], start_timeout_s: 9 }", "verifier.command.start_timeout_s"),
            ("command: { argv: [a], serve: true, concurrent: 0 }", "verifier.command.concurrent"),
            ("http: { url: 'ftp://a/v' }", "verifier.http.url"),
            ("http: { url: 'http:///v' }", "verifier.http.url"),
            ("http: { url: 'https://me:word@a/v' }", "verifier.http.url"),
            ("http: { url: 'http://a/v', timeout_s: 0 }", "verifier.http.timeout_s"),
            ("http: { url: 'http://a/v', key_env: HOME }", "verifier.http.key_env"),
            ("command: { argv: [a], paths: [opt] }", "verifier.command.paths[0]"),
            ("command: { argv: [a], paths: [/opt, /] }", "verifier.command.paths[1]"),
            ("command: { argv: [a], paths: [/opt/../root] }", "verifier.command.paths[0]"),
            ("chain: { stages: [] }", "verifier.chain.stages"),
            ("chain: { stages: [{ verifier: {} }] }", "verifier.chain.stages[0].verifier"),
            (
                "chain: { stages: [{ verifier: { exact: {} }, weight: 0 }] }",
                "verifier.chain.stages",
            ),
            (
                "chain: { stages: [{ verifier: { environment: { argv: [a] } } }] }",
                "verifier.chain.stages[0].verifier",
            ),
            ("environment: { argv: [''] }", "verifier.environment.argv"),
            ("environment: { argv: [a], paths: [opt] }", "verifier.environment.paths[0]"),
            ("environment: { argv: [a], max_turns: 65 }", "verifier.environment.max_turns"),
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
        assert_eq!((command.concurrent, command.start_timeout_s.to_bits()), (0, 0));
        let served = verifier("command: { argv: [a], serve: true, processes: 3 }").unwrap();
        let How::Command(served) = served.how.unwrap() else { panic!() };
        assert_eq!((served.serve, served.processes, served.concurrent), (true, 3, 1));
        assert_eq!(served.start_timeout_s.to_bits(), 60_f64.to_bits());
        let How::Http(http) = verifier("http: { url: 'http://a' }").unwrap().how.unwrap() else {
            panic!()
        };
        assert_eq!(http.timeout_s.to_bits(), 60_f64.to_bits());
        let chain = "chain: { stages: [{ verifier: { exact: {} } }] }";
        let How::Chain(chain) = verifier(chain).unwrap().how.unwrap() else { panic!() };
        assert!(chain.stop_at_failure);
        assert_eq!(chain.stages[0].weight.to_bits(), 1_f64.to_bits());
    }

    #[test]
    fn programs_and_servers_may_give_any_reward() {
        for (yaml, highest) in [
            ("exact: {}", Some(1.0)),
            ("command: { argv: [a] }", None),
            ("http: { url: 'http://a' }", None),
            ("environment: { argv: [a] }", None),
            ("chain: { stages: [{ verifier: { exact: {} } }] }", Some(1.0)),
            ("chain: { stages: [{ verifier: { http: { url: 'http://a' } } }] }", None),
        ] {
            let spec: VerifierSpec = serde_saphyr::from_str(yaml).unwrap();
            assert_eq!(spec.max_reward(), highest, "{yaml}");
        }
    }
}
