//! A model that a spec names: the base of a run, or a teacher.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::field_checks::{FieldResult, ensure_field};

/// A model. Exactly one of `checkpoint`, `channel`, `model` and `init` is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(
    title = "Model",
    extend("oneOf" = [
        { "required": ["checkpoint"] },
        { "required": ["channel"] },
        { "required": ["model"] },
        { "required": ["init"] },
    ])
)]
pub struct BaseSpec {
    /// `RUN` for the best checkpoint of a run, `RUN/newest`, `RUN/CYCLE` or `RUN/CYCLE/STEP`.
    #[schemars(example = "base-1", example = "raft-1/3/200")]
    pub checkpoint: Option<String>,
    /// The model that a channel names now; its adapter is trained further.
    pub channel: Option<String>,
    /// A Hugging Face model: a local directory (as `save_pretrained` writes it, or of the hub's
    /// cache), `org/name[@revision]` on the hub, or `store:PATH` for a directory in the fleet's
    /// store.
    #[schemars(example = "Qwen/Qwen2.5-0.5B-Instruct", example = "store:models/mine")]
    pub model: Option<String>,
    /// An adapter of `model` in PEFT's format, which a RAFT run trains further: a local directory,
    /// or `org/name[@revision]` on the hub.
    pub adapter: Option<String>,
    /// The files of a model outside the store that are copied into it. Default: `auto`.
    pub upload: Option<UploadSpec>,
    /// A new model with random weights.
    pub init: Option<InitSpec>,
}

/// The choice of a model's files that are copied into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UploadSpec {
    /// The files that the store does not contain.
    Auto,
    /// All files, including those that the store contains.
    Always,
    /// No files, only their digests. Agents find the files on their own machines or download them
    /// from the hub.
    Never,
}

/// The files of a new model with random weights.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InitSpec {
    /// The shape of the model: a `config.json`.
    #[schemars(example = "model/config.json")]
    pub config: String,
    /// The tokenizer: a `tokenizer.json`.
    #[schemars(example = "model/tokenizer.json")]
    pub tokenizer: String,
    /// A `tokenizer_config.json`, with a chat template if the model is used for chat.
    pub tokenizer_config: Option<String>,
}

impl InitSpec {
    /// Returns, for each file that the section names: its field in the spec, its path as written
    /// there, and its file name in a model's directory.
    pub fn file_fields(&self) -> impl Iterator<Item = (&'static str, &str, &'static str)> {
        let settings = self.tokenizer_config.as_deref();
        let settings =
            settings.map(|file| ("base.init.tokenizer_config", file, "tokenizer_config.json"));
        let needed = [
            ("base.init.config", self.config.as_str(), "config.json"),
            ("base.init.tokenizer", self.tokenizer.as_str(), "tokenizer.json"),
        ];
        needed.into_iter().chain(settings)
    }
}

impl BaseSpec {
    /// Requires exactly one source of the base, and `upload` only with a model outside the store.
    pub(crate) fn check_fields(&self, field: &str) -> FieldResult {
        let named = [
            self.checkpoint.is_some(),
            self.channel.is_some(),
            self.model.is_some(),
            self.init.is_some(),
        ];
        let one = named.into_iter().filter(|named| *named).count() == 1;
        ensure_field(one, field, "write exactly one of checkpoint, channel, model and init")?;
        ensure_field(
            self.adapter.is_none() || self.model.is_some() && field == "base",
            &format!("{field}.adapter"),
            "applies only to base.model: the model that it belongs to",
        )?;
        let uploads = self.model.as_ref().is_some_and(|model| !model.starts_with("store:"));
        ensure_field(
            self.upload.is_none() || uploads,
            &format!("{field}.upload"),
            "applies only to a model that is not in the store yet; omit it",
        )
    }
}
