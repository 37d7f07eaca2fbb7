//! The spec of `flotilla data generate`: categories with example prompts, from which a model writes
//! further prompts, and answers to them.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    error::SpecError,
    field_checks::{
        EXTRACT_COMPILED_MAX, FieldResult, check_count, check_pattern, check_range, ensure_field,
    },
    run_spec_checks::is_run_name,
    verifier::VerifierSpec,
    yaml::parse_checked,
};

const SPEC_BYTES_MAX: usize = 4 << 20;
const CATEGORIES_MAX: usize = 1000;
const EXAMPLES_MAX: usize = 100;
const COUNT_MAX: u32 = 100_000;
/// Bytes of a template, a description, or a text of an example.
const TEXT_BYTES_MAX: usize = 64 * 1024;

const DEFAULT_PROMPTS_TEMPLATE: &str = "\
Write {count} different prompts that people could send to an assistant. All belong to the category \
\"{category}\". {description}

Examples:
{examples}

Prompts that exist already:
{known}

Vary subject, length, wording and difficulty. Each prompt must be complete by itself, and must not \
repeat an example or an existing prompt. Reply with a JSON list of {count} texts and nothing else.";

const DEFAULT_REFUSALS: [&str; 6] = [
    "I'm sorry",
    "I am sorry",
    "I can't assist",
    "I cannot assist",
    "I can't help with",
    "As an AI",
];

/// A file from which a model generates training data.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Generation spec")]
pub struct GenerationSpec {
    /// Kinds of prompts.
    #[schemars(length(min = 1, max = 1000))]
    pub categories: Vec<CategorySpec>,
    /// Samples of all categories. May be absent if each category has a count.
    #[schemars(range(min = 1, max = 100_000))]
    pub count: Option<u32>,
    /// All random choices are derived from it.
    #[serde(default)]
    pub seed: u64,
    #[serde(default)]
    pub prompts: PromptWritingSpec,
    #[serde(default)]
    pub answers: AnswerWritingSpec,
    #[serde(default)]
    pub deduplicate: DeduplicationSpec,
    /// Judges all categories that have no verifier of their own. Absent: none.
    pub verify: Option<VerifierSpec>,
    #[serde(default)]
    pub heldout: HeldoutShareSpec,
    #[serde(default)]
    pub limits: GenerationLimits,
}

/// A kind of prompt.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CategorySpec {
    /// Name in the data.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,47}$"))]
    pub name: String,
    /// Description for the model.
    #[serde(default)]
    pub description: String,
    /// Samples of this category.
    #[serde(skip_serializing)]
    #[schemars(range(min = 1, max = 100_000))]
    pub count: Option<u32>,
    /// Share of the samples that categories with a count leave, relative to other weights.
    #[serde(skip_serializing)]
    #[schemars(range(min = 1e-6, max = 1e6))]
    pub weight: Option<f64>,
    /// Examples for the model. They are not part of the data.
    #[serde(default)]
    #[schemars(length(max = 100))]
    pub seeds: Vec<SeedExample>,
    /// Judges this category.
    #[serde(skip_serializing)]
    pub verify: Option<VerifierSpec>,
}

/// An example prompt, with an answer that shows the style of answers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SeedExample {
    /// Text of a user.
    #[schemars(length(min = 1))]
    pub prompt: String,
    /// Answer in the style that the model imitates.
    pub answer: Option<String>,
}

/// The request for prompts.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PromptWritingSpec {
    /// Template with `{count}`, `{category}`, `{description}`, `{examples}` and `{known}`.
    pub template: String,
    /// Prompts that one request asks for at most.
    #[schemars(range(min = 1, max = 100))]
    pub per_request: u32,
    pub sampling: WritingSampling,
}

/// The request for an answer.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerWritingSpec {
    /// System message. Empty: none.
    pub system: String,
    /// Template with `{prompt}`, `{category}` and `{description}`.
    pub template: String,
    /// Regular expression whose first group, at its last match, is the field `answer`. Empty: the
    /// whole completion.
    pub extract: String,
    /// Beginnings of answers that refuse, in any case of letters.
    #[schemars(length(max = 1000))]
    pub refusals: Vec<String>,
    pub sampling: WritingSampling,
}

/// The sampling settings of a request.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WritingSampling {
    /// 0: greedy decoding.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub temperature: f64,
    /// Least total probability of the tokens to draw from. 1: no limit.
    #[schemars(range(min = 1e-6, max = 1.0))]
    pub top_p: f64,
    /// Longest completion, in tokens.
    #[schemars(range(min = 1, max = 32_768))]
    pub max_new_tokens: u32,
}

/// The rule by which a prompt repeats an earlier one. Equal prompts, ignoring case and white space,
/// always do.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeduplicationSpec {
    /// Jaccard similarity of character n-grams from which a prompt is a duplicate. 0: off.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub similarity: f64,
    /// Characters of an n-gram.
    #[schemars(range(min = 1, max = 20))]
    pub ngram: u32,
}

