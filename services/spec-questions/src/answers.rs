//! Questions that several kinds of runs share, and the checks of their answers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::bail;
use formats::{HubCache, find_model};
use hub::DatasetName;
use spec::{DraftBase, HUB_PREFIX};
use terminal_output::Question;
use wire::PromptEntry;

use crate::DEFAULT_MODEL;

pub(crate) fn ask_model() -> anyhow::Result<String> {
    let question = Question {
        text: "Base model (a directory, or org/name)",
        default: Some(DEFAULT_MODEL),
        remedy: "name a directory or a model of the hub",
    };
    question.ask(check_model)
}

/// Asks for a file of data, or the name of a data set of the hub, whose rows are not checked here. A
/// file of the usual name in the working directory is the default.
pub(crate) fn ask_data(
    text: &str,
    usual: &str,
    check: impl Fn(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let default = Path::new(usual).is_file().then_some(usual);
    let question = Question { text, default, remedy: "run the command again with a file at hand" };
    let check_data = |data: &str| {
        let data = Path::new(data);
        if find_dataset(data)?.is_some() { Ok(()) } else { check(data) }
    };
    question.ask(check_data).map(PathBuf::from)
}

/// Returns the data set of the hub that stands in place of a file, as in `hub:org/name`. Fails if
/// it is not the name of one.
pub(crate) fn find_dataset(data: &Path) -> anyhow::Result<Option<DatasetName>> {
    let name = data.to_str().and_then(|data| data.strip_prefix(HUB_PREFIX));
    Ok(name.map(str::parse::<DatasetName>).transpose()?)
}

/// Reads the prompts of a file; `None` for a data set of the hub.
pub(crate) fn read_prompts(data: &Path) -> anyhow::Result<Option<Vec<PromptEntry>>> {
    if find_dataset(data)?.is_some() {
        return Ok(None);
    }
    Ok(Some(control::read_prompt_entries(data)?))
}

pub(crate) fn check_model(model: &str) -> anyhow::Result<()> {
    if !Path::new(model).exists() && model.parse::<hub::ModelId>().is_err() {
        bail!("{model}: neither a file or directory here nor a name such as org/name (A104)");
    }
    Ok(())
}

/// A hub model that is not on this machine is judged by its name.
pub(crate) fn has_chat_template(model: &str) -> bool {
    let cache = HubCache::from_environment(|name| std::env::var_os(name));
    let Ok(directory) = find_model(model, &cache) else {
        let name = model.to_lowercase();
        return ["instruct", "chat"].iter().any(|word| name.contains(word))
            || name.ends_with("-it");
    };
    let settings = fs::read_to_string(directory.join("tokenizer_config.json")).unwrap_or_default();
    directory.join("chat_template.jinja").is_file() || settings.contains("\"chat_template\"")
}

/// Returns the base as the spec in `file` names it.
pub(crate) fn locate_base(file: &Path, model: String) -> DraftBase {
    let path = Path::new(&model);
    DraftBase::Model(if path.is_dir() { locate_from(file, path) } else { model })
}

/// Returns data as the spec in `file` names it.
pub(crate) fn locate_data(file: &Path, data: &Path) -> String {
    match data.to_str() {
        Some(name) if name.starts_with(HUB_PREFIX) => name.to_owned(),
        _ => locate_from(file, data),
    }
}

/// Returns a path relative to the directory of `file` if it is below it, else an absolute path.
fn locate_from(file: &Path, path: &Path) -> String {
    let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let (directory, path) = (absolute(parent.unwrap_or(Path::new("."))), absolute(path));
    path.strip_prefix(&directory).unwrap_or(&path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_prompts_are_checked() {
        assert!(check_model("zzz").unwrap_err().to_string().contains("org/name"));
        assert!(check_model("org/name").is_ok());
        let missing = format!("{:#}", read_prompts(Path::new("/no/prompts.jsonl")).unwrap_err());
        assert!(missing.contains("/no/prompts.jsonl"), "{missing}");
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("prompts.jsonl"), "{}").unwrap();
        let wrong = directory.path().join("prompt.jsonl");
        let missing = format!("{:#}", read_prompts(&wrong).unwrap_err());
        assert!(missing.contains("did you mean prompts.jsonl? (F101)"), "{missing}");
    }

    #[test]
    fn a_data_set_of_the_hub_keeps_its_name_and_is_not_read() {
        let data = Path::new("hub:openai/gsm8k:main/train");
        assert_eq!(find_dataset(data).unwrap().unwrap().split.as_deref(), Some("train"));
        assert_eq!(read_prompts(data).unwrap(), None);
        assert_eq!(locate_data(Path::new("/specs/mine.yaml"), data), "hub:openai/gsm8k:main/train");
        assert_eq!(find_dataset(Path::new("hub.jsonl")).unwrap(), None);
        let wrong = find_dataset(Path::new("hub:gsm8k")).unwrap_err().to_string();
        assert!(wrong.contains("write org/name"), "{wrong}");
    }

    #[test]
    fn files_beside_the_spec_are_named_as_seen_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let prompts = directory.path().join("p.jsonl");
        fs::write(&prompts, "{}").unwrap();
        assert_eq!(locate_data(&directory.path().join("mine.yaml"), &prompts), "p.jsonl");
        let elsewhere = locate_from(Path::new("/mine.yaml"), Path::new("/proc/version"));
        assert_eq!(elsewhere, "proc/version");
        let base = locate_base(&directory.path().join("mine.yaml"), "org/name".into());
        assert_eq!(base, DraftBase::Model("org/name".into()));
    }
}
