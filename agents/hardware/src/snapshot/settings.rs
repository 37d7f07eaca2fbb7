//! Variables that files give to every login or service: where a forgotten one comes from.

use serde::{Deserialize, Serialize};

use super::is_variable;
use crate::files::{Files, HOME, Keep, KeepName, part};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub file: String,
    pub name: String,
    pub value: String,
}

const FILES: [&str; 3] = ["/etc/environment", "/etc/bash.bashrc", "/etc/bashrc"];

const DIRECTORIES: [(&str, KeepName); 3] = [
    ("/etc/profile.d", |name| name.ends_with(".sh")),
    ("/etc/environment.d", |name| name.ends_with(".conf")),
    ("/etc/systemd/system", |name| name.ends_with(".service")),
];

/// Below the user's home.
const OF_THE_USER: [&str; 5] = [".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv"];

pub(super) fn all(files: &dyn Files) -> Vec<Setting> {
    let fixed = FILES.map(str::to_owned).into_iter();
    let own = OF_THE_USER.iter().map(|name| format!("{HOME}/{name}"));
    let single = fixed.chain(own).map(|file| {
        let left = part(files, &file, KEEP);
        (file, left)
    });
    let listed = DIRECTORIES.into_iter().flat_map(|(directory, names)| {
        let parts = files.read_parts(directory, names, KEEP).into_iter();
        parts.map(move |(name, left)| {
            (format!("{directory}/{name}"), String::from_utf8_lossy(&left).into_owned())
        })
    });
    single.chain(listed).flat_map(|(file, left)| settings(&file, &left)).collect()
}

/// The rest of such a file may hold secrets, even on the same line.
const KEEP: Keep = |bytes| {
    let text = String::from_utf8_lossy(bytes);
    text.lines().flat_map(assignments).collect::<Vec<_>>().join("\n").into_bytes()
};

fn settings(file: &str, left: &str) -> Vec<Setting> {
    let setting = |line: &str| {
        let (name, value) = line.split_once('=')?;
        let file = file.replacen(HOME, "~", 1);
        Some(Setting { file, name: name.to_owned(), value: value.to_owned() })
    };
    left.lines().filter_map(setting).collect()
}

/// `NAME=value` of those known, whatever stands around them.
fn assignments(line: &str) -> Vec<String> {
    let is_separator = |c: char| c.is_whitespace() || matches!(c, ';' | '"' | '\'');
    let code = line.split('#').next().unwrap_or_default();
    // `Environment=NAME=value` in a unit.
    let words = code.split(is_separator).map(|word| word.trim_start_matches("Environment="));
    let known = |word: &&str| word.split_once('=').is_some_and(|(name, _)| is_variable(name));
    words.filter(known).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_assignments_are_taken_from_a_line() {
        let found = |line: &str| assignments(line).join(" ");
        let value = "HSA_OVERRIDE_GFX_VERSION=12.0.1";
        for line in [
            "export HSA_OVERRIDE_GFX_VERSION=12.0.1 TOKEN=secret # why",
            "Environment=\"HSA_OVERRIDE_GFX_VERSION=12.0.1\" \"TOKEN=secret\"",
            "Environment=HSA_OVERRIDE_GFX_VERSION=12.0.1",
            value,
        ] {
            assert_eq!(found(line), value, "{line}");
        }
        assert_eq!(found("# export HSA_OVERRIDE_GFX_VERSION=12.0.1"), "");
        assert_eq!(found("HSA_OVERRIDE_GFX_VERSION_1=9.0.6"), "HSA_OVERRIDE_GFX_VERSION_1=9.0.6");
    }
}
