//! The permissions that the owner of this host gives to `command` verifiers, and the decision how a
//! command runs.
//!
//! A spec only requests paths; the host's owner grants them. Without a grant a command runs in the
//! sandbox and sees what every program sees there.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::tools::find_executable;

/// Visible to every program in a sandbox, and to a spec without a grant.
const SYSTEM_DIRECTORIES: [&str; 9] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"];

/// Programs that execute code from their arguments; a version suffix may follow the name.
const INTERPRETERS: [&str; 34] = [
    "ash", "awk", "bash", "busybox", "csh", "dash", "deno", "docker", "env", "expect", "find",
    "fish", "gawk", "gdb", "ksh", "lua", "make", "mawk", "nice", "node", "perl", "php", "podman",
    "python", "ruby", "setpriv", "sh", "ssh", "sudo", "tclsh", "timeout", "unshare", "xargs",
    "zsh",
];

/// The permissions of a host's owner. All paths are canonical.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerGrants {
    /// Directories and files that contained commands may read if their spec requests it.
    pub paths: Vec<PathBuf>,
    /// Executables that run uncontained.
    pub commands: Vec<PathBuf>,
}

/// A permission that an owner may not give, with advice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{flag} {}: {problem} (V104)", path.display())]
pub struct GrantError {
    flag: &'static str,
    path: PathBuf,
    problem: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommandPlacement {
    /// In a cell that shows these paths in addition to the system.
    Contained { program: PathBuf, shown: Vec<PathBuf> },
    /// On the host itself, with the agent's directories hidden.
    Masked { program: PathBuf },
}

impl OwnerGrants {
    /// Reads the owner's flags. Fails if a path does not exist, is `/` or overlaps with `hidden`,
    /// the agent's own directories, or if a command is not a file or is an interpreter.
    pub fn from_flags(
        paths: &[PathBuf],
        commands: &[PathBuf],
        hidden: &[PathBuf],
    ) -> Result<Self, GrantError> {
        let read_path = |path: &PathBuf| {
            let refuse = |problem: String| GrantError {
                flag: "--verifier-path",
                path: path.clone(),
                problem,
            };
            let real = path.canonicalize().map_err(|error| refuse(error.to_string()))?;
            if real.parent().is_none() {
                return Err(refuse("it is the whole file system; name a directory".into()));
            }
            match find_overlap(&real, hidden) {
                Some(own) => Err(refuse(format!(
                    "{} holds the agent's own files, including keys; keep files for verifiers \
                     elsewhere",
                    own.display()
                ))),
                None => Ok(real),
            }
        };
        let read_command = |path: &PathBuf| {
            let refuse = |problem: String| GrantError {
                flag: "--allow-command",
                path: path.clone(),
                problem,
            };
            if !path.is_absolute() {
                return Err(refuse("must be an absolute path".into()));
            }
            let real = path.canonicalize().map_err(|error| refuse(error.to_string()))?;
            if !real.is_file() {
                return Err(refuse("not a file".into()));
            }
            if is_interpreter(path) || is_interpreter(&real) {
                return Err(refuse(
                    "it is an interpreter, and its arguments come from the spec: write a script \
                     that calls it, and allow that script"
                        .into(),
                ));
            }
            if hidden.iter().any(|own| real.starts_with(own)) {
                return Err(refuse(
                    "it is in the agent's own directory, which is hidden from commands; move it \
                     elsewhere"
                        .into(),
                ));
            }
            Ok(real)
        };
        Ok(Self {
            paths: paths.iter().map(read_path).collect::<Result<_, _>>()?,
            commands: commands.iter().map(read_command).collect::<Result<_, _>>()?,
        })
    }

