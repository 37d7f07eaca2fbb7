//! How a completion is judged, by the settings of a run.

mod answer;
mod chain;
mod json;
mod numeric;
mod schema;
mod tool_call;

use regex::Regex;
use wire::v1::verifier::How;

use self::{answer::pattern, chain::Chain, schema::Schema, tool_call::Rules};
pub(crate) use self::{
    json::document,
    numeric::{Tolerance, number},
};
use crate::{
    calls::Item,
    command,
    model::Model,
    opinion::Opinion,
    program::{Compile, Desk, Pytest, Python, Stdio},
};

/// A verifier with its patterns compiled.
#[derive(Debug)]
pub(crate) enum Judge {
    Exact {
        extract: Option<Regex>,
    },
    Numeric {
        extract: Option<Regex>,
        tolerance: Tolerance,
    },
    /// The pattern may name the answer, so it is compiled for each item.
    Regex {
        pattern: String,
    },
    Schema(Schema),
    ToolCall(Rules),
    Python(Python),
    Pytest(Pytest),
    Stdio(Stdio),
    Compile(Compile),
    Command(command::Verifier),
    Model(Model),
    Chain(Chain),
}

impl Judge {
    /// # Errors
    /// What is wrong with the settings.
    pub(crate) fn new(how: &How) -> Result<Self, String> {
        let regex = |text: &str| pattern(text).map_err(|error| format!("the pattern: {error}"));
        Ok(match how {
            How::Exact(exact) => Self::Exact { extract: regex(&exact.extract)? },
            How::Numeric(numeric) => Self::Numeric {
                extract: regex(&numeric.extract)?,
                tolerance: Tolerance {
                    absolute: numeric.tolerance,
                    relative: numeric.relative_tolerance,
                },
            },
            How::Regex(regex) => Self::Regex { pattern: regex.pattern.clone() },
            How::JsonSchema(schema) => Self::Schema(
                Schema::new(&schema.schema).map_err(|error| format!("the schema: {error}"))?,
            ),
            How::ToolCall(call) => {
                Self::ToolCall(Rules { ordered: call.ordered, partial: call.partial })
            }
            How::Python(python) => Self::Python(python.into()),
            How::Pytest(pytest) => Self::Pytest(pytest.into()),
            How::Stdio(stdio) => Self::Stdio(stdio.into()),
            How::Compile(compile) => Self::Compile(compile.into()),
            How::Command(command) => Self::Command(command.into()),
            How::LlmJudge(judge) => Self::Model(Model::new(judge)?),
            How::Chain(chain) => Self::Chain(Chain::new(chain)?),
        })
    }

    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        match self {
            Self::Exact { extract } => answer::exact(extract.as_ref(), item),
            Self::Numeric { extract, tolerance } => {
                answer::numeric(extract.as_ref(), *tolerance, item)
            }
            Self::Regex { pattern } => answer::found(pattern, item),
            Self::Schema(schema) => schema.judge(item),
            Self::ToolCall(rules) => rules.judge(item),
            Self::Python(python) => python.judge(item, desk),
            Self::Pytest(pytest) => pytest.judge(item, desk),
            Self::Stdio(stdio) => stdio.judge(item, desk),
            Self::Compile(compile) => compile.judge(item, desk),
            Self::Command(verifier) => verifier.judge(item),
            Self::Model(model) => model.judge(item),
            Self::Chain(chain) => chain.judge(item, desk),
        }
    }

    /// Whether what it said of a completion holds for the next one like it. An executable may
    /// have been replaced meanwhile.
    pub(crate) fn is_lasting(&self) -> bool {
        match self {
            Self::Command(_) => false,
            Self::Chain(chain) => chain.stages().all(Self::is_lasting),
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
    use crate::program::Shop;

    fn judge(how: &How, item: &Item) -> Opinion {
        let shop = Shop::closed();
        Judge::new(how).unwrap().judge(item, &mut shop.desk())
    }

    fn outcome(how: &How, completion: &str, answer: Option<&str>) -> Outcome {
        let answer = answer.map(str::to_owned);
        judge(how, &Item { completion: completion.into(), answer, ..Item::example() }).outcome
    }

    #[test]
    fn exact_compares_the_last_thing_extracted() {
        let how = How::Exact(Exact { extract: r"#(\d+)".into() });
        assert_eq!(outcome(&how, "7+5=12 #132", Some("132")), Outcome::Pass);
        assert_eq!(outcome(&how, "#132 no, #133", Some("132")), Outcome::Fail);
        assert_eq!(outcome(&how, "132", Some("132")), Outcome::Fail);
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
        let wrong = Item { completion: "{\"a\": \"1\"}".into(), ..Item::example() };
        let opinion = judge(&how, &wrong);
        assert!(
            opinion.outcome == Outcome::Fail && opinion.detail.starts_with("/a: "),
            "{opinion:?}"
        );
        let mut item = Item { completion: "[1]".into(), ..Item::example() };
        item.fields.insert("schema".into(), serde_json::json!({"type": "array"}));
        assert_eq!(judge(&How::JsonSchema(JsonSchema::default()), &item), Opinion::pass());
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
        let item = |text: &str| Item { completion: text.into(), ..Item::example() };
        assert_eq!(judge(&chain(true), &item("abc")), Opinion::pass());
        let opinion = judge(&chain(true), &item("ac"));
        assert_eq!((opinion.outcome, opinion.reward), (Outcome::Fail, 0.25));
        assert_eq!(opinion.detail, "stage 2: the pattern is not found");
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
        assert!(Judge::new(&How::Exact(Exact { extract })).unwrap_err().starts_with("the pattern"));
        let schema = "{\"type\": 7}".to_owned();
        let how = How::JsonSchema(JsonSchema { schema });
        assert!(Judge::new(&how).unwrap_err().starts_with("the schema"));
    }
}
