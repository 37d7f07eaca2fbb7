//! The file formats of models and adapters: Hugging Face directories, PEFT adapters, safetensors
//! and GGUF. The crate knows names, shapes and bytes. It computes nothing and needs no tensor
//! library.

mod architecture;
mod bounded_text;
mod config;
pub mod convert;
mod dtype;
pub mod gguf;
mod gguf_model;
mod layer_module;
pub mod memory_estimate;
mod model_dir;
mod model_outline;
pub mod peft;
pub mod safetensors;
mod tokenizer_parts;

pub use architecture::Architecture;
pub use bounded_text::read_text;
pub use config::{
    ArchitectureDetails, ExpertShape, GraniteFactors, LongRope, ModelConfig, ModelConfigError,
    RopeScaling,
};
pub use dtype::{ConversionDtype, FloatDtype};
pub use gguf::q8_0;
pub use gguf_model::{GgufModel, GgufModelError, is_gguf};
pub use layer_module::{LayerModule, LoraSpec};
pub use model_dir::{
    HubCache, ModelDirError, SIDE_FILES, SINGLE_WEIGHTS_FILE, find_model, list_weight_files,
    list_weight_names,
};
pub use model_outline::{ModelOutline, TokenLimits};
pub use tokenizer_parts::TokenizerParts;

/// Entry points for the fuzz targets in `tests/fuzz`.
#[doc(hidden)]
pub mod fuzzing {
    use crate::gguf::{GgufFile, GgufWriter, PlannedGgufTensor};

    /// Writes a GGUF file with the same fields and tensors, and zeros as data. Panics if memory
    /// refuses the buffer.
    pub fn rewrite_gguf(file: &GgufFile) -> Vec<u8> {
        let planned = |tensor: &crate::gguf::GgufTensor| PlannedGgufTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            kind: tensor.kind,
        };
        let planned: Vec<PlannedGgufTensor> = file.tensors.iter().map(planned).collect();
        // The writer always uses the default alignment, so the field is dropped.
        let fields = file.fields.iter().filter(|(name, _)| name != "general.alignment");
        let fields: Vec<_> = fields.cloned().collect();
        let writer = GgufWriter::start(Vec::new(), &fields, &planned);
        let mut writer = writer.expect("memory takes what it is given");
        for tensor in &planned {
            let zeros = vec![0; usize::try_from(tensor.byte_count()).unwrap_or(0)];
            writer.write(&zeros).expect("memory takes what it is given");
        }
        writer.into_output()
    }
}
