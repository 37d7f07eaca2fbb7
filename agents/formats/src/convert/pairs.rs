//! The LoRA pairs of an adapter, checked against its base.

use std::collections::BTreeMap;
use std::path::Path;

use super::tensor_mapping::{TensorMapping, map_tensors};
use super::{ConvertError, rows, tensor_names};
use crate::peft::{AdapterSettings, BASE_NAME_PREFIX, MAX_RANK, TENSOR_FILE};
use crate::safetensors::{LocatedTensor, ModelWeights, SafetensorsFile, text_part_name};
use crate::{ModelConfig, list_weight_files};

/// The matrix of the base that a pair changes.
#[derive(Debug, Clone)]
pub(super) struct PairTarget {
    /// Its place in the order of the model.
    index: usize,
    pub(super) gguf_name: String,
    /// The rows in a head, if they must be reordered.
    pub(super) head: Option<usize>,
    /// (outputs, inputs)
    weight_shape: (usize, usize),
}

impl PairTarget {
    /// Returns true for the embedding, whose pair is stored transposed.
    pub(super) fn is_embedding(&self) -> bool {
        self.gguf_name == tensor_names::TOKEN_EMBEDDING
    }
}

/// Lists the matrices of a base by the paths of their modules. Experts have no modules.
fn list_targets(config: &ModelConfig) -> BTreeMap<String, PairTarget> {
    let target = |(index, step): (usize, TensorMapping)| {
        let path = step.name.strip_suffix(".weight").filter(|_| step.experts.is_none())?.to_owned();
        let [rows, columns] = step.shape[..] else { return None };
        let mut target = PairTarget {
            index,
            gguf_name: step.gguf_name,
            head: step.head,
            weight_shape: (usize::try_from(rows).ok()?, usize::try_from(columns).ok()?),
        };
        if target.is_embedding() {
            // It takes a token and gives its row.
            target.weight_shape = (config.hidden_size, config.vocab_size);
        }
        Some((path, target))
    };
    map_tensors(config).into_iter().enumerate().filter_map(target).collect()
}

/// A pair adds `scale * B A` to its target; `a` is `[rank, inputs]`, `b` `[outputs, rank]`.
pub(super) struct LoraPair {
    pub(super) place: PairTarget,
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) rank: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) scale: f64,
}

impl LoraPair {
    /// Returns the alpha for which alpha / rank is the scale of this pair.
    pub(super) fn effective_alpha(&self) -> f32 {
        (self.scale * self.rank as f64) as f32
    }
}

