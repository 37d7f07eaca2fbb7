//! Programs that tests write.

use std::{os::unix::fs::PermissionsExt, path::Path};

/// Writes a shell script, also in the place of another one, and returns its path.
pub fn write_script(path: &Path, script: &str) -> String {
    write_executable(path, format!("#!/bin/sh\n{script}\n"))
}

/// Writes a program, also in the place of another one, and returns its path.
pub fn write_executable(path: &Path, bytes: impl AsRef<[u8]>) -> String {
    let whole = path.with_extension("new");
    std::fs::write(&whole, bytes).expect("a program");
    std::fs::set_permissions(&whole, PermissionsExt::from_mode(0o755)).expect("our own file");
    std::fs::rename(&whole, path).expect("in its place");
    path.display().to_string()
}