/// The held-out part of each category.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HeldoutShareSpec {
    /// 0: nothing is held out.
    #[schemars(range(min = 0.0, max = 0.9))]
    pub share: f64,
}

/// The bounds of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationLimits {
    /// Requests in all, repeated ones counted once.
    #[schemars(range(min = 1))]
    pub requests: u32,
    /// Tokens of all requests and answers, as the endpoint counts them.
    #[schemars(range(min = 1))]
    pub tokens: u64,
    /// Prompts asked for per wanted sample of a category.
    #[schemars(range(min = 1.0, max = 1000.0))]
    pub attempts: f64,
    /// Requests at a time.
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: u32,
    /// Further tries of a request that the endpoint did not answer.
    #[schemars(range(min = 0, max = 100))]
    pub retries: u32,
    /// Wait before the first retry, in seconds; doubled for each further one, up to a minute.
    #[schemars(range(min = 0.001, max = 60.0))]
    pub backoff_s: f64,
    /// Longest wait for an answer, in seconds.
    #[schemars(range(min = 0.1, max = 3600.0))]
    pub request_timeout_s: f64,
    /// Longest time of one command, in seconds.
    #[schemars(range(min = 0.1, max = 2_592_000.0))]
    pub time_s: f64,
}

impl Default for PromptWritingSpec {
    fn default() -> Self {
        Self {
            template: DEFAULT_PROMPTS_TEMPLATE.to_owned(),
            per_request: 10,
            sampling: WritingSampling::default(),
        }
    }
}

impl Default for AnswerWritingSpec {
    fn default() -> Self {
        Self {
            system: String::new(),
            template: "{prompt}".to_owned(),
            extract: String::new(),
            refusals: DEFAULT_REFUSALS.map(str::to_owned).to_vec(),
            sampling: WritingSampling::default(),
        }
    }
}

impl Default for WritingSampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_p: 1.0, max_new_tokens: 2048 }
    }
}

impl Default for DeduplicationSpec {
    fn default() -> Self {
        Self { similarity: 0.8, ngram: 5 }
    }
}

impl Default for HeldoutShareSpec {
    fn default() -> Self {
        Self { share: 0.1 }
    }
}

impl Default for GenerationLimits {
    fn default() -> Self {
        Self {
            requests: 100_000,
            tokens: 1_000_000_000,
            attempts: 4.0,
            concurrency: 4,
            retries: 6,
            backoff_s: 1.0,
            request_timeout_s: 300.0,
            time_s: 7.0 * 86_400.0,
        }
    }
}

impl GenerationSpec {
    /// Parses a spec from YAML, at most 4 MiB, and checks its fields.
    pub fn parse(yaml: &str) -> Result<Self, SpecError> {
        let bytes = yaml.len();
        let remedy = format!("it has {bytes} bytes, the limit is {SPEC_BYTES_MAX}");
        let sized = ensure_field(bytes <= SPEC_BYTES_MAX, "spec", remedy);
        sized.map_err(|error| SpecError::from_field("", &error))?;
        parse_checked(yaml, Self::check_fields)
    }

    /// Returns the number of samples of each category. Categories without a count share what the
    /// others leave by weight; what division leaves goes to the largest fractions.
    pub fn category_counts(&self) -> Vec<u32> {
        let fixed: u32 = self.categories.iter().filter_map(|it| it.count).sum();
        let left = self.count.map_or(0, |count| count.saturating_sub(fixed));
        let weights: f64 = self.categories.iter().filter_map(CategorySpec::shared_weight).sum();
        let share = |it: &CategorySpec| {
            it.shared_weight().map_or(0.0, |weight| f64::from(left) * weight / weights)
        };
        let mut counts: Vec<u32> = self
            .categories
            .iter()
            .map(|it| it.count.unwrap_or_else(|| whole_part(share(it))))
            .collect();
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.retain(|index| self.categories[*index].count.is_none());
        order.sort_by(|a, b| {
            let fraction = |index: &usize| share(&self.categories[*index]).fract();
            fraction(b).total_cmp(&fraction(a))
        });
        let given: u32 = counts.iter().sum();
        let rest = (fixed + left).saturating_sub(given) as usize;
        for index in order.into_iter().take(rest) {
            counts[index] += 1;
        }
        counts
    }

