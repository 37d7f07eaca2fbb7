//! Variables that start files set and that harm. The line becomes a comment, in a script of a shell
//! one behind a command that does nothing: a function or an `if` without any command is an error.

use std::collections::{BTreeMap, BTreeSet};

use hardware::host_snapshot::{GFX_OVERRIDE, HostSnapshot};

use super::{Fix, FixChange, FixEffect, FixInputs, VIRTUAL_HOME};
use crate::environment::{ALLOCATOR_VARIABLES, check_variables};

/// The variables that a finding asks to leave unset, as the beginnings of their names.
const HARMFUL_VARIABLES: [(&str, &[&str]); 4] = [
    ("C-45", &[GFX_OVERRIDE]),
    ("C-46", &ALLOCATOR_VARIABLES),
    ("C-47", &["HSA_DISABLE_CACHE"]),
    ("C-66", &["GGML_CUDA_ENABLE_UNIFIED_MEMORY"]),
];

/// Precedes the line that a fix turned into a comment.
const COMMENT: &str = "# flotilla doctor --fix: ";

/// The command that precedes the comment in a script.
const NO_OPERATION: &str = ": ";

/// Plans the files that set a variable which harms. A setting harms if the environment has a finding
/// about it, or would have one with the stored settings alone: `sudo` passes no environment on.
pub(super) fn plan_variables(inputs: &FixInputs<'_>) -> Option<Fix> {
    let settings = &inputs.host.settings;
    let stored = settings.iter().map(|setting| (setting.name.clone(), setting.value.clone()));
    let stored = HostSnapshot { environment: stored.collect(), ..inputs.host.clone() };
    let waiting = check_variables(&stored, inputs.profile);
    let is_found = |id| inputs.is_found(id) || waiting.iter().any(|finding| finding.id == id);
    let mut ids = Vec::new();
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (id, names) in HARMFUL_VARIABLES.into_iter().filter(|&(id, _)| is_found(id)) {
        for setting in settings {
            let Some(name) = names.iter().find(|name| setting.name.starts_with(**name)) else {
                continue;
            };
            files.entry(&setting.file).or_default().insert(name);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    if files.is_empty() {
        return None;
    }
    let names: BTreeSet<&str> = files.values().flatten().copied().collect();
    let paths: Vec<&str> = files.keys().copied().collect();
    Some(Fix {
        summary: format!("leave {} unset in {}", join_names(&names), paths.join(", ")),
        ids,
        changes: files.iter().map(|(file, names)| change_file(inputs, file, names)).collect(),
        takes_effect: FixEffect::Login,
    })
}

fn join_names(names: &BTreeSet<&str>) -> String {
    names.iter().copied().collect::<Vec<_>>().join(", ")
}

fn change_file(inputs: &FixInputs<'_>, file: &str, names: &BTreeSet<&str>) -> FixChange {
    let virtual_path = file.replacen('~', VIRTUAL_HOME, 1);
    let real_path = match (file.strip_prefix('~'), inputs.home) {
        (Some(below), Some(home)) => Some(format!("{home}{below}")),
        (Some(_), None) => None,
        (None, _) => Some(file.to_owned()),
    };
    let content = inputs
        .read_text(&virtual_path)
        .and_then(|text| comment_lines(&text, is_script(file), names));
    // The line of a unit needs a reload of systemd, and may be in a drop-in.
    let is_unit = file.ends_with(".service");
    match (real_path, content) {
        (Some(path), Some(content)) if !is_unit => FixChange::Write { path, content },
        _ => FixChange::Manual(format!("delete the assignment of {} in {file}", join_names(names))),
    }
}

/// Returns true for a file that shells run; PAM and systemd read the others.
fn is_script(file: &str) -> bool {
    file != "/etc/environment" && !file.ends_with(".conf")
}

/// Returns `None` if a line sets something else, too, or is a part of a longer one.
fn comment_lines(text: &str, is_script: bool, names: &BTreeSet<&str>) -> Option<String> {
    let (mut changed, mut is_continued) = (String::new(), false);
    let done = [NO_OPERATION, COMMENT].concat();
    for line in text.split_inclusive('\n') {
        let code = line.trim();
        let continues = std::mem::replace(&mut is_continued, code.ends_with('\\'));
        let has_name = names.iter().any(|name| code.contains(name));
        if code.starts_with('#') || code.starts_with(&done) || !has_name {
            changed.push_str(line);
            continue;
        }
        if continues || !is_lone_assignment(code, names) {
            return None;
        }
        changed.push_str(if is_script { NO_OPERATION } else { "" });
        changed.push_str(COMMENT);
        changed.push_str(line);
    }
    Some(changed)
}

/// Returns true for a line that sets or exports one of the variables to a plain value, and does
/// nothing else.
fn is_lone_assignment(code: &str, names: &BTreeSet<&str>) -> bool {
    let assignment = code.strip_prefix("export ").unwrap_or(code).trim_start();
    let (name, value) = assignment.split_once('=').unwrap_or((assignment, ""));
    let unquoted = ['"', '\''].into_iter().find_map(|quote| {
        let rest = value.strip_prefix(quote)?;
        rest.strip_suffix(quote)
    });
    let is_plain =
        |text: &str| text.bytes().all(|it| it.is_ascii_alphanumeric() || b"._-:,".contains(&it));
    let is_named = names.iter().any(|known| name.starts_with(known));
    is_named && is_plain(name) && is_plain(unquoted.unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comment(text: &str, is_script: bool) -> Option<String> {
        comment_lines(text, is_script, &[GFX_OVERRIDE, "PYTORCH_ALLOC_CONF"].into())
    }

    #[test]
    fn a_script_keeps_its_syntax() {
        let line = "export HSA_OVERRIDE_GFX_VERSION=11.0.0";
        for script in [
            format!("if true; then\n  {line}\nfi\n"),
            format!("set_up() {{\n\t{line}\n}}\nset_up\n"),
            format!("true &&\n{line}\n"),
            format!("case a in\n  a)\n    {line}\n    ;;\nesac\n{line}"),
        ] {
            let changed =
                comment(&script, true).unwrap() + "\necho ${HSA_OVERRIDE_GFX_VERSION-unset}";
            let mut shell = std::process::Command::new("sh");
            shell.args(["-ec", &changed]).env_remove("HSA_OVERRIDE_GFX_VERSION");
            let output = shell.output().unwrap();
            assert_eq!(output.stdout, b"unset\n", "{changed}\n{output:?}");
            assert_eq!(comment(&changed, true), None, "the last line reads it");
            let again = comment(&script, true).unwrap();
            assert_eq!(comment(&again, true).unwrap(), again, "a second time");
        }
    }

    #[test]
    fn a_line_with_a_list_of_options_becomes_a_comment() {
        for line in ["export PYTORCH_ALLOC_CONF='a:True,b:512'", "PYTORCH_ALLOC_CONF=a:0.8,b:512"] {
            assert_eq!(comment(line, true).unwrap(), format!(": # flotilla doctor --fix: {line}"));
        }
    }

    #[test]
    fn only_a_line_that_sets_nothing_else_becomes_a_comment() {
        let text = "a=1\nexport HSA_OVERRIDE_GFX_VERSION=11.0.0\n# HSA_OVERRIDE_GFX_VERSION=1\nb";
        let expected = "a=1\n# flotilla doctor --fix: export HSA_OVERRIDE_GFX_VERSION=11.0.0\n\
                        # HSA_OVERRIDE_GFX_VERSION=1\nb";
        assert_eq!(comment(text, is_script("/etc/environment")).unwrap(), expected);
        let conf = "/etc/environment.d/90-gpu.conf";
        assert_eq!(comment(text, is_script(conf)).unwrap(), expected);
        let script = expected.replacen("# flotilla", ": # flotilla", 1);
        assert_eq!(comment(text, is_script("~/.bashrc")).unwrap(), script);
        for line in [
            "export A=1 \\\n  HSA_OVERRIDE_GFX_VERSION=11.0.0",
            "HSA_OVERRIDE_GFX_VERSION=\\\n11.0.0",
            "HSA_OVERRIDE_GFX_VERSION=\"11.0.0\necho\"",
            "HSA_OVERRIDE_GFX_VERSION=$(version)",
            "export HSA_OVERRIDE_GFX_VERSION=11.0.0 TOKEN=x",
            "HSA_OVERRIDE_GFX_VERSION=11.0.0; make",
            "if x; then export HSA_OVERRIDE_GFX_VERSION=11.0.0",
            "PYTORCH_ALLOC_CONF=backend:native,max_split_size_mb:$SIZE",
        ] {
            assert_eq!(comment(line, true), None, "{line}");
        }
    }
}
