//! The file `eval_history.jsonl` in the agent's directory, for people who follow it with `tail -f`.
//! The log is authoritative.

use std::{io::Write, path::Path};

use wire::v1;

/// Beyond this size the file is rotated; the previous one is kept as `.1`.
const HISTORY_BYTES_MAX: u64 = 16 * 1024 * 1024;

pub(crate) fn append_eval(directory: &Path, eval: &v1::Eval) -> std::io::Result<()> {
    let path = directory.join("eval_history.jsonl");
    if std::fs::metadata(&path).is_ok_and(|file| file.len() > HISTORY_BYTES_MAX) {
        std::fs::rename(&path, path.with_extension("jsonl.1"))?;
    }
    let mut line = serde_json::to_vec(eval)?;
    line.push(b'\n');
    std::fs::OpenOptions::new().create(true).append(true).open(&path)?.write_all(&line)
}
