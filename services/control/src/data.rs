//! The files that a run is given: parsed in all supported forms, conversations rendered with the
//! base's chat template, prompts split and compared, all before anything is stored.

mod error;
mod examples;
mod file_content;
mod file_rows;
mod heldout_split;
mod hub_data;
mod model_dir;
mod offline;
mod prepare;
mod preview;
mod prompts;
mod statistics;
mod token_counts;

pub(crate) use self::{
    error::BaseFilesError,
    file_content::read_spec_file,
    hub_data::fetch_hub_data,
    model_dir::stage_init_files,
    prepare::{DataReader, PreparedKind, PreparedRun, PreparedSuite},
    prompts::PLAIN_PROMPT,
};
pub use self::{
    error::{DataError, HubDataError},
    offline::{
        NamedRows, check_example_file, prepare_documents, read_prompt_entries,
        remove_duplicate_prompts, report_rows, split_prompt_rows,
    },
    preview::{DataPreview, DataPreviewError, PreviewRow, PreviewSettings, preview_rows},
};

/// Returns the template "chatml", whose turns end with the model's end token.
#[cfg(test)]
fn chatml() -> chat_template::ChatTemplate {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(directory.path().join(name), value.to_string()).unwrap();
    };
    let tokens = serde_json::json!([
        { "id": 2, "content": "<|im_end|>" }, { "id": 3, "content": "<|im_start|>" },
    ]);
    write("tokenizer.json", serde_json::json!({ "added_tokens": tokens }));
    let text = include_str!("../../chat-template/src/golden/chatml.jinja");
    write("tokenizer_config.json", serde_json::json!({ "chat_template": text }));
    write(
        "config.json",
        serde_json::json!({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "vocab_size": 260, "eos_token_id": 2,
        }),
    );
    chat_template::ChatTemplate::load(directory.path(), jiff::Zoned::now).unwrap()
}
