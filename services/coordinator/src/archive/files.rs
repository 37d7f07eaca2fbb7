//! The two files of an archive. The same records give the same bytes: no time, no host.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Write},
    path::Path,
};

use flate2::{Compression, GzBuilder, write::GzEncoder};
use wire::{JobId, Record};

use super::lines::{Joiner, Kept};

pub(super) const SAMPLES: &str = "samples.jsonl.gz";
pub(super) const FACTS: &str = "facts.jsonl.gz";

/// "Unknown", where a gzip header names the operating system.
const NO_SYSTEM: u8 = 255;

pub(super) struct Files {
    joiner: Joiner,
    samples: GzEncoder<File>,
    facts: GzEncoder<File>,
    records: u64,
}

impl Files {
    pub(super) fn create(
        directory: &Path,
        kept: Kept,
        redrawn: BTreeSet<JobId>,
    ) -> io::Result<Self> {
        Ok(Self {
            joiner: Joiner::new(kept, redrawn),
            samples: create(&directory.join(SAMPLES))?,
            facts: create(&directory.join(FACTS))?,
            records: 0,
        })
    }

    pub(super) fn write(&mut self, record: Record) -> io::Result<()> {
        self.records += 1;
        self.facts.write_all(&record.to_line())?;
        self.samples.write_all(&self.joiner.take(record))
    }

    /// How many records there were.
    pub(super) fn finish(self) -> io::Result<u64> {
        self.samples.finish()?;
        self.facts.finish()?;
        Ok(self.records)
    }
}

fn create(path: &Path) -> io::Result<GzEncoder<File>> {
    let header = GzBuilder::new().mtime(0).operating_system(NO_SYSTEM);
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
            let fact = Fact::decode("flotilla.r1.selection.1", br#"{"cycle":1,"kept":3}"#).unwrap();
            Record { sequence, time_ms: 8, author: None, fact }
        };
        let write = || {
            let directory = tempfile::tempdir().unwrap();
            let mut files = Files::create(directory.path(), Kept::new(), BTreeSet::new()).unwrap();
            (1..=3).for_each(|sequence| files.write(record(sequence)).unwrap());
            assert_eq!(files.finish().unwrap(), 3);
            [SAMPLES, FACTS].map(|name| std::fs::read(directory.path().join(name)).unwrap())
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
