//! The verifier of a run: from the user's options, halo-forge's settings or TRL's reward functions.

use serde_json::{Value, json};
use spec::RunDraft;

use crate::{report::ImportError, setting::Setting, spec_draft::SpecDraft, task::TrainingTask};

const FIELD: &str = "raft.verifier";

/// Sets the verifier, or reports it as missing.
pub(crate) fn add_verifier(draft: &mut SpecDraft<'_>) -> Result<(), ImportError> {
    if let Some(given) = draft.options.verifier {
        let yaml = RunDraft::verifier_section(given);
        let verifier: Value = spec::parse_yaml(&yaml).map_err(ImportError::Verifier)?;
        draft.tree.set_value(FIELD, verifier);
        for setting in [Setting::VerifierKind, Setting::RewardFunctions] {
            draft.settings.note_ignored(setting, "--verifier names the verifier");
        }
        return Ok(());
    }
    if draft.task == TrainingTask::Raft {
        convert_verifier(draft);
        return Ok(());
    }
    let functions = draft.settings.words_of(Setting::RewardFunctions).unwrap_or_default();
    match convert_functions(draft, &functions) {
        Some(verifier) => {
            let advice = "numbers are compared with the prompt's field answer (docs/VERIFIERS.md)";
            draft.set_with_advice(Setting::RewardFunctions, FIELD, verifier, advice);
        }
        None => {
            let explanation =
                "there is no such verifier: write an executable (docs/VERIFIERS.md, command)";
            draft.settings.note_differs(Setting::RewardFunctions, explanation);
            let remedy = "name what judges the samples with --verifier, such as --verifier numeric";
            draft.tree.set_missing(FIELD, json!({ "numeric": {} }), remedy);
        }
    }
    Ok(())
}

/// Returns the verifier for reward functions that TRL has built in; `None` for others.
fn convert_functions(draft: &mut SpecDraft<'_>, functions: &[String]) -> Option<Value> {
    let convert = |name: &String| match name.as_str() {
        "accuracy_reward" | "reasoning_accuracy_reward" => Some(json!({ "numeric": {} })),
        "think_format_reward" => Some(json!({ "regex": { "pattern": r"(?s)^<think>.*</think>" } })),
        _ => None,
    };
    let verifiers: Vec<Value> = functions.iter().map(convert).collect::<Option<_>>()?;
    match &verifiers[..] {
        [] => None,
        [verifier] => Some(verifier.clone()),
        all => {
            let weights = draft.settings.numbers_of(Setting::RewardWeights).unwrap_or_default();
            let weight = |place: usize| weights.get(place).copied().unwrap_or(1.0);
            let stage = |(place, verifier): (usize, &Value)| json!({ "verifier": verifier, "weight": weight(place) });
            let stages: Vec<Value> = all.iter().enumerate().map(stage).collect();
            draft.settings.note_used(Setting::RewardWeights, FIELD, "weights of its stages");
            Some(json!({ "chain": { "stages": stages, "stop_at_failure": false } }))
        }
    }
}

/// Sets the verifier that corresponds to halo-forge's.
fn convert_verifier(draft: &mut SpecDraft<'_>) {
    let runs = draft.settings.flag_of(Setting::VerifierRuns).unwrap_or_default();
    let kind = draft.settings.word_of(Setting::VerifierKind).unwrap_or_else(|| "gcc".to_owned());
    let compile = |language: &str| compile_verifier(language, runs);
    let (verifier, advice) = match kind.as_str() {
        "gcc" | "clang" => (compile("c++"), ""),
        "rust" | "go" => (compile(&kind), ""),
        "auto" | "multi-language" | "multi_language" => {
            (compile(""), "in the language a prompt or a fence names; python is not compiled")
        }
        "humaneval" | "mbpp" | "python" => (json!({ "python": {} }), ""),
        "pytest" | "unittest" => (json!({ "pytest": {} }), "pytest runs unittests too"),
        "execution" => (convert_stdio(draft), ""),
        "math" => (json!({ "numeric": {} }), "shown work earns no reward"),
        "tool-calling" | "tool_calling" | "agentic" => {
            (json!({ "tool_call": { "partial": true } }), "")
        }
        other => (
            json!({ "command": { "argv": [format!("verify-{other}")] } }),
            "no equivalent: write that executable (docs/VERIFIERS.md, command), or use another",
        ),
    };
    if verifier.get("compile").is_some() {
        draft.settings.note_used(Setting::VerifierRuns, FIELD, &format!("compile.run: {runs}"));
    }
    draft.set_with_advice(Setting::VerifierKind, FIELD, verifier, advice);
}

/// Uses the language that the prompt or a code fence names if `language` is empty.
fn compile_verifier(language: &str, runs: bool) -> Value {
    match language {
        "" => json!({ "compile": { "run": runs } }),
        language => json!({ "compile": { "language": language, "run": runs } }),
    }
}

fn convert_stdio(draft: &mut SpecDraft<'_>) -> Value {
    let matching = draft.settings.word_of(Setting::VerifierMatch);
    let ours = match matching.as_deref() {
        None | Some("exact" | "lines") => "lines",
        Some("numeric") => "numbers",
        Some(_) => {
            let explanation = "it is not one of exact, lines, words and numbers; lines is used";
            draft.settings.note_differs(Setting::VerifierMatch, explanation);
            return json!({ "stdio": { "output": { "match": "lines" } } });
        }
    };
    draft.settings.note_used(Setting::VerifierMatch, FIELD, ours);
    json!({ "stdio": { "output": { "match": ours } } })
}
