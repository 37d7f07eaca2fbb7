//! The questions about supervised fine-tuning.

use std::path::Path;

use spec::SftDraft;

use crate::answers::{ask_data, ask_model, has_chat_template, locate_base, locate_data};

/// Asks for the base and the examples of the spec that will be `file`.
pub(crate) fn ask_draft(file: &Path) -> anyhow::Result<SftDraft> {
    let model = ask_model()?;
    let text = "Examples (a file, or hub:org/name)";
    let data = ask_data(text, "examples.jsonl", check_examples)?;
    let (is_chat, data) = (has_chat_template(&model), locate_data(file, &data));
    Ok(SftDraft { name: "mine".into(), base: locate_base(file, model), data, is_chat })
}

fn check_examples(file: &Path) -> anyhow::Result<()> {
    Ok(control::check_example_file(file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_prompts_is_no_file_of_examples() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("data.jsonl");
        for (text, is_good) in [
            ("{\"prompt\": \"1+1=\", \"completion\": \"2\"}", true),
            ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", true),
            ("{\"prompt\": \"1+1=\", \"answer\": \"2\"}", false),
            ("", false),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(check_examples(&file).is_ok(), is_good, "{text}");
        }
        std::fs::write(&file, "{\"question\": \"1+1=\", \"reply\": \"2\"}").unwrap();
        let other = format!("{:#}", check_examples(&file).unwrap_err());
        assert!(other.contains("another name: `columns: { completion: NAME }`"), "{other}");
    }
}
