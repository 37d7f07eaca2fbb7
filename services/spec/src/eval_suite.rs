//! The suites in `evals`: texts whose perplexity is measured, and prompts whose samples are judged.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::{
    data_source::{columns_schema, names_rows},
    error::FieldError,
    field_checks::{FieldResult, check_count, check_range, ensure_field},
    sampling::SamplingSpec,
    verifier::VerifierSpec,
};

/// One suite: a text or prompts. Fields of the other kind must be absent.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend(
    "oneOf" = [{ "required": ["text"] }, { "required": ["prompts", "verifier"] }],
    "dependentRequired" = {
        "n_ctx": ["text"],
        "stride": ["text"],
        "chunks": ["text"],
        "verifier": ["prompts"],
        "samples_per_prompt": ["prompts"],
        "pass_at": ["prompts"],
        "sampling": ["prompts"],
    }
))]
pub struct SuiteSpec {
    /// Name of the suite, unique in the spec.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$"))]
    pub name: String,
    /// A text file, or a file or data set of the hub with {"prompt", "completion"} rows whose
    /// completions are scored. Its perplexity is measured.
    #[schemars(example = "heldout.txt", example = "hub:org/name:test")]
    pub text: Option<String>,
    /// The columns from which fields are taken, by the names of the fields. Default: each field has
    /// its own column.
    #[schemars(schema_with = "columns_schema")]
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
    /// Context length in tokens. Default: 512. Only with `text`.
    #[schemars(range(min = 8, max = 1_048_576))]
    pub n_ctx: Option<u32>,
    /// Tokens by which a sliding window moves forward. Default: 0, for disjoint chunks whose second
    /// half is scored. At most `n_ctx`.
    #[schemars(range(min = 0, max = 1_048_576))]
    pub stride: Option<u32>,
    /// Largest number of chunks to measure. Default: 0, for all.
    pub chunks: Option<u32>,
    /// A file of prompts that are not trained on, or a data set of the hub. Their samples are
    /// judged. Only in RAFT runs.
    #[schemars(example = "gsm8k.jsonl", example = "hub:openai/gsm8k:main/test")]
    pub prompts: Option<String>,
    /// The verifier of the samples of these prompts. Only with `prompts`.
    pub verifier: Option<VerifierSpec>,
    /// Samples of each prompt. Default: 1. Only with `prompts`.
    #[schemars(range(min = 1, max = 4096))]
    pub samples_per_prompt: Option<u32>,
    /// Values of k for which pass@k is reported, at most `samples_per_prompt`. Default: 1 and the
    /// number of samples of a prompt. Only with `prompts`.
    #[schemars(inner(range(min = 1, max = 4096)))]
    pub pass_at: Option<Vec<u32>>,
    /// The sampling of these prompts. Absent settings are taken from the run. Only with `prompts`.
    pub sampling: Option<SuiteSamplingSpec>,
}

/// The sampling of a suite. Absent settings are those of `raft.sampling`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuiteSamplingSpec {
    /// 0: greedy decoding.
    #[schemars(range(min = 0.0, max = 10.0))]
    temperature: Option<f64>,
    /// Number of the most likely tokens to draw from. 0: no limit.
    top_k: Option<u32>,
    /// Least total probability of the tokens to draw from. 1: no limit.
    #[schemars(range(min = 1e-6, max = 1.0))]
    top_p: Option<f64>,
    /// Longest completion, in tokens.
    #[schemars(range(min = 1, max = 32_768))]
    max_new_tokens: Option<u32>,
}

/// The two kinds of suites, with all defaults filled in.
#[derive(Debug)]
pub enum SuiteMeasure<'a> {
    Text(TextSuiteSettings<'a>),
    Prompts(PromptSuiteSettings<'a>),
}

#[derive(Debug)]
pub struct TextSuiteSettings<'a> {
    pub name: &'a str,
    pub text: &'a str,
    pub columns: &'a BTreeMap<String, String>,
    pub n_ctx: u32,
    pub stride: u32,
    pub chunks: u32,
}

#[derive(Debug)]
pub struct PromptSuiteSettings<'a> {
    pub name: &'a str,
    pub prompts: &'a str,
    pub columns: &'a BTreeMap<String, String>,
    pub verifier: &'a VerifierSpec,
    pub samples_per_prompt: u32,
    pub pass_at: Vec<u32>,
    sampling: SuiteSamplingSpec,
}

/// The names of the suites that a run measures, to which gates may refer.
#[derive(Debug, Default)]
pub struct MeasuredSuites<'a> {
    pub texts: Vec<&'a str>,
    pub prompt_suites: Vec<&'a str>,
    /// The run has `raft.heldout`.
    pub has_heldout: bool,
}

