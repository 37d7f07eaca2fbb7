//! Converts halo-forge's verifiers into those of a spec.

use super::{ImportError, KeyStatus, config_keys::ConfigKeys};

const TYPE_KEY: &str = "verifier.type";

/// Returns a YAML flow mapping.
pub(super) fn convert_verifier(keys: &mut ConfigKeys) -> Result<String, ImportError> {
    let run = keys.take_flag(&["verifier.run_after_compile"], "verifier.compile.run")?;
    let matching = keys.take_text(&["verifier.match_mode"], "verifier.stdio.output.match")?;
    for (name, why) in [
        ("verifier.host", "compilers run on the fleet's verifiers"),
        ("verifier.user", "compilers run on the fleet's verifiers"),
        ("verifier.ssh_key", "compilers run on the fleet's verifiers"),
        ("verifier.dataset", "tests are in each prompt's own fields"),
        ("verifier.test_cases", "cases are in each prompt's own field test_cases"),
        ("verifier.binary_cache_dir", "verifiers cache their verdicts"),
        ("verifier.max_workers", "each verifier judges as many at a time as it has cores"),
        ("verifier.timeout", "see the limits in docs/VERIFIERS.md"),
    ] {
        keys.ignore_key(name, why);
    }
    let Some(kind) = keys.take_text(&[TYPE_KEY], "raft.verifier")? else {
        keys.add_note(TYPE_KEY, KeyStatus::Default, "gcc: verifier.compile of c++");
        return Ok(compile_verifier("c++", run));
    };
    let (verifier, said) = match kind.as_str() {
        "gcc" | "clang" => (compile_verifier("c++", run), "compile of c++".to_owned()),
        "rust" | "go" => (compile_verifier(&kind, run), format!("compile of {kind}")),
        "auto" | "multi-language" | "multi_language" => (
            compile_verifier("", run),
            "compile, in the language a prompt or a fence names; python is not compiled".into(),
        ),
        "humaneval" | "mbpp" | "python" => ("{ python: {} }".into(), "python".into()),
        "pytest" | "unittest" => {
            ("{ pytest: {} }".into(), "pytest, which runs unittests too".into())
        }
        "execution" => stdio_verifier(keys, matching.as_deref()),
        "math" => ("{ numeric: {} }".into(), "numeric; shown work earns no reward".into()),
        "tool-calling" | "tool_calling" | "agentic" => {
            ("{ tool_call: { partial: true } }".into(), "tool_call".into())
        }
        other => (
            format!("{{ command: {{ argv: [{}] }} }}", quote_yaml(&format!("verify-{other}"))),
            format!(
                "no equivalent: write an executable verify-{other} (docs/VERIFIERS.md, command), \
                 or use another verifier"
            ),
        ),
    };
    keys.replace_note(&[TYPE_KEY], KeyStatus::Used, &format!("raft.verifier, {said}"));
    Ok(verifier)
}

/// Uses the language that the prompt or a code fence names if `language` is empty.
fn compile_verifier(language: &str, run: bool) -> String {
    let language =
        if language.is_empty() { String::new() } else { format!("language: {language}, ") };
    format!("{{ compile: {{ {language}run: {run} }} }}")
}

/// Returns the verifier with its description.
fn stdio_verifier(keys: &mut ConfigKeys, matching: Option<&str>) -> (String, String) {
    let ours = match matching {
        None | Some("exact") => "lines",
        Some("numeric") => "numbers",
        Some(other) => {
            let said =
                format!("{other} is not one of exact, lines, words and numbers; lines is used");
            keys.replace_note(&["verifier.match_mode"], KeyStatus::Ignored, &said);
            "lines"
        }
    };
    (format!("{{ stdio: {{ output: {{ match: {ours} }} }} }}"), "stdio".into())
}

/// Quotes as JSON: every JSON string is a YAML string.
pub(super) fn quote_yaml(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