    /// Decides how a command runs here; `contains` is true if the host has a sandbox. The error is
    /// advice for the host's owner.
    pub(crate) fn place_command(
        &self,
        program: &str,
        paths: &[String],
        hidden: &[PathBuf],
        contains: bool,
    ) -> Result<CommandPlacement, String> {
        let found = find_executable(program).ok_or_else(|| format!("the executable {program}"))?;
        let resolve = |path: &Path| {
            path.canonicalize().map_err(|error| format!("the path {}: {error}", path.display()))
        };
        let (found, real) = (
            std::path::absolute(&found).map_err(|error| format!("{program}: {error}"))?,
            resolve(&found)?,
        );
        if self.commands.contains(&real) {
            return Ok(CommandPlacement::Masked { program: found });
        }
        if !contains {
            return Err(format!(
                "a sandbox for {program}, and its owner has not allowed it to run without one: fix \
                 the sandbox, or start the agent with --allow-command {} (V104)",
                real.display()
            ));
        }
        let mut shown = Vec::new();
        for executable in [&found, &real] {
            shown.extend(self.visible_directory(executable, hidden)?);
        }
        for path in paths.iter().map(PathBuf::from) {
            let real = resolve(&path)?;
            self.check_readable(&real, hidden)?;
            // Paths below the system directories are always visible.
            if !is_system_path(&path) {
                shown.push(path);
            }
        }
        shown.sort();
        shown.dedup();
        Ok(CommandPlacement::Contained { program: found, shown })
    }

    /// Returns the executable's directory, or only the executable if the grant covers no more.
    fn visible_directory(
        &self,
        executable: &Path,
        hidden: &[PathBuf],
    ) -> Result<Option<PathBuf>, String> {
        if is_system_path(executable) {
            return Ok(None);
        }
        let resolve = |path: &Path| path.canonicalize().map_err(|error| error.to_string());
        let directory = executable.parent().unwrap_or(executable);
        let Err(refused) = self.check_readable(&resolve(directory)?, hidden) else {
            return Ok(Some(directory.to_owned()));
        };
        match self.check_readable(&resolve(executable)?, hidden) {
            Ok(()) => Ok(Some(executable.to_owned())),
            Err(_) => Err(refused),
        }
    }

    /// Checks a canonical path. The error is advice for the host's owner.
    fn check_readable(&self, real: &Path, hidden: &[PathBuf]) -> Result<(), String> {
        let is_own = hidden.iter().any(|own| real.starts_with(own));
        let is_open = self.paths.iter().any(|open| real.starts_with(open));
        if !is_own && (is_system_path(real) || is_open) {
            return Ok(());
        }
        Err(describe_refusal(real, hidden))
    }
}

fn describe_refusal(path: &Path, hidden: &[PathBuf]) -> String {
    let path_said = path.display();
    match hidden.iter().find(|own| path.starts_with(own)) {
        Some(own) => format!(
            "permission to show {path_said} to a command: it is in {}, the agent's own directory, \
             which is never shown; keep files for verifiers elsewhere (V104)",
            own.display()
        ),
        None => format!(
            "permission to show {path_said} to a command: its owner grants it by starting the \
             agent with --verifier-path {path_said} (V104)"
        ),
    }
}

/// Returns the agent's directory that contains the path or lies below it.
fn find_overlap<'a>(path: &Path, hidden: &'a [PathBuf]) -> Option<&'a PathBuf> {
    hidden.iter().find(|own| path.starts_with(own) || own.starts_with(path))
}

/// Returns true if every program in a sandbox sees the path.
pub(crate) fn is_system_path(path: &Path) -> bool {
    SYSTEM_DIRECTORIES.iter().any(|system| path.starts_with(system))
}

