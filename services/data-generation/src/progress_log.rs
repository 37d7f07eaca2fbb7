//! The events of a generation as append-only JSON lines. A line that was cut off by a crash is
//! removed; its request is made again.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
};

use crate::{error::GenerationError, generation::GenerationEvent};

const PROGRESS_FILE: &str = "progress.jsonl";

/// Longest line that is read; an event is shorter.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// The log of one output directory, locked against other processes.
#[derive(Debug)]
pub(crate) struct ProgressLog {
    path: PathBuf,
    file: File,
}

impl ProgressLog {
    /// Opens or creates the log of a directory, and passes its events to `apply`, which returns the
    /// reason why one does not fit.
    pub(crate) fn open(
        directory: &Path,
        apply: impl FnMut(&GenerationEvent) -> Result<(), String>,
    ) -> Result<Self, GenerationError> {
        let path = directory.join(PROGRESS_FILE);
        let write_error = |source: io::Error| GenerationError::Write { path: path.clone(), source };
        durable_files::create_directory(directory, 0o755).map_err(write_error)?;
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let file = file.map_err(write_error)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(GenerationError::InUse { directory: directory.to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(write_error(source)),
        }
        let end = replay_events(&path, &file, apply)?;
        file.set_len(end).map_err(write_error)?;
        Ok(Self { path, file })
    }

    pub(crate) fn append_event(&mut self, event: &GenerationEvent) -> Result<(), GenerationError> {
        let mut line = serde_json::to_vec(event).expect("an event is JSON");
        line.push(b'\n');
        // One call, so that a killed process leaves a whole line or none.
        self.file.write_all(&line).map_err(|source| self.write_error(source))
    }

    pub(crate) fn sync(&self) -> Result<(), GenerationError> {
        self.file.sync_all().map_err(|source| self.write_error(source))
    }

    fn write_error(&self, source: io::Error) -> GenerationError {
        GenerationError::Write { path: self.path.clone(), source }
    }
}

/// Applies the events of a log, and returns the end of its last whole line.
fn replay_events(
    path: &Path,
    file: &File,
    mut apply: impl FnMut(&GenerationEvent) -> Result<(), String>,
) -> Result<u64, GenerationError> {
    let (mut reader, mut end, mut bytes) = (BufReader::new(file), 0, Vec::new());
    for line in 1.. {
        bytes.clear();
        let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        let wrong =
            |problem: String| GenerationError::Progress { path: path.to_owned(), line, problem };
        let read = read.map_err(|error| wrong(error.to_string()))? as u64;
        if read == LINE_BYTES_MAX {
            return Err(wrong("too long".to_owned()));
        }
        if bytes.last() != Some(&b'\n') {
            break;
        }
        let event = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        apply(&event).map_err(wrong)?;
        end += read;
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn event(number: u32) -> GenerationEvent {
        let (category, problem) = ("a".to_owned(), "p\n".to_owned());
        GenerationEvent::Unusable { category, number, problem, tokens: 1 }
    }

    fn open(directory: &Path) -> Result<(ProgressLog, Vec<GenerationEvent>), GenerationError> {
        let mut events = Vec::new();
        let log = ProgressLog::open(directory, |event| {
            events.push(event.clone());
            Ok(())
        })?;
        Ok((log, events))
    }

    #[test]
    fn events_are_read_back_and_a_cut_line_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("new");
        let (mut log, events) = open(&directory).unwrap();
        assert_eq!(events, []);
        log.append_event(&event(1)).unwrap();
        log.append_event(&event(2)).unwrap();
        drop(log);
        let path = directory.join(PROGRESS_FILE);
        let whole = fs::read(&path).unwrap();
        for length in whole.len() / 2..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let (mut log, events) = open(&directory).unwrap();
            assert_eq!(events, [event(1)]);
            log.append_event(&event(2)).unwrap();
            drop(log);
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn one_process_writes_and_defects_name_their_line() {
        let directory = tempfile::tempdir().unwrap();
        let (mut log, _) = open(directory.path()).unwrap();
        let error = open(directory.path()).unwrap_err();
        assert!(matches!(error, GenerationError::InUse { .. }), "{error}");
        log.append_event(&event(1)).unwrap();
        drop(log);
        let refuse = |_: &GenerationEvent| Err("no".to_owned());
        let error = ProgressLog::open(directory.path(), refuse).unwrap_err().to_string();
        assert!(error.contains("line 1: no"), "{error}");
        let path = directory.path().join(PROGRESS_FILE);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + "{\"other\":{}}\n").unwrap();
        let error = open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("line 2: unknown variant"), "{error}");
    }
}
