//! Export to files: one file per run with one fact per line, as in archives. The last complete line
//! gives the cursor.

use std::{
    fs,
    io::{self, Read, Seek, SeekFrom, Write},
    path::PathBuf,
};

use wire::{Record, RunId};

use crate::{ExporterError, RunExporter, metric_points::RunUpdate};

/// A longer line is not a fact.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// An exporter to a directory with one `<run>.jsonl` per run.
#[derive(Debug)]
pub struct FileExporter {
    directory: PathBuf,
}

impl FileExporter {
    /// Creates the directory if absent.
    pub fn new(directory: PathBuf) -> Result<Self, ExporterError> {
        let made = fs::create_dir_all(&directory);
        made.map_err(|error| write_error(&directory.display().to_string(), &error))?;
        Ok(Self { directory })
    }

    /// Opens the file for one batch, because there can be more runs than a process may have open
    /// files.
    fn open_run(&self, run: &RunId) -> io::Result<fs::File> {
        let path = self.directory.join(format!("{run}.jsonl"));
        fs::OpenOptions::new().read(true).append(true).create(true).open(path)
    }

    /// Returns the sequence of the last complete line, and cuts off an incomplete one.
    fn last_sequence(&self, run: &RunId) -> io::Result<u64> {
        let mut file = self.open_run(run)?;
        let (end, last) = read_last_line(&mut file)?;
        // A line that a crash cut off is written again.
        file.set_len(end)?;
        let Some(line) = last else { return Ok(0) };
        let record = Record::from_line(&line).map_err(|error| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "its last line is not a fact: \
                                                                {error}"
                ),
            )
        })?;
        Ok(record.sequence)
    }
}

/// Returns the offset of the end of the last complete line, and the line.
fn read_last_line(file: &mut fs::File) -> io::Result<(u64, Option<Vec<u8>>)> {
    let size = file.seek(SeekFrom::End(0))?;
    let mut reach = 64 << 10;
    loop {
        let from = size.saturating_sub(reach);
        file.seek(SeekFrom::Start(from))?;
        let mut tail = Vec::new();
        file.take(reach).read_to_end(&mut tail)?;
        let Some(end) = tail.iter().rposition(|byte| *byte == b'\n') else {
            if from == 0 {
                return Ok((0, None));
            }
            reach = extend_reach(reach)?;
            continue;
        };
        let begin = tail[..end].iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        match begin.or((from == 0).then_some(0)) {
            Some(begin) => return Ok((from + end as u64 + 1, Some(tail[begin..end].to_vec()))),
            None => reach = extend_reach(reach)?,
        }
    }
}

/// Quadruples the distance to search from the end. Fails when the line is too long.
fn extend_reach(reach: u64) -> io::Result<u64> {
    if reach > LINE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its last line is not a fact"));
    }
    Ok(reach * 4)
}

fn write_error(file: &str, error: &io::Error) -> ExporterError {
    ExporterError::from_file_error(format!("write {file}"), error)
}

impl RunExporter for FileExporter {
    async fn read_cursor(&mut self, run: &RunId) -> Result<u64, ExporterError> {
        let name = format!("{run}.jsonl");
        self.last_sequence(run).map_err(|error| write_error(&name, &error))
    }

    async fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        let name = format!("{run}.jsonl");
        let mut file = self.open_run(run).map_err(|error| write_error(&name, &error))?;
        let lines: Vec<u8> = updates.iter().flat_map(|update| update.record.to_line()).collect();
        let whole = file.metadata().map(|about| about.len());
        let written = file.write_all(&lines).and_then(|()| file.sync_data());
        if let (Err(_), Ok(whole)) = (&written, whole) {
            // A retry would repeat lines that were written in part.
            let _ = file.set_len(whole);
        }
        written.map_err(|error| write_error(&name, &error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wire::{Fact, FactBody, FactKey, Subject, v1};

    use super::*;
    use crate::metric_points::UpdateKind;

    fn update(sequence: u64, message: &str) -> RunUpdate {
        let run = RunId::new("r-1").unwrap();
        let body = FactBody::Done(v1::Done { message: message.into(), ..Default::default() });
        let fact = Fact { subject: Subject::new(&run, FactKey::Done), body };
        let record = Arc::new(Record { sequence, time_ms: 1, author: None, fact });
        RunUpdate { record, kind: UpdateKind::Metrics(vec![]) }
    }

    #[tokio::test]
    async fn a_file_contains_its_cursor_after_any_interruption() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunId::new("r-1").unwrap();
        let path = directory.path().join("r-1.jsonl");
        let mut file = FileExporter::new(directory.path().to_owned()).unwrap();
        assert_eq!(file.read_cursor(&run).await.unwrap(), 0);
        // The last line is longer than what is read at first.
        file.write_updates(&run, &[update(3, "a"), update(8, &"b".repeat(100_000))]).await.unwrap();
        let whole = fs::read(&path).unwrap();
        for cut in [&b""[..], b"{\"sequence\": 9", &[b'x'; 200_000]] {
            fs::write(&path, [&whole[..], cut].concat()).unwrap();
            let mut again = FileExporter::new(directory.path().to_owned()).unwrap();
            assert_eq!(again.read_cursor(&run).await.unwrap(), 8);
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        fs::write(&path, "no fact\n").unwrap();
        let wrong = FileExporter::new(directory.path().to_owned()).unwrap().read_cursor(&run).await;
        assert!(matches!(wrong, Err(ExporterError::Permanent { .. })), "{wrong:?}");
    }
}