fn default_context() -> u32 {
    512
}

/// A shorter context does not give a meaningful perplexity.
const SHORTEST_CONTEXT: u32 = 16;

/// Returns the given values of k, or else 1 and the number of samples of a prompt.
pub(super) fn default_pass_at(given: Option<&Vec<u32>>, samples: u32) -> Vec<u32> {
    let default = || match samples {
        1 => vec![1],
        all => vec![1, all],
    };
    given.cloned().unwrap_or_else(default)
}

impl SuiteSpec {
    /// Returns a suite that measures the text file with the path `text` and a size of `bytes`, and
    /// is named after it. The context length is a power of two from 16 to 512, such that a plain
    /// text contains two contexts even if a token has eight bytes; rows always get 512. Reads no
    /// file.
    pub fn for_file(text: &str, bytes: u64) -> Self {
        const BYTES_A_TOKEN: u64 = 8;
        let file = std::path::Path::new(text);
        let stem = file.file_stem().unwrap_or_default();
        let name = wire::make_slug(&stem.to_string_lossy()).unwrap_or_else(|| "text".into());
        let most = u32::try_from(bytes / BYTES_A_TOKEN / 2).unwrap_or(u32::MAX);
        let lines = names_rows(text);
        let n_ctx = if lines { default_context() } else { default_context().min(most.max(1)) };
        // Round down to a power of two.
        let n_ctx = (1 << n_ctx.ilog2()).max(SHORTEST_CONTEXT);
        Self { name, text: Some(text.to_owned()), n_ctx: Some(n_ctx), ..Self::default() }
    }

    /// Returns the kind of the suite with all defaults filled in. Fails if neither or both of
    /// `text` and `prompts` are set, a field of the other kind is set, or prompts have no verifier.
    /// `field` is the suite's path in the spec, for the error.
    pub fn resolve_kind(&self, field: &str) -> Result<SuiteMeasure<'_>, FieldError> {
        let at = |name: &str| format!("{field}.{name}");
        let of_texts = [
            ("n_ctx", self.n_ctx.is_some()),
            ("stride", self.stride.is_some()),
            ("chunks", self.chunks.is_some()),
        ];
        let of_prompts = [
            ("verifier", self.verifier.is_some()),
            ("samples_per_prompt", self.samples_per_prompt.is_some()),
            ("pass_at", self.pass_at.is_some()),
            ("sampling", self.sampling.is_some()),
        ];
        let alone = |others: &[(&str, bool)], of: &str| {
            let stray = others.iter().find(|(_, set)| *set);
            stray.map_or(Ok(()), |(name, _)| {
                ensure_field(false, &at(name), format!("is for suites of {of}; omit it"))
            })
        };
        match (&self.text, &self.prompts) {
            (Some(text), None) => {
                alone(&of_prompts, "prompts")?;
                Ok(SuiteMeasure::Text(TextSuiteSettings {
                    name: &self.name,
                    text,
                    columns: &self.columns,
                    n_ctx: self.n_ctx.unwrap_or_else(default_context),
                    stride: self.stride.unwrap_or_default(),
                    chunks: self.chunks.unwrap_or_default(),
                }))
            }
            (None, Some(prompts)) => {
                alone(&of_texts, "texts")?;
                let missing = || FieldError {
                    field: at("verifier"),
                    remedy: "name the verifier for the samples of these prompts".into(),
                };
                let samples_per_prompt = self.samples_per_prompt.unwrap_or(1);
                Ok(SuiteMeasure::Prompts(PromptSuiteSettings {
                    name: &self.name,
                    prompts,
                    columns: &self.columns,
                    verifier: self.verifier.as_ref().ok_or_else(missing)?,
                    samples_per_prompt,
                    pass_at: default_pass_at(self.pass_at.as_ref(), samples_per_prompt),
                    sampling: self.sampling.unwrap_or_default(),
                }))
            }
            _ => Err(FieldError {
                field: field.to_owned(),
                remedy:
                    "write exactly one of text (its perplexity is measured) and prompts (their \
                         samples are judged)"
                        .into(),
            }),
        }
    }
}

impl TextSuiteSettings<'_> {
    pub(crate) fn check_fields(&self, field: &str) -> FieldResult {
        check_count(&format!("{field}.n_ctx"), self.n_ctx, 8, 1_048_576)?;
        check_count(&format!("{field}.stride"), self.stride, 0, self.n_ctx)
    }
}

