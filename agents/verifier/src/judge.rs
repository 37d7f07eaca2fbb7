//! The verifiers of a run, compiled from its settings.

mod answer;
mod chain;
mod json;
mod numeric;
mod schema;
mod tool_call;

use regex::Regex;
use wire::v1::verifier::How;

use self::{
    answer::compile_pattern, chain::VerifierChain, schema::SchemaVerifier, tool_call::ToolCallRules,
};
pub(crate) use self::{
    json::find_document,
    numeric::{NumberTolerance, parse_number},
};
use crate::{
    calls::VerifyItem,
    command,
    environment::EnvironmentVerifier,
    http::HttpVerifier,
    judge_result::JudgeResult,
    model::ModelJudge,
    program::{CompileVerifier, PytestVerifier, PythonVerifier, SandboxSlot, StdioVerifier},
};

/// A verifier of the spec with its patterns compiled.
#[derive(Debug)]
pub(crate) enum CompletionJudge {
    Exact {
        extract: Option<Regex>,
    },
    Numeric {
        extract: Option<Regex>,
        tolerance: NumberTolerance,
    },
    /// May contain `{answer}`, so it is compiled for each item.
    Regex {
        pattern: String,
    },
    Schema(SchemaVerifier),
    ToolCall(ToolCallRules),
    Python(PythonVerifier),
    Pytest(PytestVerifier),
    Stdio(StdioVerifier),
    Compile(CompileVerifier),
    Command(command::CommandVerifier),
    Http(HttpVerifier),
    Model(ModelJudge),
    Environment(EnvironmentVerifier),
    Chain(VerifierChain),
}

impl CompletionJudge {
    /// Fails with what is wrong with the settings.
    pub(crate) fn new(how: &How) -> Result<Self, String> {
        let regex =
            |text: &str| compile_pattern(text).map_err(|error| format!("the pattern: {error}"));
        Ok(match how {
            How::Exact(exact) => Self::Exact { extract: regex(&exact.extract)? },
            How::Numeric(numeric) => Self::Numeric {
                extract: regex(&numeric.extract)?,
                tolerance: NumberTolerance {
                    absolute: numeric.tolerance,
                    relative: numeric.relative_tolerance,
                },
            },
            How::Regex(regex) => Self::Regex { pattern: regex.pattern.clone() },
            How::JsonSchema(schema) => Self::Schema(
                SchemaVerifier::new(&schema.schema)
                    .map_err(|error| format!("the schema: {error}"))?,
            ),
            How::ToolCall(call) => {
                Self::ToolCall(ToolCallRules { ordered: call.ordered, partial: call.partial })
            }
            How::Python(python) => Self::Python(python.into()),
            How::Pytest(pytest) => Self::Pytest(pytest.into()),
            How::Stdio(stdio) => Self::Stdio(stdio.into()),
            How::Compile(compile) => Self::Compile(compile.into()),
            How::Command(command) => Self::Command(command.into()),
            How::Http(http) => Self::Http(http.into()),
            How::LlmJudge(judge) => Self::Model(ModelJudge::new(judge)?),
            How::Environment(environment) => Self::Environment(environment.into()),
            How::Chain(chain) => Self::Chain(VerifierChain::new(chain)?),
        })
    }

    pub(crate) fn judge_item(&self, item: &VerifyItem, slot: &mut SandboxSlot<'_>) -> JudgeResult {
        match self {
            Self::Exact { extract } => answer::judge_exact(extract.as_ref(), item),
            Self::Numeric { extract, tolerance } => {
                answer::judge_numeric(extract.as_ref(), *tolerance, item)
            }
            Self::Regex { pattern } => answer::judge_pattern(pattern, item),
            Self::Schema(schema) => schema.judge_item(item),
            Self::ToolCall(rules) => rules.judge_item(item),
            Self::Python(python) => python.judge_item(item, slot).unwrap_or_else(|it| it),
            Self::Pytest(pytest) => pytest.judge_item(item, slot).unwrap_or_else(|it| it),
            Self::Stdio(stdio) => stdio.judge_item(item, slot).unwrap_or_else(|it| it),
            Self::Compile(compile) => compile.judge_item(item, slot).unwrap_or_else(|it| it),
            Self::Command(verifier) => verifier.judge_item(item, slot),
            Self::Http(verifier) => verifier.judge_item(item),
            Self::Model(model) => model.judge_item(item),
            Self::Environment(environment) => environment.judge_item(item, slot),
            Self::Chain(chain) => chain.judge_item(item, slot),
        }
    }

