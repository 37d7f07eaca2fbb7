//! The files models and adapters come in: Hugging Face directories, PEFT adapters, GGUF. Knows
//! names, shapes and bytes; computes nothing and needs no tensor library.

mod config;
pub mod convert;
mod element;
pub mod gguf;
mod gguf_model;
mod model_dir;
mod module;
pub mod peft;
pub mod safetensors;

pub use config::{Architecture, Config, ConfigError, RopeScaling};
pub use element::Element;
pub use gguf_model::{GgufModel, GgufModelError, is_gguf};
pub use model_dir::{
    DirError, HubCache, SIDE_FILES, SINGLE_FILE, find_model, weight_files, weight_names,
};
pub use module::{LoraSpec, Module};

/// For `tests/fuzz` alone.
#[doc(hidden)]
pub mod fuzzing {
    use crate::gguf::{File, Planned, Writer};

    /// What a file holds, written anew, with zeros for data.
    pub fn gguf_again(file: &File) -> Vec<u8> {
        let planned = |tensor: &crate::gguf::Tensor| Planned {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            kind: tensor.kind,
        };
        let planned: Vec<Planned> = file.tensors.iter().map(planned).collect();
        // Ours are aligned as the format has it unless told otherwise.
        let fields = file.fields.iter().filter(|(name, _)| name != "general.alignment");
        let fields: Vec<_> = fields.cloned().collect();
        let writer = Writer::start(Vec::new(), &fields, &planned);
        let mut writer = writer.expect("memory takes what it is given");
        for tensor in &planned {
            let zeros = vec![0; usize::try_from(tensor.bytes()).unwrap_or(0)];
            writer.write(&zeros).expect("memory takes what it is given");
        }
        writer.finish()
    }
}
