//! The Python interpreter that trains with PyTorch.

use std::path::{Path, PathBuf};

use anyhow::bail;
use trainer::PythonRunner;

/// Returns the interpreter of `--python`, or `uv` if it is on `PATH`.
pub(crate) fn find_python(asked: Option<&Path>) -> anyhow::Result<PythonRunner> {
    if let Some(path) = asked {
        return Ok(PythonRunner::Interpreter(check_interpreter(path)?));
    }
    let path = std::env::var_os("PATH");
    let directories = path.iter().flat_map(std::env::split_paths);
    let mut places = directories.map(|directory| directory.join("uv"));
    match places.find(|uv| uv.is_file()) {
        Some(uv) => Ok(PythonRunner::Uv(uv)),
        None => bail!(
            "training with PyTorch needs --python VENV/bin/python (with torch, transformers, peft \
             and accelerate), or uv on PATH; an agent with --trainer-engine candle needs neither \
             (E108)"
        ),
    }
}

/// Returns the absolute path of the interpreter of `--python`.
pub(crate) fn check_interpreter(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.is_file() {
        bail!(
            "--python {}: no such file; pass an interpreter such as VENV/bin/python (A104)",
            path.display()
        );
    }
    Ok(std::path::absolute(path)?)
}
