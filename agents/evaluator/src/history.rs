//! `eval_history.jsonl` beside the agent, for people who `tail -f`. The log is what counts.

use std::{io::Write, path::Path};

use wire::v1;

/// The file is started anew beyond this; the one before is kept as `.1`.
const BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Adds one line.
pub(crate) fn append(directory: &Path, eval: &v1::Eval) -> std::io::Result<()> {
    let path = directory.join("eval_history.jsonl");
    if std::fs::metadata(&path).is_ok_and(|file| file.len() > BYTES_MAX) {
        std::fs::rename(&path, path.with_extension("jsonl.1"))?;
    }
    let mut line = serde_json::to_vec(eval)?;
    line.push(b'\n');
    std::fs::OpenOptions::new().create(true).append(true).open(&path)?.write_all(&line)
}
