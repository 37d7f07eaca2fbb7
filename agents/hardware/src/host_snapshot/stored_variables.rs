//! Variables that files set for every login or service, the origin of forgotten ones.

use serde::{Deserialize, Serialize};

use super::is_gpu_variable;
use crate::host_files::{ContentFilter, HOME, HostFiles, NameFilter, read_text_filtered};

/// A variable that a file sets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredVariable {
    pub file: String,
    pub name: String,
    pub value: String,
}

const SETTING_FILES: [&str; 3] = ["/etc/environment", "/etc/bash.bashrc", "/etc/bashrc"];

/// Each with the accepted names.
const SETTING_DIRECTORIES: [(&str, NameFilter); 3] = [
    ("/etc/profile.d", |name| name.ends_with(".sh")),
    ("/etc/environment.d", |name| name.ends_with(".conf")),
    ("/etc/systemd/system", |name| name.ends_with(".service")),
];

const USER_FILES: [&str; 5] = [".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv"];

pub(super) fn read_stored_variables(files: &dyn HostFiles) -> Vec<StoredVariable> {
    let fixed = SETTING_FILES.map(str::to_owned).into_iter();
    let own = USER_FILES.iter().map(|name| format!("{HOME}/{name}"));
    let single = fixed.chain(own).map(|file| {
        let left = read_text_filtered(files, &file, KEEP_ASSIGNMENTS);
        (file, left)
    });
    let listed = SETTING_DIRECTORIES.into_iter().flat_map(|(directory, names)| {
        let parts = files.read_all_filtered(directory, names, KEEP_ASSIGNMENTS).into_iter();
        parts.map(move |(name, left)| {
            (format!("{directory}/{name}"), String::from_utf8_lossy(&left).into_owned())
        })
    });
    single.chain(listed).flat_map(|(file, left)| parse_assignments(&file, &left)).collect()
}

/// The rest of such a file, even of the same line, may contain secrets.
const KEEP_ASSIGNMENTS: ContentFilter = |bytes| {
    let text = String::from_utf8_lossy(bytes);
    text.lines().flat_map(find_assignments).collect::<Vec<_>>().join("\n").into_bytes()
};

fn parse_assignments(file: &str, left: &str) -> Vec<StoredVariable> {
    let setting = |line: &str| {
        let (name, value) = line.split_once('=')?;
        let file = file.replacen(HOME, "~", 1);
        Some(StoredVariable { file, name: name.to_owned(), value: value.to_owned() })
    };
    left.lines().filter_map(setting).collect()
}

/// Finds known assignments `NAME=value` in a line.
fn find_assignments(line: &str) -> Vec<String> {
    let is_separator = |c: char| c.is_whitespace() || matches!(c, ';' | '"' | '\'');
    let code = line.split('#').next().unwrap_or_default();
    // `Environment=NAME=value` in a systemd unit.
    let words = code.split(is_separator).map(|word| word.trim_start_matches("Environment="));
    let known = |word: &&str| word.split_once('=').is_some_and(|(name, _)| is_gpu_variable(name));
    words.filter(known).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_assignments_are_taken_from_a_line() {
        let found = |line: &str| find_assignments(line).join(" ");
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
