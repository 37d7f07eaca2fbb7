//! The pairs of an adapter, held against its base.

use std::collections::BTreeMap;
use std::path::Path;

use super::{ConvertError, names, rows};
use crate::peft::{MAX_RANK, PREFIX, Settings, TENSOR_FILE};
use crate::safetensors::{File, Located, Weights};
use crate::{Config, Module, weight_files};

/// What a pair changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Embedding,
    Layer(usize, Module),
    Output,
}

impl Place {
    fn parse(path: &str) -> Option<Self> {
        match path {
            "model.embed_tokens" => return Some(Self::Embedding),
            "lm_head" => return Some(Self::Output),
            _ => {}
        }
        let (layer, module) = path.strip_prefix("model.layers.")?.split_once('.')?;
        let module = Module::ALL.into_iter().find(|known| known.path() == module)?;
        Some(Self::Layer(layer.parse().ok()?, module))
    }

    pub(super) fn gguf(self) -> String {
        match self {
            Self::Embedding => names::TOKEN_EMBEDDING.into(),
            Self::Layer(layer, module) => names::module(layer, module, "weight"),
            Self::Output => names::OUTPUT.into(),
        }
    }

    /// (outputs, inputs); none where the base has nothing of the kind.
    fn shape(self, config: &Config) -> Option<(usize, usize)> {
        match self {
            Self::Embedding => Some((config.hidden_size, config.vocab_size)),
            Self::Layer(layer, module) => (layer < config.layers).then(|| module.shape(config)),
            Self::Output => Some((config.vocab_size, config.hidden_size)),
        }
    }
}

/// The place gains `scale * B A`. `a` is `[rank, inputs]`, `b` is `[outputs, rank]`.
pub(super) struct Pair {
    pub(super) place: Place,
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) rank: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) scale: f64,
}

impl Pair {
    /// What `adapter.lora.alpha` would have to be for this pair alone.
    pub(super) fn alpha(&self) -> f32 {
        (self.scale * self.rank as f64) as f32
    }
}

/// In the order of the model. All that the file holds is understood or refused.
pub(super) fn read(
    base: &Path,
    adapter: &Path,
    config: &Config,
    settings: &Settings,
) -> Result<Vec<Pair>, ConvertError> {
    let file = File::open(&adapter.join(TENSOR_FILE))?;
    let mut halves = BTreeMap::<&str, [Option<Located<'_>>; 2]>::new();
    let mut of_base = Vec::new();
    for name in file.entries().keys() {
        let Some(tensor) = file.get(name) else { continue };
        match Part::of(name) {
            Part::Half(path, index) => halves.entry(path).or_default()[index] = Some(tensor),
            Part::Base(path) => of_base.push((path, tensor)),
            Part::Refused(what) => return Err(refused(&tensor, what)),
        }
    }
    let mut pairs = Vec::with_capacity(halves.len());
    for (path, halves) in halves {
        match halves {
            [Some(a), Some(b)] => pairs.push(pair(path, &a, &b, config, settings)?),
            [Some(half), None] => return Err(refused(&half, "has no lora_B beside it")),
            [None, Some(half)] => return Err(refused(&half, "has no lora_A beside it")),
            [None, None] => {}
        }
    }
    pairs.sort_by_key(|pair| pair.place);
    if !of_base.is_empty() {
        check_untouched(base, &of_base)?;
    }
    Ok(pairs)
}

enum Part<'a> {
    /// Of the module of this path: 0 is A, 1 is B.
    Half(&'a str, usize),
    /// The weights of the base itself, which PEFT adds where their module has a pair.
    Base(&'a str),
    Refused(&'static str),
}

impl<'a> Part<'a> {
    fn of(name: &'a str) -> Self {
        let Some(rest) = name.strip_prefix(PREFIX) else {
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

fn refused(tensor: &Located<'_>, what: impl Into<String>) -> ConvertError {
    ConvertError::Adapter {
        path: tensor.file.path().into(),
        name: tensor.name.into(),
        what: what.into(),
    }
}

fn pair(
    path: &str,
    a: &Located<'_>,
    b: &Located<'_>,
    config: &Config,
    settings: &Settings,
) -> Result<Pair, ConvertError> {
    const OTHER: &str = "was the adapter trained on another base?";
    let place = Place::parse(path);
    let shape = place.and_then(|place| Some((place, place.shape(config)?)));
    let Some((place, (outputs, inputs))) = shape else {
        return Err(refused(a, format!("belongs to nothing the base has; {OTHER}")));
    };
    if config.tied_embeddings && matches!(place, Place::Embedding | Place::Output) {
        return Err(refused(
            a,
            "changes one of the embedding and the output of a base that ties them \
             (tie_word_embeddings): llama.cpp or a merge would change both; train without it",
        ));
    }
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
            return Err(refused(a, what));
        }
    };
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(refused(a, format!("has rank {rank}, expected 1 to {MAX_RANK}")));
    }
    if rank != settings.rank_at(path) {
        let expected = settings.rank_at(path);
        return Err(refused(
            a,
            format!("has rank {rank}, but adapter_config.json says {expected}"),
        ));
    }
    let scale = settings.scale_at(path, rank);
    Ok(Pair { place, a: a.values()?, b: b.values()?, rank, inputs, outputs, scale })
}

/// PEFT adds the base's own weights, which is harmless unless training changed them.
fn check_untouched(base: &Path, tensors: &[(&str, Located<'_>)]) -> Result<(), ConvertError> {
    let weights = Weights::open(base, &weight_files(base)?)?;
    for (path, tensor) in tensors {
        let name = format!("{path}.weight");
        let same = match weights.find(&name) {
            Some(original) => rows::equal(original, *tensor)?,
            None => false,
        };
        if !same {
            return Err(refused(
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
