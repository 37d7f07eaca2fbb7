//! Compares an exported model with the one that it was made of.

use std::path::Path;

use engine::{CanaryError, CanaryText, MatrixDtype, ModelLoadError, load_model};
use llama::{ChunkSelection, LlamaPerplexityError, PerplexityRequest, PerplexityRunner};

/// A text of several kinds: prose, sums, code and a list.
const TEXT: &str = include_str!("sample.txt");
/// The tokens that are scored.
const SCORED_TOKENS: usize = 96;
/// Tokens of a chunk that llama.cpp scores, and the number of chunks.
const CHUNK_TOKENS: usize = 64;
const CHUNKS: usize = 4;

/// The reason why an exported model could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("load the model to compare with")]
    Load(#[from] Box<ModelLoadError>),
    #[error("score the sample text")]
    Score(#[from] Box<CanaryError>),
    #[error("score the sample text with llama.cpp")]
    Llama(#[from] LlamaPerplexityError),
    #[error("write the sample text")]
    Text(#[from] std::io::Error),
}

/// Returns the mean distance of the log-probabilities that two models give to the tokens of a text,
/// in nats per token.
pub(crate) fn compare_logprobs(
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

/// Returns the distance of the mean negative log-likelihoods that llama.cpp measures for two GGUF
/// files, in nats per token.
pub(crate) fn compare_likelihoods(
    runner: &PerplexityRunner,
    one: &Path,
    other: &Path,
    scratch: &Path,
) -> Result<f64, VerifyError> {
    let text = scratch.join("sample.txt");
    // Long enough for any tokenizer.
    std::fs::write(&text, TEXT.repeat(4))?;
    let measure = |base: &Path| {
        let request = PerplexityRequest {
            base,
            adapter: None,
            text: &text,
            n_ctx: CHUNK_TOKENS,
            chunks: ChunkSelection::First(CHUNKS),
            exact: false,
        };
        runner.measure_perplexity(&request, &mut |_, _| ()).map(|found| found.mean_nll)
    };
    Ok((measure(one)? - measure(other)?).abs())
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
}
