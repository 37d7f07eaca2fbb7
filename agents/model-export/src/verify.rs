//! Compares an exported model with the trained one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use engine::{CanaryError, CanaryText, MatrixDtype, ModelLoadError, load_model};
use formats::{
    ConversionDtype, ModelConfig, ModelConfigError,
    convert::{self, ConvertError},
};
use llama::{
    ChunkSelection, InstallationError, LlamaInstallation, LlamaPerplexity, LlamaPerplexityError,
    PerplexityRequest, PerplexityRunner, ProcessEnvironment,
};

/// A text of several kinds: prose, sums, code and a list.
const TEXT: &str = include_str!("sample.txt");
/// The tokens that are scored.
const SCORED_TOKENS: usize = 96;
/// Tokens of a chunk that llama.cpp scores, and the number of chunks.
const CHUNK_TOKENS: usize = 64;
const CHUNKS: usize = 4;
/// Longest time without output of llama.cpp, enough for a chunk of any model.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// The reason why an exported model could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("read the base's config.json")]
    Config(#[from] ModelConfigError),
    #[error("llama.cpp compares the exported model, because {reason}")]
    Absent {
        reason: &'static str,
        #[source]
        source: InstallationError,
    },
    #[error("load the model to compare with")]
    Load(#[from] Box<ModelLoadError>),
    #[error("score the sample text")]
    Score(#[from] Box<CanaryError>),
    #[error("convert the model to compare with")]
    Convert(#[from] Box<ConvertError>),
    #[error("score the sample text with llama.cpp")]
    Llama(#[from] LlamaPerplexityError),
    #[error("write the sample text")]
    Text(#[from] io::Error),
}

/// The program that scores a text with the trained and with the exported model.
#[derive(Debug)]
pub(crate) enum ExportComparison {
    /// The log-probability of each token, by the embedded engine.
    Embedded,
    /// The mean likelihood of each chunk, by llama.cpp: with the base's GGUF file and the adapter's
    /// on one side.
    LlamaCpp(Box<PerplexityRunner>),
}

impl ExportComparison {
    /// Chooses the embedded engine if it loads both models, else llama.cpp, which must be installed.
    /// `is_gguf` is true if the exported model is a GGUF file.
    pub(crate) fn choose_program(
        base: &Path,
        is_gguf: bool,
        llama_cpp: Option<&Path>,
    ) -> Result<Self, VerifyError> {
        let reason = if ModelConfig::from_dir(base)?.require_embedded(base).is_err() {
            "the embedded engine does not compute this architecture"
        } else if is_gguf && !convert::has_byte_level_tokenizer(base).map_err(Box::new)? {
            "the embedded engine does not read this tokenizer from GGUF files"
        } else {
            return Ok(Self::Embedded);
        };
        let runner = LlamaInstallation::find_installation(llama_cpp)
            .and_then(|installation| perplexity_runner(&installation));
        let runner = runner.map_err(|source| VerifyError::Absent { reason, source })?;
        Ok(Self::LlamaCpp(Box::new(runner)))
    }

    /// Returns the distance of an exported directory or GGUF file from the trained model, in nats
    /// per token. GGUF files that are only needed here are written into `scratch`.
    pub(crate) fn measure_distance(
        &self,
        (base, adapter): (&Path, Option<&Path>),
        exported: &Path,
        scratch: &Path,
    ) -> Result<f64, VerifyError> {
        let runner = match self {
            Self::Embedded => return compare_logprobs((base, adapter), exported),
            Self::LlamaCpp(runner) => runner,
        };
        let convert = |model: &Path, name: &str| -> Result<PathBuf, VerifyError> {
            let file = scratch.join(name);
            convert::convert_model(model, &file, ConversionDtype::Bf16, &mut |_, _| ())
                .map_err(Box::new)?;
            Ok(file)
        };
        let trained = convert(base, "base.gguf")?;
        let lora = adapter.map(|adapter| -> Result<PathBuf, VerifyError> {
            let file = scratch.join("adapter.gguf");
            convert::convert_lora(base, adapter, &file, ConversionDtype::F32).map_err(Box::new)?;
            Ok(file)
        });
        let lora = lora.transpose()?;
        let other = match exported.is_dir() {
            true => convert(exported, "exported.gguf")?,
            false => exported.to_owned(),
        };
        compare_likelihoods(runner, (&trained, lora.as_deref()), &other, scratch)
    }
}

/// Returns how llama.cpp measures likelihoods: on the CPU.
pub(crate) fn perplexity_runner(
    installation: &LlamaInstallation,
) -> Result<PerplexityRunner, InstallationError> {
    let environment = ProcessEnvironment::new(&Default::default(), &[]);
    let program = installation.perplexity_path();
    Ok(PerplexityRunner {
        options: LlamaInstallation::read_options(&program, &environment)?,
        program,
        device: None,
        environment,
        mmap: true,
        threads: thread::available_parallelism().map_or(1, std::num::NonZero::get),
        silence: SILENCE_MAX,
        repeat: false,
    })
}

/// Returns the mean distance of the log-probabilities that two models give to the tokens of a text,
/// in nats per token.
fn compare_logprobs(
    (base, adapter): (&Path, Option<&Path>),
    exported: &Path,
) -> Result<f64, VerifyError> {
    let one = score_text(base, adapter)?;
    let other = score_text(exported, None)?;
    if one.len() != other.len() {
        // Another tokenizer: nothing can be compared.
        return Ok(f64::INFINITY);
    }
    let distances = one.iter().zip(&other).map(|(one, other)| f64::from((one - other).abs()));
    Ok(distances.sum::<f64>() / one.len() as f64)
}

fn score_text(base: &Path, adapter: Option<&Path>) -> Result<Vec<f32>, VerifyError> {
    let loaded = load_model(base, adapter, "cpu", MatrixDtype::F32);
    let (model, tokenizer) = loaded.map_err(Box::new)?;
    let canary = CanaryText::from_text(&tokenizer, model.model_config(), TEXT, SCORED_TOKENS);
    let canary = canary.map_err(Box::new)?;
    Ok(canary.score_tokens(&model).map_err(Box::new)?)
}

/// Returns the distance of the negative log-likelihoods that llama.cpp measures for a GGUF file
/// with or without an adapter and for another GGUF file, in nats per token.
pub(crate) fn compare_likelihoods(
    runner: &PerplexityRunner,
    one: (&Path, Option<&Path>),
    other: &Path,
    scratch: &Path,
) -> Result<f64, VerifyError> {
    let text = scratch.join("sample.txt");
    // Long enough for any tokenizer.
    fs::write(&text, TEXT.repeat(4))?;
    let measure = |(base, adapter): (&Path, Option<&Path>)| {
        let request = PerplexityRequest {
            base,
            adapter,
            text: &text,
            n_ctx: CHUNK_TOKENS,
            chunks: ChunkSelection::First(CHUNKS),
            exact: false,
        };
        runner.measure_perplexity(&request, &mut |_, _| ())
    };
    Ok(mean_distance(&measure(one)?, &measure((other, None))?))
}

/// Returns the mean over the chunks of the difference of their mean log-likelihoods, so that errors
/// of opposite sign in two chunks add up. If llama.cpp lost the row of a chunk, this is the
/// difference over the whole text.
fn mean_distance(one: &LlamaPerplexity, other: &LlamaPerplexity) -> f64 {
    let chunks = one.chunk_nlls.len();
    if chunks == 0 || chunks != other.chunk_nlls.len() {
        return (one.mean_nll - other.mean_nll).abs();
    }
    let pairs = one.chunk_nlls.iter().zip(&other.chunk_nlls);
    pairs.map(|(one, other)| (one - other).abs()).sum::<f64>() / chunks as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_without_its_adapter_is_far_from_the_trained_one() {
        let golden = golden::small_set();
        let (base, adapter) = (golden.model_path("qwen2-tiny"), golden.adapter_path("qwen2-r8-qv"));
        let distance = compare_logprobs((&base, Some(&adapter)), &base).unwrap();
        assert!(distance > 0.15, "{distance}: above what any conversion may differ by");
        assert!(compare_logprobs((&base, None), &base).unwrap() < 1e-6);
    }

    #[test]
    fn errors_of_opposite_sign_in_two_chunks_do_not_cancel() {
        let scored = |chunk_nlls: &[f64], mean_nll| LlamaPerplexity {
            perplexity: f64::exp(mean_nll),
            stderr: 0.1,
            mean_nll,
            chunk_nlls: chunk_nlls.to_vec(),
            chunks: 2,
            tokens: 62,
        };
        let trained = scored(&[5.0, 4.0], 4.5);
        let distance = mean_distance(&trained, &scored(&[5.75, 3.25], 4.5));
        assert_eq!(distance, 0.75, "the means are equal");
        assert_eq!(mean_distance(&trained, &trained), 0.0);
        let lost = scored(&[], 4.75);
        assert_eq!(mean_distance(&trained, &lost), 0.25, "of the whole text");
    }

    #[test]
    fn llama_cpp_compares_what_the_embedded_engine_does_not_load() {
        let golden = golden::small_set();
        let choose = |name: &str, is_gguf| {
            let nowhere = Some(Path::new("/nonexistent"));
            ExportComparison::choose_program(&golden.model_path(name), is_gguf, nowhere)
        };
        for is_gguf in [false, true] {
            assert!(matches!(choose("qwen2-tiny", is_gguf), Ok(ExportComparison::Embedded)));
            let absent = choose("qwen3moe-tiny", is_gguf).unwrap_err().to_string();
            assert!(absent.contains("does not compute this architecture"), "{absent}");
        }
        assert!(matches!(choose("mistral-tiny", false), Ok(ExportComparison::Embedded)));
        let absent = choose("mistral-tiny", true).unwrap_err().to_string();
        assert!(absent.contains("does not read this tokenizer"), "{absent}");
    }
}
