//! Specs and data of small runs: a byte-level model and a few documents and prompts.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

/// A directory with the files of a test's runs.
pub struct SpecFiles {
    directory: PathBuf,
}

/// The amount of sampling in a RAFT run.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    pub prompts: u32,
    pub per_prompt: u32,
    pub max_new_tokens: u32,
    pub cycles: u32,
}

impl SpecFiles {
    pub fn create(directory: &Path) -> Self {
        let directory = directory.join("specs");
        std::fs::create_dir_all(&directory).expect("a directory");
        let files = Self { directory };
        files.write("config.json", &config().to_string());
        files.write("tokenizer.json", &tokenizer().to_string());
        let pairs = (10..60).map(|n| (format!("{n}+1="), (n + 1).to_string()));
        let line = |(prompt, completion): (String, String)| {
            format!("{}\n", json!({ "prompt": prompt, "completion": completion }))
        };
        files.write("data.jsonl", &pairs.map(line).collect::<String>());
        let text: String = (10..90).map(|n| format!("{n}+1={}\n", n + 1)).collect();
        files.write("heldout.txt", &text);
        files
    }

    /// Gives models with random weights a size of 3 MB instead of 100 kB.
    pub fn enlarge_model(&self) {
        let mut config = config();
        config["intermediate_size"] = json!(4096);
        self.write("config.json", &config.to_string());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("a file");
        path
    }

    /// Writes a loadable model directory with arbitrary weights.
    pub fn write_model(&self) -> PathBuf {
        let directory = self.path("model");
        std::fs::create_dir_all(&directory).expect("a directory");
        for name in ["config.json", "tokenizer.json"] {
            std::fs::copy(self.path(name), directory.join(name)).expect(name);
        }
        // Equal weights would have no gradient.
        let weight = |n: u16| f32::from(n.wrapping_mul(40_503) % 2048) / 10_240.0 - 0.1;
        let weights: Vec<u8> = (0..260 * 32).flat_map(|n| weight(n).to_le_bytes()).collect();
        let view = |(name, shape): (String, Vec<usize>)| {
            let bytes = &weights[..4 * shape.iter().product::<usize>()];
            (name, TensorView::new(Dtype::F32, shape, bytes).expect("as many bytes as its shape"))
        };
        let file = directory.join("model.safetensors");
        safetensors::serialize_to_file(tensor_shapes().into_iter().map(view), None, &file)
            .expect("a file");
        directory
    }

    /// Writes the spec of an SFT run with random weights.
    pub fn write_sft_spec(&self, steps: u32, save_every: u32) -> PathBuf {
        let spec = format!(
            "\
name: base
seed: 5
base: {{ init: {{ config: config.json, tokenizer: tokenizer.json }} }}
evals: [{{ name: heldout, text: heldout.txt, n_ctx: 64 }}]
sft:
  data: data.jsonl
  training: {{ max_steps: {steps}, batch_size: 16, learning_rate: 0.003, max_tokens: 64, save_every: {save_every} }}
"
        );
        self.write("sft.yaml", &spec)
    }

    /// Writes the spec of an SFT run that trains an adapter for a model directory.
    pub fn write_adapter_spec(&self, model: &Path, steps: u32, save_every: u32) -> PathBuf {
        let model = model.display();
        let spec = format!(
            "\
name: adapter
seed: 5
base: {{ model: {model} }}
evals: [{{ name: heldout, text: heldout.txt, n_ctx: 64 }}]
sft:
  data: data.jsonl
  training: {{ max_steps: {steps}, batch_size: 16, learning_rate: 0.003, max_tokens: 64, save_every: {save_every} }}
  lora: {{ r: 4, alpha: 8, target_modules: [q_proj, v_proj] }}
"
        );
        self.write("adapter.yaml", &spec)
    }

    /// Writes the spec of a RAFT run. Its verifier passes each completion that contains a digit.
    pub fn write_raft_spec(&self, base: &str, sampling: Sampling) -> PathBuf {
        let Sampling { prompts, per_prompt, max_new_tokens, cycles } = sampling;
        let mut lines = String::new();
        for n in 0..prompts {
            let line = json!({ "id": format!("p{n}"), "prompt": format!("{n}+1="), "answer": (n + 1).to_string() });
            let _ = writeln!(lines, "{line}");
        }
        self.write("prompts.jsonl", &lines);
        let heldout: String =
            (0..8).map(|n| format!("{}\n", json!({ "prompt": format!("{n}009+1=") }))).collect();
        self.write("heldout.jsonl", &heldout);
        let spec = format!(
            "\
name: raft
seed: 6
base: {{ checkpoint: {base} }}
evals: [{{ name: heldout, text: heldout.txt, n_ctx: 64 }}]
raft:
  prompts: prompts.jsonl
  heldout: heldout.jsonl
  cycles: {cycles}
  samples_per_prompt: {per_prompt}
  sampling: {{ temperature: 1.0, max_new_tokens: {max_new_tokens} }}
  verifier: {{ regex: {{ pattern: '[0-9]' }} }}
  training: {{ epochs: 1, batch_size: 8, learning_rate: 0.001, max_tokens: 4096 }}
  lora: {{ r: 4, alpha: 8 }}
"
        );
        self.write("raft.yaml", &spec)
    }
}

fn config() -> serde_json::Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "tie_word_embeddings": true,
        "vocab_size": 260,
        "eos_token_id": 256
    })
}

/// Names and shapes of the tensors of that configuration, as Hugging Face names them.
fn tensor_shapes() -> Vec<(String, Vec<usize>)> {
    let layer = [
        ("input_layernorm.weight", vec![32]),
        ("post_attention_layernorm.weight", vec![32]),
        ("self_attn.q_proj.weight", vec![32, 32]),
        ("self_attn.q_proj.bias", vec![32]),
        ("self_attn.k_proj.weight", vec![16, 32]),
        ("self_attn.k_proj.bias", vec![16]),
        ("self_attn.v_proj.weight", vec![16, 32]),
        ("self_attn.v_proj.bias", vec![16]),
        ("self_attn.o_proj.weight", vec![32, 32]),
        ("mlp.gate_proj.weight", vec![64, 32]),
        ("mlp.up_proj.weight", vec![64, 32]),
        ("mlp.down_proj.weight", vec![32, 64]),
    ];
    let whole = [("model.embed_tokens.weight", vec![260, 32]), ("model.norm.weight", vec![32])];
    let named = |index: usize| {
        layer.clone().map(|(name, shape)| (format!("model.layers.{index}.{name}"), shape))
    };
    let whole = whole.map(|(name, shape)| (name.to_owned(), shape));
    whole.into_iter().chain((0..2).flat_map(named)).collect()
}

/// A BPE tokenizer without merges: one token per byte, in the format of Hugging Face's byte-level
/// tokenizers.
fn tokenizer() -> serde_json::Value {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let mut vocab = serde_json::Map::new();
    for byte in 0..256_u32 {
        let code = if printable(&byte) { byte } else { next };
        next += u32::from(!printable(&byte));
        let name = char::from_u32(code).expect("below the surrogates");
        vocab.insert(name.to_string(), json!(byte));
    }
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 256, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                   "vocab": vocab, "merges": [] }
    })
}