    fn check_fields(&self) -> FieldResult {
        let categories = u32::try_from(self.categories.len()).unwrap_or(u32::MAX);
        check_count("categories", categories, 1, CATEGORIES_MAX as u32)?;
        let mut names = BTreeSet::new();
        for (index, category) in self.categories.iter().enumerate() {
            let field = format!("categories[{index}]");
            category.check_fields(&field)?;
            let remedy = format!("{} is the name of an earlier category", category.name);
            ensure_field(names.insert(&category.name), &format!("{field}.name"), remedy)?;
        }
        self.check_counts()?;
        self.prompts.check_fields()?;
        self.answers.check_fields()?;
        let DeduplicationSpec { similarity, ngram } = self.deduplicate;
        check_range("deduplicate.similarity", similarity, 0.0, 1.0)?;
        check_count("deduplicate.ngram", ngram, 1, 20)?;
        check_verifier("verify", self.verify.as_ref())?;
        check_range("heldout.share", self.heldout.share, 0.0, 0.9)?;
        self.limits.check_fields()
    }

    fn check_counts(&self) -> FieldResult {
        let counts = self.categories.iter().filter_map(|it| it.count);
        let fixed: u64 = counts.clone().map(u64::from).sum();
        let open = self.categories.len() - counts.count();
        let Some(count) = self.count else {
            let remedy = "the number of samples is missing; write count: 1500, or a count in each \
                          category";
            ensure_field(open == 0, "count", remedy)?;
            return ensure_field(
                fixed <= u64::from(COUNT_MAX),
                "categories",
                format!("their counts are {fixed} in all, the limit is {COUNT_MAX}"),
            );
        };
        check_count("count", count, 1, COUNT_MAX)?;
        let remedy = format!("the categories have counts of {fixed} in all");
        let fits = if open == 0 { fixed == u64::from(count) } else { fixed <= u64::from(count) };
        ensure_field(fits, "count", remedy)
    }
}

impl CategorySpec {
    /// Returns the weight by which the category shares what others leave; `None` if it has a count.
    fn shared_weight(&self) -> Option<f64> {
        if self.count.is_some() { None } else { Some(self.weight.unwrap_or(1.0)) }
    }

    fn check_fields(&self, field: &str) -> FieldResult {
        let at = |name: &str| format!("{field}.{name}");
        let remedy = "must be up to 48 of a-z, 0-9, '-' and '_', and start with a letter or digit";
        ensure_field(is_run_name(&self.name), &at("name"), remedy)?;
        check_text(&at("description"), &self.description)?;
        let both = self.count.is_some() && self.weight.is_some();
        ensure_field(!both, &at("weight"), "write count or weight, and not both")?;
        self.count.map_or(Ok(()), |count| check_count(&at("count"), count, 1, COUNT_MAX))?;
        self.weight.map_or(Ok(()), |it| check_range(&at("weight"), it, 1e-6, 1e6))?;
        let seeds = u32::try_from(self.seeds.len()).unwrap_or(u32::MAX);
        check_count(&at("seeds"), seeds, 0, EXAMPLES_MAX as u32)?;
        for (index, seed) in self.seeds.iter().enumerate() {
            let field = format!("{field}.seeds[{index}].prompt");
            ensure_field(!seed.prompt.trim().is_empty(), &field, "has no text")?;
            check_text(&field, &seed.prompt)?;
            check_text(&format!("{field}.answer"), seed.answer.as_deref().unwrap_or_default())?;
        }
        check_verifier(&at("verify"), self.verify.as_ref())
    }
}

impl PromptWritingSpec {
    fn check_fields(&self) -> FieldResult {
        check_template("prompts.template", &self.template, "{count}")?;
        check_count("prompts.per_request", self.per_request, 1, 100)?;
        self.sampling.check_fields("prompts.sampling")
    }
}

impl AnswerWritingSpec {
    fn check_fields(&self) -> FieldResult {
        check_text("answers.system", &self.system)?;
        check_template("answers.template", &self.template, "{prompt}")?;
        check_pattern("answers.extract", &self.extract, EXTRACT_COMPILED_MAX)?;
        let has_group = self.extract.is_empty() || self.extract.contains('(');
        let remedy = "must have a group, such as #### (.+)$";
        ensure_field(has_group, "answers.extract", remedy)?;
        let refusals = u32::try_from(self.refusals.len()).unwrap_or(u32::MAX);
        check_count("answers.refusals", refusals, 0, 1000)?;
        let has_empty = self.refusals.iter().any(|it| it.trim().is_empty());
        ensure_field(!has_empty, "answers.refusals", "an empty text begins every answer")?;
        self.sampling.check_fields("answers.sampling")
    }
}

impl WritingSampling {
    fn check_fields(&self, field: &str) -> FieldResult {
        check_range(&format!("{field}.temperature"), self.temperature, 0.0, 10.0)?;
        check_range(&format!("{field}.top_p"), self.top_p, 1e-6, 1.0)?;
        check_count(&format!("{field}.max_new_tokens"), self.max_new_tokens, 1, 32_768)
    }
}