impl PromptSuiteSettings<'_> {
    /// Returns the sampling settings of the suite; absent ones are taken from `run`, with its
    /// temperature of the first cycle.
    pub fn sampling_to_proto(&self, run: &SamplingSpec) -> v1::Sampling {
        let v1::Sampling { temperature, top_k, top_p, max_new_tokens } = run.into();
        let own = &self.sampling;
        v1::Sampling {
            temperature: own.temperature.unwrap_or(temperature),
            top_k: own.top_k.unwrap_or(top_k),
            top_p: own.top_p.unwrap_or(top_p),
            max_new_tokens: own.max_new_tokens.unwrap_or(max_new_tokens),
        }
    }

    /// `run` holds the sampling settings of the run.
    pub(crate) fn check_fields(&self, field: &str, run: &SamplingSpec) -> FieldResult {
        let at = |name: &str| format!("{field}.{name}");
        self.verifier.check_fields(&at("verifier"))?;
        check_count(&at("samples_per_prompt"), self.samples_per_prompt, 1, 4096)?;
        for k in &self.pass_at {
            check_count(&at("pass_at"), *k, 1, self.samples_per_prompt)?;
        }
        let v1::Sampling { temperature, top_p, max_new_tokens, .. } = self.sampling_to_proto(run);
        check_range(&at("sampling.temperature"), temperature, 0.0, 10.0)?;
        check_range(&at("sampling.top_p"), top_p, 1e-6, 1.0)?;
        check_count(&at("sampling.max_new_tokens"), max_new_tokens, 1, 32_768)?;
        ensure_field(
            temperature > 0.0 || self.samples_per_prompt == 1,
            &at("samples_per_prompt"),
            "must be 1 at temperature 0, where all samples of a prompt are the same",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(yaml: &str) -> SuiteSpec {
        serde_saphyr::from_str(yaml).unwrap()
    }

    fn refused(yaml: &str) -> String {
        let suite = suite(yaml);
        let checked = suite.resolve_kind("e").and_then(|measure| match measure {
            SuiteMeasure::Text(text) => text.check_fields("e"),
            SuiteMeasure::Prompts(prompts) => prompts.check_fields("e", &SamplingSpec::default()),
        });
        checked.unwrap_err().to_string()
    }

    #[test]
    fn a_prompt_suite_samples_as_the_run_does_but_for_what_it_says() {
        let yaml = "{name: a, prompts: a.jsonl, verifier: {numeric: {}}, samples_per_prompt: 4, \
                    sampling: {temperature: 0.2}}";
        let suite = suite(yaml);
        let Ok(SuiteMeasure::Prompts(prompts)) = suite.resolve_kind("e") else { panic!("prompts") };
        let run: SamplingSpec = serde_saphyr::from_str("{top_k: 7, max_new_tokens: 9}").unwrap();
        assert_eq!(prompts.check_fields("e", &run), Ok(()));
        assert_eq!(prompts.pass_at, [1, 4]);
        let sampling = prompts.sampling_to_proto(&run);
        assert_eq!((sampling.temperature, sampling.top_k, sampling.max_new_tokens), (0.2, 7, 9));
    }

    #[test]
    fn a_suite_is_of_a_text_or_of_prompts() {
        for (yaml, said) in [
            ("{name: a}", "field e: write exactly one of text"),
            ("{name: a, text: a.txt, prompts: a.jsonl}", "field e: write exactly one of text"),
            ("{name: a, text: a.txt, pass_at: [1]}", "field e.pass_at: is for suites of prompts"),
            ("{name: a, prompts: a.jsonl, n_ctx: 64}", "field e.n_ctx: is for suites of texts"),
            ("{name: a, prompts: a.jsonl}", "field e.verifier: name the verifier"),
            ("{name: a, prompts: a.jsonl, verifier: {}}", "field e.verifier: write exactly one"),
            (
                "{name: a, prompts: a.jsonl, verifier: {exact: {}}, pass_at: [2]}",
                "field e.pass_at: must be from 1 to 1, not 2",
            ),
            (
                "{name: a, prompts: a.jsonl, verifier: {exact: {}}, samples_per_prompt: 2, \
                 sampling: {temperature: 0}}",
                "field e.samples_per_prompt: must be 1 at temperature 0",
            ),
            ("{name: a, text: a.txt, n_ctx: 4}", "field e.n_ctx: must be from 8"),
        ] {
            let found = refused(yaml);
            assert!(found.starts_with(said), "{yaml}: {found}");
        }
        assert!(serde_saphyr::from_str::<SuiteSpec>("{name: a, promts: a}").is_err());
    }
}
