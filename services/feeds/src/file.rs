//! A file a run, of a fact a line, as in archives. The last whole line says how far it is.

use std::{
    fs,
    io::{self, Read, Seek, SeekFrom, Write},
    path::PathBuf,
};

use wire::{Record, RunId};

use crate::{Sink, SinkError, points::Told};

/// A longer line is no fact.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// A directory of such files.
#[derive(Debug)]
pub struct File {
    directory: PathBuf,
}

impl File {
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(directory: PathBuf) -> Result<Self, SinkError> {
        let made = fs::create_dir_all(&directory);
        made.map_err(|error| refused(&directory.display().to_string(), &error))?;
        Ok(Self { directory })
    }

    /// Opened anew each time: there are more runs than a process may have files.
    fn open(&self, run: &RunId) -> io::Result<fs::File> {
        let path = self.directory.join(format!("{run}.jsonl"));
        fs::OpenOptions::new().read(true).append(true).create(true).open(path)
    }

    fn last(&self, run: &RunId) -> io::Result<u64> {
        let mut file = self.open(run)?;
        let (end, last) = last_line(&mut file)?;
        // What a crash cut off is written again.
        file.set_len(end)?;
        let Some(line) = last else { return Ok(0) };
        let record = Record::from_line(&line).map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidData, format!("its last line is no fact: {error}"))
        })?;
        Ok(record.sequence)
    }
}

/// Where the last whole line ends, and the line.
fn last_line(file: &mut fs::File) -> io::Result<(u64, Option<Vec<u8>>)> {
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
            reach = further(reach)?;
            continue;
        };
        let begin = tail[..end].iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        match begin.or((from == 0).then_some(0)) {
            Some(begin) => return Ok((from + end as u64 + 1, Some(tail[begin..end].to_vec()))),
            None => reach = further(reach)?,
        }
    }
}

fn further(reach: u64) -> io::Result<u64> {
    if reach > LINE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its last line is no fact"));
    }
    Ok(reach * 4)
}

fn refused(file: &str, error: &io::Error) -> SinkError {
    SinkError::of_file(format!("write {file}"), error)
}

impl Sink for File {
    async fn cursor(&mut self, run: &RunId) -> Result<u64, SinkError> {
        let name = format!("{run}.jsonl");
        self.last(run).map_err(|error| refused(&name, &error))
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        let name = format!("{run}.jsonl");
        let mut file = self.open(run).map_err(|error| refused(&name, &error))?;
        let lines: Vec<u8> = told.iter().flat_map(|told| told.record.to_line()).collect();
        let whole = file.metadata().map(|about| about.len());
        let written = file.write_all(&lines).and_then(|()| file.sync_data());
        if let (Err(_), Ok(whole)) = (&written, whole) {
            // A part of it would be there twice.
            let _ = file.set_len(whole);
        }
        written.map_err(|error| refused(&name, &error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wire::{Body, Fact, Place, Subject, v1};

    use super::*;
    use crate::points::What;

    fn told(sequence: u64, message: &str) -> Told {
        let run = RunId::new("r-1").unwrap();
        let body = Body::Done(v1::Done { message: message.into(), ..Default::default() });
        let fact = Fact { subject: Subject::new(&run, Place::Done), body };
        let record = Arc::new(Record { sequence, time_ms: 1, author: None, fact });
        Told { record, what: What::Figures(vec![]) }
    }

    #[tokio::test]
    async fn a_file_says_how_far_it_is_whatever_was_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunId::new("r-1").unwrap();
        let path = directory.path().join("r-1.jsonl");
        let mut file = File::new(directory.path().to_owned()).unwrap();
        assert_eq!(file.cursor(&run).await.unwrap(), 0);
        // The last line is longer than what is read at first.
        file.take(&run, &[told(3, "a"), told(8, &"b".repeat(100_000))]).await.unwrap();
        let whole = fs::read(&path).unwrap();
        for cut in [&b""[..], b"{\"sequence\": 9", &[b'x'; 200_000]] {
            fs::write(&path, [&whole[..], cut].concat()).unwrap();
            let mut again = File::new(directory.path().to_owned()).unwrap();
            assert_eq!(again.cursor(&run).await.unwrap(), 8);
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        fs::write(&path, "no fact\n").unwrap();
        let wrong = File::new(directory.path().to_owned()).unwrap().cursor(&run).await;
        assert!(matches!(wrong, Err(SinkError::Never { .. })), "{wrong:?}");
    }
}