/// Recognises names such as `python3.11`.
fn is_interpreter(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    INTERPRETERS.contains(&stem)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn write_executable(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    #[test]
    fn a_spec_gets_the_system_and_what_the_owner_opened_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let (judge, credentials) = (root.join("opt/judge"), root.join("credentials"));
        write_executable(&judge);
        write_executable(&credentials.join("judge"));
        std::os::unix::fs::symlink(&credentials, root.join("opt/link")).unwrap();
        let hidden = [credentials.clone()];
        let text = |path: &Path| path.display().to_string();
        let none = OwnerGrants::default();
        let place = |grants: &OwnerGrants, program: &str, paths: &[&Path]| {
            let paths: Vec<String> = paths.iter().map(|path| text(path)).collect();
            grants.place_command(program, &paths, &hidden, true)
        };
        let shown = |placement: Result<CommandPlacement, String>| match placement.unwrap() {
            CommandPlacement::Contained { shown, .. } => shown,
            masked @ CommandPlacement::Masked { .. } => panic!("{masked:?}"),
        };
        assert_eq!(shown(place(&none, "sh", &[Path::new("/usr/share")])), [] as [PathBuf; 0]);
        for path in ["/etc/shadow", "/root", "/home", "/proc", "/etc"] {
            let error = place(&none, "sh", &[Path::new(path)]).unwrap_err();
            assert!(error.contains("(V104)") || error.contains("No such"), "{error}");
        }
        let error = place(&none, &text(&judge), &[]).unwrap_err();
        let flag = format!("--verifier-path {}", root.join("opt").display());
        assert!(error.contains(&flag), "{error}");
        let open = OwnerGrants::from_flags(&[root.join("opt")], &[], &hidden).unwrap();
        assert_eq!(shown(place(&open, &text(&judge), &[])), [root.join("opt")]);
        for own in [credentials.join("judge"), root.join("opt/link/judge")] {
            for placement in [place(&open, &text(&own), &[]), place(&open, "sh", &[&own])] {
                let error = placement.unwrap_err();
                assert!(error.contains("the agent's own directory"), "{error}");
            }
        }
        let alone = OwnerGrants::from_flags(std::slice::from_ref(&judge), &[], &hidden).unwrap();
        assert_eq!(shown(place(&alone, &text(&judge), &[])), [judge]);
    }

    #[test]
    fn only_the_executable_that_was_allowed_runs_uncontained() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let (judge, other) = (root.join("judge"), root.join("other"));
        write_executable(&judge);
        write_executable(&other);
        std::os::unix::fs::symlink(&judge, root.join("link")).unwrap();
        let grants = OwnerGrants::from_flags(&[], std::slice::from_ref(&judge), &[]).unwrap();
        let place =
            |path: &Path| grants.place_command(&path.display().to_string(), &[], &[], false);
        assert_eq!(place(&judge), Ok(CommandPlacement::Masked { program: judge.clone() }));
        assert_eq!(
            place(&root.join("link")),
            Ok(CommandPlacement::Masked { program: root.join("link") })
        );
        let error = place(&other).unwrap_err();
        assert!(error.contains("--allow-command") && error.contains("(V104)"), "{error}");
    }

    #[test]
    fn an_owner_is_kept_from_allowing_too_much_by_mistake() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let credentials = root.join("credentials");
        write_executable(&credentials.join("judge"));
        let hidden = [credentials.clone()];
        for path in
            [Path::new("/"), &root, &credentials, &credentials.join("judge"), &root.join("absent")]
        {
            let error =
                OwnerGrants::from_flags(&[path.to_owned()], &[], &hidden).unwrap_err().to_string();
            assert!(error.starts_with("--verifier-path") && error.ends_with("(V104)"), "{error}");
        }
        for path in ["/bin/sh", "/usr/bin/env", "sh", "/usr", "/absent"] {
            let error =
                OwnerGrants::from_flags(&[], &[path.into()], &hidden).unwrap_err().to_string();
            assert!(error.starts_with("--allow-command") && error.ends_with("(V104)"), "{error}");
        }
        assert!(OwnerGrants::from_flags(&[], &[credentials.join("judge")], &hidden).is_err());
        for (name, expected) in [("python3.11", true), ("python-judge", false), ("shellac", false)]
        {
            assert_eq!(is_interpreter(Path::new(name)), expected, "{name}");
        }
    }
}