    /// Returns true if equal items always get equal results. An executable or a server may be
    /// replaced between two items.
    pub(crate) fn is_cacheable(&self) -> bool {
        match self {
            Self::Command(_) | Self::Http(_) | Self::Environment(_) => false,
            Self::Chain(chain) => chain.stage_judges().all(Self::is_cacheable),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::v1::{
        verdicts::Outcome,
        verifier::{Chain, Exact, JsonSchema, Numeric, Regex as Pattern, chain::Stage},
    };

    use super::*;
    use crate::program::SandboxPool;

    fn judge(how: &How, item: &VerifyItem) -> JudgeResult {
        let shop = SandboxPool::without_programs();
        CompletionJudge::new(how).unwrap().judge_item(item, &mut shop.open_slot(1))
    }

    fn outcome(how: &How, completion: &str, answer: Option<&str>) -> Outcome {
        let answer = answer.map(str::to_owned);
        judge(
            how,
            &VerifyItem { completion: completion.into(), answer, ..VerifyItem::example_item() },
        )
        .outcome
    }

    #[test]
    fn exact_compares_the_last_thing_extracted() {
        let how = How::Exact(Exact { extract: r"#(\d+)".into() });
        assert_eq!(outcome(&how, "7+5=12 #132", Some("132")), Outcome::Pass);
        assert_eq!(outcome(&how, "#132 no, #133", Some("132")), Outcome::Fail);
        assert_eq!(outcome(&how, "132", Some("132")), Outcome::Fail);
        assert_eq!(outcome(&how, "so #132", Some("7+5=12 #132")), Outcome::Pass);
        assert_eq!(outcome(&how, "so #13", Some("7+5=12 #132")), Outcome::Fail);
        let whole = How::Exact(Exact { extract: String::new() });
        assert_eq!(outcome(&whole, " yes\n", Some("yes")), Outcome::Pass);
    }

    #[test]
    fn numbers_are_compared_as_numbers() {
        let how = How::Numeric(Numeric { tolerance: 1e-6, ..Numeric::default() });
        for (completion, answer) in [
            ("so it is 1,234.50.", "1234.5"),
            ("1/4", "0.25"),
            (r"\boxed{\frac{1}{4}}", r"\frac{1}{4}"),
            ("between 3 and -7", "-7"),
            ("42 apples", "42.0"),
            ("#### 18", "He has 9 + 9 = 18.\n#### 18"),
        ] {
            assert_eq!(outcome(&how, completion, Some(answer)), Outcome::Pass, "{completion}");
        }
        assert_eq!(outcome(&how, "none", Some("1")), Outcome::Fail);
        assert_eq!(outcome(&how, "1/0", Some("1")), Outcome::Fail);
    }

    #[test]
    fn a_pattern_may_name_the_answer() {
        let how = How::Regex(Pattern { pattern: r"^result: {answer}$".into() });
        assert_eq!(outcome(&how, "result: 1.5", Some("1.5")), Outcome::Pass);
        assert_eq!(outcome(&how, "result: 1x5", Some("1.5")), Outcome::Fail);
    }

    #[test]
    fn a_prompt_without_an_answer_is_the_verifiers_error_not_a_failure() {
        let exact = How::Exact(Exact::default());
        let numeric = How::Numeric(Numeric::default());
        let schema = How::JsonSchema(JsonSchema::default());
        assert_eq!(outcome(&exact, "1", None), Outcome::Error);
        assert_eq!(outcome(&numeric, "1", None), Outcome::Error);
        assert_eq!(outcome(&numeric, "1", Some("one")), Outcome::Error);
        assert_eq!(outcome(&schema, "1", None), Outcome::Error);
    }

    #[test]
    fn json_is_what_its_schema_admits_from_the_settings_or_the_prompt() {
        let schema =
            r#"{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}"#;
        let how = How::JsonSchema(JsonSchema { schema: schema.into() });
        assert_eq!(outcome(&how, "```json\n{\"a\": 1}\n```", None), Outcome::Pass);
        let wrong =
            VerifyItem { completion: "{\"a\": \"1\"}".into(), ..VerifyItem::example_item() };
        let result = judge(&how, &wrong);
        assert!(result.outcome == Outcome::Fail && result.detail.starts_with("/a: "), "{result:?}");
        let mut item = VerifyItem { completion: "[1]".into(), ..VerifyItem::example_item() };
        item.fields.insert("schema".into(), serde_json::json!({"type": "array"}));
        assert_eq!(judge(&How::JsonSchema(JsonSchema::default()), &item), JudgeResult::full_pass());
    }

    #[test]
    fn a_chain_pays_by_weight_and_may_stop_at_the_first_failure() {
        let stage = |pattern: &str, weight| Stage {
            verifier: Some(wire::v1::Verifier {
                how: Some(How::Regex(Pattern { pattern: pattern.into() })),
            }),
            weight,
        };
        let stages = vec![stage("a", 1.0), stage("b", 2.0), stage("c", 1.0)];
        let chain = |stop_at_failure| How::Chain(Chain { stages: stages.clone(), stop_at_failure });
        let item =
            |text: &str| VerifyItem { completion: text.into(), ..VerifyItem::example_item() };
        assert_eq!(judge(&chain(true), &item("abc")), JudgeResult::full_pass());
        let result = judge(&chain(true), &item("ac"));
        assert_eq!((result.outcome, result.reward), (Outcome::Fail, 0.25));
        assert_eq!(result.detail, "stage 2: the pattern is not found");
        assert_eq!(judge(&chain(false), &item("ac")).reward.to_bits(), 0.5_f64.to_bits());
        let broken = How::Chain(Chain {
            stages: vec![Stage {
                verifier: Some(wire::v1::Verifier { how: Some(How::Exact(Exact::default())) }),
                weight: 1.0,
            }],
            stop_at_failure: true,
        });
        assert_eq!(judge(&broken, &item("a")).outcome, Outcome::Error);
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let extract = "(".to_owned();
        assert!(
            CompletionJudge::new(&How::Exact(Exact { extract }))
                .unwrap_err()
                .starts_with("the pattern")
        );
        let schema = "{\"type\": 7}".to_owned();
        let how = How::JsonSchema(JsonSchema { schema });
        assert!(CompletionJudge::new(&how).unwrap_err().starts_with("the schema"));
    }
}
