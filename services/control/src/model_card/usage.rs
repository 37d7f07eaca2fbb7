//! The sections of a card on the use of a model, and on its reproduction.

use std::fmt::Write;

use hub::ModelRevision;
use wire::v1;

use super::{CardFacts, ModelForm, inline_code};

pub(super) fn usage_section(facts: &CardFacts<'_>) -> String {
    let text = match facts.request.form {
        ModelForm::Gguf { weight_type } => gguf_usage(facts, weight_type),
        ModelForm::Stored | ModelForm::Merged if facts.is_adapter() => adapter_usage(facts),
        ModelForm::Stored | ModelForm::Merged => model_usage(facts),
    };
    format!("## Use\n\n{text}")
}

/// Returns `, revision="BRANCH"` in Python, unless it is the default branch.
fn revision_argument(facts: &CardFacts<'_>) -> String {
    let branch = facts.request.target.revision.as_ref();
    branch.map_or_else(String::new, |branch| format!(", revision=\"{branch}\""))
}

fn adapter_usage(facts: &CardFacts<'_>) -> String {
    let target = facts.request.target;
    let (repo, at) = (&target.repo, revision_argument(facts));
    let Some(ModelRevision { repo: base, commit }) = facts.hub_base() else {
        return format!(
            "The base of this adapter is not on the hub. The fleet exports it: \
             `flotilla checkpoint export {0} --format merged --out DIR` writes both as one model.\n\n\
             ```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\
             base = AutoModelForCausalLM.from_pretrained(\"PATH OF THE BASE\")\n\
             model = PeftModel.from_pretrained(base, \"{repo}\"{at})\n```\n",
            reference(&facts.checkpoint)
        );
    };
    format!(
        "With Transformers and PEFT:\n\n```python\nfrom peft import PeftModel\n\
         from transformers import AutoModelForCausalLM, AutoTokenizer\n\
         base = AutoModelForCausalLM.from_pretrained(\"{base}\", revision=\"{commit}\")\n\
         tokenizer = AutoTokenizer.from_pretrained(\"{base}\", revision=\"{commit}\")\n\
         model = PeftModel.from_pretrained(base, \"{repo}\"{at})\n```\n\n\
         With Flotilla, a RAFT run that trains it further has this base:\n\n\
         ```yaml\nbase: {{ model: {base}@{commit}, adapter: {target} }}\n```\n\n\
         With llama.cpp, merge it first:\n\n```bash\n\
         flotilla checkpoint export {0} --format gguf --type q8_0 --out DIR\n```\n",
        reference(&facts.checkpoint)
    )
}

fn model_usage(facts: &CardFacts<'_>) -> String {
    let target = facts.request.target;
    let (repo, at) = (&target.repo, revision_argument(facts));
    format!(
        "With Transformers:\n\n```python\n\
         from transformers import AutoModelForCausalLM, AutoTokenizer\n\
         model = AutoModelForCausalLM.from_pretrained(\"{repo}\"{at})\n\
         tokenizer = AutoTokenizer.from_pretrained(\"{repo}\"{at})\n```\n\n\
         With Flotilla, as the base of a run:\n\n```yaml\nbase: {{ model: {target} }}\n```\n\n\
         With llama.cpp, after `hf download {repo}`:\n\n```bash\n\
         flotilla convert model --model {repo} --dtype q8_0 --out model.gguf\n\
         llama-server --model model.gguf\n```\n"
    )
}

fn gguf_usage(facts: &CardFacts<'_>, weight_type: &str) -> String {
    let target = facts.request.target;
    let repo = &target.repo;
    // llama.cpp reads the default branch alone.
    let llama = match &target.revision {
        None => format!("llama-server -hf {repo}:{}", weight_type.to_uppercase()),
        Some(branch) => format!(
            "hf download {repo} --revision {branch} --local-dir DIR && llama-server --model DIR/*.gguf"
        ),
    };
    format!(
        "With llama.cpp:\n\n```bash\n{llama}\n```\n\n\
         With Flotilla, after `hf download {repo} --local-dir DIR`:\n\n```bash\n\
         flotilla eval local --model DIR/FILE.gguf --text FILE\n```\n"
    )
}

pub(super) fn reproduction_section(facts: &CardFacts<'_>) -> String {
    let name = reference(&facts.checkpoint);
    let mut text = "## Reproduce\n\n".to_owned();
    if facts.trainings.first().is_some_and(|step| step.order.is_some()) {
        let _ = write!(
            text,
            "In the fleet, `flotilla run reproduce {name}` trains it again from the order in the log \
             and compares the weights bit for bit; `flotilla audit {}` checks the log and the \
             store. ",
            facts.checkpoint.run
        );
    }
    text.push_str("The files of the checkpoint, by BLAKE3:\n\n");
    for v1::checkpoint_info::File { path, bytes, digest } in &facts.request.info.files {
        let _ = writeln!(text, "- {} ({bytes} bytes): {}", inline_code(path), inline_code(digest));
    }
    text
}

/// Returns the checkpoint as commands name it.
fn reference(checkpoint: &v1::Checkpoint) -> String {
    format!("{}/{}/{}", checkpoint.run, checkpoint.cycle, checkpoint.step)
}
