//! The settings of a model for other programs.

use std::path::Path;

use formats::ModelConfig;

use crate::format::ExportFormat;

/// Maximum number of tokens of a conversation in Ollama, which reserves memory for all of them.
const CONTEXT_MAX: usize = 8192;

/// Returns Ollama's `Modelfile` for a GGUF file beside it. Ollama reads the chat template and the
/// end token from the file (https://docs.ollama.com/modelfile).
pub(crate) fn modelfile_text(file_name: &str, config: &ModelConfig) -> String {
    let context = config.max_positions.min(CONTEXT_MAX);
    format!("FROM ./{file_name}\nPARAMETER num_ctx {context}\n")
}

/// Returns the commands with which a person loads an exported model.
pub(crate) fn load_commands(format: ExportFormat, name: &str, path: &Path) -> Vec<String> {
    let at = path.display();
    let directory = path.parent().unwrap_or(path).display();
    match format {
        ExportFormat::Merged => {
            vec![format!("AutoModelForCausalLM.from_pretrained(\"{at}\")   # in Python")]
        }
        ExportFormat::Gguf => vec![format!("llama-server --model {at}")],
        ExportFormat::Ollama => vec![
            format!("ollama create {name} -f {directory}/Modelfile"),
            format!("ollama run {name}"),
        ],
        ExportFormat::Lemonade => {
            vec![format!("lemonade-server serve --extra-models-dir {directory}")]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modelfile_names_the_file_and_bounds_the_context() {
        let model = golden::small_set().model_path("qwen2-tiny");
        let config = ModelConfig::from_dir(&model).unwrap();
        let text = modelfile_text("stable.gguf", &config);
        let context = config.max_positions.min(8192);
        assert_eq!(text, format!("FROM ./stable.gguf\nPARAMETER num_ctx {context}\n"));
    }
}