/// Reads the pairs of an adapter, in the order of the model.
pub(super) fn read_pairs(
    base: &Path,
    adapter: &Path,
    config: &ModelConfig,
    settings: &AdapterSettings,
) -> Result<Vec<LoraPair>, ConvertError> {
    let file = SafetensorsFile::open(&adapter.join(TENSOR_FILE))?;
    let mut halves = BTreeMap::<&str, [Option<LocatedTensor<'_>>; 2]>::new();
    let mut of_base = Vec::new();
    for name in file.tensor_entries().keys() {
        let Some(tensor) = file.get(name) else { continue };
        match AdapterTensor::classify_name(name) {
            AdapterTensor::Half(path, index) => {
                halves.entry(path).or_default()[index] = Some(tensor);
            }
            AdapterTensor::Base(path) => of_base.push((path, tensor)),
            AdapterTensor::Refused(what) => return Err(adapter_error(&tensor, what)),
        }
    }
    let targets = list_targets(config);
    let mut pairs = Vec::with_capacity(halves.len());
    for (path, halves) in halves {
        match halves {
            [Some(a), Some(b)] => {
                let text_path = text_part_name(path);
                let text_path = text_path.as_deref().unwrap_or(path);
                check_untied(text_path, &a, config)?;
                pairs.push(build_pair(path, &a, &b, targets.get(text_path), settings)?);
            }
            [Some(half), None] => return Err(adapter_error(&half, "has no lora_B beside it")),
            [None, Some(half)] => return Err(adapter_error(&half, "has no lora_A beside it")),
            [None, None] => {}
        }
    }
    pairs.sort_by_key(|pair| pair.place.index);
    if !of_base.is_empty() {
        check_base_unchanged(base, &of_base)?;
    }
    Ok(pairs)
}

enum AdapterTensor<'a> {
    /// The path of the module, and 0 for A or 1 for B.
    Half(&'a str, usize),
    /// A weight of the base itself, which PEFT adds if its module has a pair.
    Base(&'a str),
    Refused(&'static str),
}

impl<'a> AdapterTensor<'a> {
    fn classify_name(name: &'a str) -> Self {
        let Some(rest) = name.strip_prefix(BASE_NAME_PREFIX) else {
            return Self::Refused("is not PEFT's: names begin with `base_model.model.`");
        };
        let ends = [
            (".lora_A.weight", 0),
            (".lora_B.weight", 1),
            (".lora_embedding_A", 0),
            (".lora_embedding_B", 1),
        ];
        let half = |(end, index): (&str, usize)| Some((rest.strip_suffix(end)?, index));
        if let Some((path, index)) = ends.into_iter().find_map(half) {
            return Self::Half(path, index);
        }
        if let Some(path) = rest.strip_suffix(".base_layer.weight") {
            return Self::Base(path);
        }
        Self::Refused(match rest {
            _ if rest.contains("lora_magnitude_vector") => {
                "is DoRA's (use_dora), which is not supported; train without it"
            }
            _ if rest.ends_with(".bias") => {
                "is a bias, which is not supported; train with bias=\"none\""
            }
            _ => {
                "is a whole weight (modules_to_save, or new tokens), which is not supported; merge \
                 the adapter with PEFT (`merge_and_unload`) and use the merged model"
            }
        })
    }
}

fn adapter_error(tensor: &LocatedTensor<'_>, what: impl Into<String>) -> ConvertError {
    ConvertError::Adapter {
        path: tensor.file.file_path().into(),
        name: tensor.name.into(),
        what: what.into(),
    }
}

/// Fails if a pair changes one of the embedding and the output of a base that ties them.
fn check_untied(
    path: &str,
    a: &LocatedTensor<'_>,
    config: &ModelConfig,
) -> Result<(), ConvertError> {
    if config.tied_embeddings && matches!(path, "model.embed_tokens" | "lm_head") {
        return Err(adapter_error(
            a,
            "changes one of the embedding and the output of a base that ties them \
             (tie_word_embeddings): llama.cpp or a merge would change both; train without it",
        ));
    }
    Ok(())
}

fn build_pair(
    path: &str,
    a: &LocatedTensor<'_>,
    b: &LocatedTensor<'_>,
    place: Option<&PairTarget>,
    settings: &AdapterSettings,
) -> Result<LoraPair, ConvertError> {
    const OTHER: &str = "was the adapter trained on another base?";
    let Some(place) = place.cloned() else {
        return Err(adapter_error(a, format!("matches no module of the base; {OTHER}")));
    };
    let (outputs, inputs) = place.weight_shape;
    let rank = match (a.entry.shape.as_slice(), b.entry.shape.as_slice()) {
        ([rank, a], [b, same]) if rank == same && (*a, *b) == (inputs as u64, outputs as u64) => {
            *rank as usize
        }
        _ => {
            let (a_shape, b_shape) = (&a.entry.shape, &b.entry.shape);
            let what = format!(
                "has shape {a_shape:?} and its lora_B {b_shape:?}, but the base wants \
                 [rank, {inputs}] and [{outputs}, rank]; {OTHER}"
            );
            return Err(adapter_error(a, what));
        }
    };
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(adapter_error(a, format!("has rank {rank}, expected 1 to {MAX_RANK}")));
    }
    if rank != settings.rank_at(path) {
        let expected = settings.rank_at(path);
        return Err(adapter_error(
            a,
            format!("has rank {rank}, but adapter_config.json says {expected}"),
        ));
    }
    let scale = settings.scale_at(path, rank);
    Ok(LoraPair { place, a: a.read_values()?, b: b.read_values()?, rank, inputs, outputs, scale })
}

/// Checks that base weights in the adapter are those of the base. PEFT adds them, which is harmless
/// unless training changed them.
fn check_base_unchanged(
    base: &Path,
    tensors: &[(&str, LocatedTensor<'_>)],
) -> Result<(), ConvertError> {
    let weights = ModelWeights::open(base, &list_weight_files(base)?)?;
    for (path, tensor) in tensors {
        let name = format!("{path}.weight");
        let text_name = text_part_name(&name);
        let same = match weights.find_tensor(text_name.as_deref().unwrap_or(&name)) {
            Some(original) => rows::has_equal_values(original, *tensor)?,
            None => false,
        };
        if !same {
            return Err(adapter_error(
                tensor,
                format!(
                    "differs from the base's `{name}` (new tokens, or another base), which is not \
                     supported; merge the adapter with PEFT (`merge_and_unload`) and use the \
                     merged model"
                ),
            ));
        }
    }
    Ok(())
}
