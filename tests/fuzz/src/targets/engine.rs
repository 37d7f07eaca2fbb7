//! Model and adapter directories with one arbitrary file.

use std::{
    path::Path,
    sync::{Mutex, OnceLock, PoisonError},
};

use engine::{
    Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec, ModelConfig, ModelTokenizer,
    ScratchShape, write_scratch_model,
};
use tempfile::TempDir;

/// The smallest possible model, so that most of an input is relevant.
const SHAPE: ScratchShape = ScratchShape {
    hidden_size: 2,
    intermediate_size: 2,
    layers: 1,
    heads: 1,
    kv_heads: 1,
    max_positions: 16,
};

const TEXT: &str = "2+2=4, é <|endoftext|>\n";

/// A complete model with an adapter. The input replaces one file.
struct Directory {
    directory: TempDir,
    config: ModelConfig,
}

impl Directory {
    fn create() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = write_scratch_model(directory.path(), &SHAPE).expect("files");
        let model = LanguageModel::init_random(config.clone(), 1, &Device::Cpu).expect("a model");
        model.save_directory(directory.path()).expect("files");
        let modules = [LayerModule::Query, LayerModule::Down].into();
        let spec = LoraSpec { rank: 1, alpha: 2.0, modules, rslora: false };
        let adapter = LoraAdapter::new(&spec, &config, 1).expect("an adapter");
        adapter.save_peft(directory.path(), "base").expect("files");
        Self { directory, config }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn write_input(&self, file: &str, input: &[u8]) -> &Path {
        let path = self.path().join(file);
        // Overwriting a file would wait for the disk. The file may not exist yet.
        let _ = std::fs::remove_file(&path);
        std::fs::write(path, input).expect("a file");
        self.path()
    }
}

/// A directory per target. It is created once, and holds one input at a time.
macro_rules! directory {
    () => {{
        static DIRECTORY: OnceLock<Mutex<Directory>> = OnceLock::new();
        let directory = DIRECTORY.get_or_init(|| Mutex::new(Directory::create()));
        directory.lock().unwrap_or_else(PoisonError::into_inner)
    }};
}

/// `config.json`. An accepted configuration that the engine computes must be written with the same
/// meaning.
pub(super) fn configs(input: &[u8]) {
    let path = Path::new("config.json");
    let Ok(map) = serde_json::from_slice(input) else { return };
    let Ok(config) = ModelConfig::from_json(&map, path) else { return };
    if config.require_embedded(Path::new("")).is_err() {
        return;
    }
    let written = config.to_json();
    let parsed = ModelConfig::from_json(written.as_object().expect("an object"), path);
    assert_eq!(parsed.ok(), Some(config));
}

/// `model.safetensors`.
pub(super) fn weights(input: &[u8]) {
    let directory = directory!();
    let _ =
        LanguageModel::load_f32(directory.write_input("model.safetensors", input), &Device::Cpu);
}

/// `model.safetensors.index.json`.
pub(super) fn shards(input: &[u8]) {
    let directory = directory!();
    let _ = LanguageModel::load_f32(
        directory.write_input("model.safetensors.index.json", input),
        &Device::Cpu,
    );
}

/// `tokenizer.json`, and the encoding of some texts.
pub(super) fn tokenizers(input: &[u8]) {
    let directory = directory!();
    let Ok(tokenizer) =
        ModelTokenizer::load_tokenizer(directory.write_input("tokenizer.json", input))
    else {
        return;
    };
    let _ = tokenizer.encode_continuation(TEXT);
    if let Ok(tokens) = tokenizer.encode_prompt(TEXT) {
        let _ = tokenizer.decode_tokens(&tokens);
    }
    let _ = tokenizer.decode_tokens(&[0, 1, 256, u32::MAX]);
}

/// `adapter_config.json`.
pub(super) fn adapters(input: &[u8]) {
    let directory = directory!();
    load_adapter(directory.write_input("adapter_config.json", input), &directory.config);
}

/// `adapter_model.safetensors`.
pub(super) fn pairs(input: &[u8]) {
    let directory = directory!();
    load_adapter(directory.write_input("adapter_model.safetensors", input), &directory.config);
}

fn load_adapter(path: &Path, config: &ModelConfig) {
    if let Ok(adapter) = LoraAdapter::load_peft(path, config) {
        let model = LanguageModel::load_f32(path, &Device::Cpu).expect("its files are our own");
        let _ = model.with_adapter(&adapter);
    }
}