impl GenerationLimits {
    fn check_fields(&self) -> FieldResult {
        let Self { requests, tokens, attempts, concurrency, retries, .. } = *self;
        check_count("limits.requests", requests, 1, u32::MAX)?;
        ensure_field(tokens > 0, "limits.tokens", "must be 1 or more")?;
        check_range("limits.attempts", attempts, 1.0, 1000.0)?;
        check_count("limits.concurrency", concurrency, 1, 256)?;
        check_count("limits.retries", retries, 0, 100)?;
        check_range("limits.backoff_s", self.backoff_s, 0.001, 60.0)?;
        check_range("limits.request_timeout_s", self.request_timeout_s, 0.1, 3600.0)?;
        check_range("limits.time_s", self.time_s, 0.1, 30.0 * 86_400.0)
    }
}

fn check_text(field: &str, text: &str) -> FieldResult {
    let remedy = format!("has {} bytes, the limit is {TEXT_BYTES_MAX}", text.len());
    ensure_field(text.len() <= TEXT_BYTES_MAX, field, remedy)
}

fn check_template(field: &str, template: &str, placeholder: &str) -> FieldResult {
    check_text(field, template)?;
    let remedy = format!("must contain {placeholder}, which is replaced");
    ensure_field(template.contains(placeholder), field, remedy)
}

/// Requires a verifier that needs no field of a prompt, because models write only the text.
fn check_verifier(field: &str, verifier: Option<&VerifierSpec>) -> FieldResult {
    let Some(verifier) = verifier else { return Ok(()) };
    verifier.check_fields(field)?;
    let remedy = "an environment plays several turns; a written sample has one";
    ensure_field(verifier.environment.is_none(), field, remedy)?;
    let needs = verifier.required_fields();
    let missing = needs.first().map(|names| names.join(" or ")).unwrap_or_default();
    let remedy = format!(
        "this verifier reads {missing} of a prompt, which written prompts do not have; use regex, \
         json_schema with a schema, compile, command or llm_judge"
    );
    ensure_field(needs.is_empty(), field, remedy)
}

/// Rounds down. The value is at most [`COUNT_MAX`].
fn whole_part(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(head: &str, categories: &str) -> Result<GenerationSpec, SpecError> {
        GenerationSpec::parse(&format!("{head}\ncategories:\n{categories}"))
    }

    #[test]
    fn what_counts_leave_is_shared_by_weight_and_adds_up() {
        let counts = |head, categories| spec(head, categories).unwrap().category_counts();
        let some = "- {name: a, count: 5}\n- {name: b, weight: 2}\n- {name: c}\n";
        assert_eq!(counts("count: 15", some), [5, 7, 3]);
        assert_eq!(counts("count: 5", some), [5, 0, 0]);
        assert_eq!(counts("", "- {name: a, count: 5}\n- {name: b, count: 1}\n"), [5, 1]);
        let many: String = (0..24).map(|n| format!("- {{name: c{n}}}\n")).collect();
        let shared = counts("count: 1501", &many);
        assert_eq!(shared.iter().sum::<u32>(), 1501);
        assert!(shared.iter().all(|count| [62, 63].contains(count)), "{shared:?}");
    }

    #[test]
    fn mistakes_name_their_field() {
        let one = "- {name: a}\n";
        for (head, categories, words) in [
            ("", one, "count: the number of samples is missing"),
            ("count: 0", one, "count: must be from 1"),
            ("count: 3", "- {name: a, count: 4}\n", "count: the categories have counts of 4"),
            ("count: 3", "- {name: a, count: 1, weight: 1}\n", "categories[0].weight"),
            ("count: 3", "- {name: A b}\n", "categories[0].name"),
            ("count: 3", "- {name: a}\n- {name: a}\n", "categories[1].name"),
            ("count: 3", "- {name: a, seeds: [{prompt: ' '}]}\n", "seeds[0].prompt: has no text"),
            ("count: 3", "- {name: a, seed: []}\n", "did you mean seeds?"),
            ("count: 3\nprompts: {template: x}", one, "prompts.template: must contain {count}"),
            ("count: 3\nanswers: {extract: '('}", one, "answers.extract: not a regular"),
            ("count: 3\nanswers: {extract: 'a'}", one, "answers.extract: must have a group"),
            ("count: 3\nverify: {exact: {}}", one, "verify: this verifier reads answer"),
            ("count: 3", "- {name: a, verify: {python: {}}}\n", "categories[0].verify"),
            ("count: 3\nheldout: {share: 1}", one, "heldout.share"),
            ("count: 3\nlimits: {concurrency: 0}", one, "limits.concurrency"),
            ("count: 3\nlimit: {}", one, "unknown key limit; did you mean limits?"),
        ] {
            let error = spec(head, categories).unwrap_err().to_string();
            assert!(error.contains(words), "{head} {categories}: {error}");
        }
        assert!(spec("count: 3\nverify: {compile: {language: go}}", one).is_ok());
    }
}
