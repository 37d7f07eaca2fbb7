//! Writes the two files of an archive. The same records give the same bytes: the gzip headers
//! contain no time and no host.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

use flate2::{Compression, GzBuilder, write::GzEncoder};
use wire::Record;

use super::sample_lines::SampleJoiner;

/// One line per judged sample.
pub(super) const SAMPLES_FILE: &str = "samples.jsonl.gz";
/// One line per record.
pub(super) const FACTS_FILE: &str = "facts.jsonl.gz";

/// "Unknown" in the operating system field of a gzip header.
const UNKNOWN_SYSTEM: u8 = 255;

pub(super) struct ArchiveWriter {
    joiner: SampleJoiner,
    samples: GzEncoder<File>,
    facts: GzEncoder<File>,
    records: u64,
}

impl ArchiveWriter {
    /// Creates the files in a directory; `joiner` writes the samples.
    pub(super) fn create_files(directory: &Path, joiner: SampleJoiner) -> io::Result<Self> {
        Ok(Self {
            joiner,
            samples: create_gzip(&directory.join(SAMPLES_FILE))?,
            facts: create_gzip(&directory.join(FACTS_FILE))?,
            records: 0,
        })
    }

    /// Writes a record, and the lines of the samples it completes.
    pub(super) fn write(&mut self, record: Record) -> io::Result<()> {
        self.records += 1;
        self.facts.write_all(&record.to_line())?;
        self.samples.write_all(&self.joiner.join_record(record))
    }

    pub(super) fn finish_files(self) -> io::Result<u64> {
        self.samples.finish()?;
        self.facts.finish()?;
        Ok(self.records)
    }
}

fn create_gzip(path: &Path) -> io::Result<GzEncoder<File>> {
    let header = GzBuilder::new().mtime(0).operating_system(UNKNOWN_SYSTEM);
    Ok(header.write(File::create(path)?, Compression::default()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use wire::Fact;

    use super::*;

    #[test]
    fn the_same_records_give_the_same_bytes_and_read_back() {
        let record = |sequence| {
            let fact =
                Fact::from_json("flotilla.r1.selection.1", br#"{"cycle":1,"kept":3}"#).unwrap();
            Record { sequence, time_ms: 8, author: None, fact }
        };
        let write = || {
            let directory = tempfile::tempdir().unwrap();
            let mut files =
                ArchiveWriter::create_files(directory.path(), SampleJoiner::default()).unwrap();
            (1..=3).for_each(|sequence| files.write(record(sequence)).unwrap());
            assert_eq!(files.finish_files().unwrap(), 3);
            [SAMPLES_FILE, FACTS_FILE]
                .map(|name| std::fs::read(directory.path().join(name)).unwrap())
        };
        let [samples, facts] = write();
        assert_eq!([samples, facts.clone()], write());
        let mut text = String::new();
        flate2::read::GzDecoder::new(&facts[..]).read_to_string(&mut text).unwrap();
        let read: Vec<Record> =
            text.lines().map(|line| Record::from_line(line.as_bytes()).unwrap()).collect();
        assert_eq!(read, [record(1), record(2), record(3)]);
    }
}
