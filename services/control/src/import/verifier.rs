//! halo-forge's verifiers, by ours.

use super::{Fate, ImportError, keys::Keys};

const TYPE: &str = "verifier.type";

/// A flow mapping of YAML.
pub(super) fn take(keys: &mut Keys) -> Result<String, ImportError> {
    let run = keys.flag(&["verifier.run_after_compile"], "verifier.compile.run")?;
    let matching = keys.text(&["verifier.match_mode"], "verifier.stdio.output.match")?;
    for (name, why) in [
        ("verifier.host", "compilers run on the fleet's verifiers"),
        ("verifier.user", "compilers run on the fleet's verifiers"),
        ("verifier.ssh_key", "compilers run on the fleet's verifiers"),
        ("verifier.dataset", "tests are in each prompt's own fields"),
        ("verifier.test_cases", "cases are in each prompt's own field test_cases"),
        ("verifier.binary_cache_dir", "verifiers remember what they judged"),
        ("verifier.max_workers", "each verifier judges as many at a time as it has cores"),
        ("verifier.timeout", "see the limits in docs/VERIFIERS.md"),
    ] {
        keys.ignore(name, why);
    }
    let Some(kind) = keys.text(&[TYPE], "raft.verifier")? else {
        keys.note(TYPE, Fate::Default, "gcc: verifier.compile of c++");
        return Ok(compile("c++", run));
    };
    let (verifier, said) = match kind.as_str() {
        "gcc" | "clang" => (compile("c++", run), "compile of c++".to_owned()),
        "rust" | "go" => (compile(&kind, run), format!("compile of {kind}")),
        "auto" | "multi-language" | "multi_language" => (
            compile("", run),
            "compile, in the language a prompt or a fence names; python is not compiled".into(),
        ),
        "humaneval" | "mbpp" | "python" => ("{ python: {} }".into(), "python".into()),
        "pytest" | "unittest" => {
            ("{ pytest: {} }".into(), "pytest, which runs unittests too".into())
        }
        "execution" => stdio(keys, matching.as_deref()),
        "math" => ("{ numeric: {} }".into(), "numeric; nothing is paid for work shown".into()),
        "tool-calling" | "tool_calling" | "agentic" => {
            ("{ tool_call: { partial: true } }".into(), "tool_call".into())
        }
        other => (
            format!("{{ command: {{ argv: [{}] }} }}", quoted(&format!("verify-{other}"))),
            format!(
                "none of ours is like it: write an executable verify-{other} (docs/VERIFIERS.md, \
                 command), or take another verifier"
            ),
        ),
    };
    keys.renote(&[TYPE], Fate::Used, &format!("raft.verifier, {said}"));
    Ok(verifier)
}

fn compile(language: &str, run: bool) -> String {
    let language =
        if language.is_empty() { String::new() } else { format!("language: {language}, ") };
    format!("{{ compile: {{ {language}run: {run} }} }}")
}

fn stdio(keys: &mut Keys, matching: Option<&str>) -> (String, String) {
    let ours = match matching {
        None | Some("exact") => "lines",
        Some("numeric") => "numbers",
        Some(other) => {
            let said =
                format!("{other} is none of exact, lines, words and numbers; lines is taken");
            keys.renote(&["verifier.match_mode"], Fate::Ignored, &said);
            "lines"
        }
    };
    (format!("{{ stdio: {{ output: {{ match: {ours} }} }} }}"), "stdio".into())
}

/// JSON's texts are YAML's.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
