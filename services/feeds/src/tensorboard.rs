//! TensorBoard, by event files: records of `Event` messages, as TensorFlow's `RecordWriter` frames
//! them (tensorflow/core/lib/io/record_writer.h) and `event.proto` has them. A run's file follows
//! from its facts alone, byte by byte: after a start it is told anew, and what is there already
//! is passed over.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use prost::Message;
use wire::RunId;

use crate::{
    Sink, SinkError,
    points::{Told, What},
};

/// TensorFlow's masked CRC adds it.
const MASK: u32 = 0xa282_ead8;

/// A directory of runs.
#[derive(Debug)]
pub struct TensorBoard {
    directory: PathBuf,
    files: BTreeMap<RunId, Retold>,
}

/// A file that is told from its beginning each time. It is opened anew for each part: there are more
/// runs than a process may have files.
#[derive(Debug)]
struct Retold {
    path: PathBuf,
    /// Told so far.
    told: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

impl TensorBoard {
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, files: BTreeMap::new() }
    }
}

impl Retold {
    fn begin(directory: &Path, begun_ms: u64) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let path = directory.join(format!("events.out.tfevents.{}.flotilla", begun_ms / 1000));
        Ok(Self { path, told: 0 })
    }

    /// What is there already stays as it is; what differs, as another version of this program wrote
    /// it or a full disk cut it off, is written as it is told now.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).open(&self.path)?;
        file.seek(SeekFrom::Start(self.told))?;
        let mut there = Vec::new();
        io::Read::take(&file, bytes.len() as u64).read_to_end(&mut there)?;
        let same = bytes.iter().zip(&there).take_while(|(new, old)| new == old).count();
        let from = self.told + same as u64;
        if same < there.len() {
            file.set_len(from)?;
        }
        file.seek(SeekFrom::Start(from))?;
        file.write_all(&bytes[same..])?;
        self.told += bytes.len() as u64;
        Ok(())
    }
}

impl Sink for TensorBoard {
    async fn cursor(&mut self, _: &RunId) -> Result<u64, SinkError> {
        Ok(0)
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        let directory = self.directory.join(run.as_str());
        let refused = |error| SinkError::of_file(format!("write {}", directory.display()), &error);
        let mut bytes = Vec::new();
        if let Some(first) = told.first().filter(|told| matches!(told.what, What::Begun(_))) {
            let at_ms = first.record.time_ms;
            self.files.insert(run.clone(), Retold::begin(&directory, at_ms).map_err(refused)?);
            let file_version = Some("brain.Event:2".to_owned());
            frame(
                &mut bytes,
                &Event { wall_time: seconds(at_ms), file_version, ..Event::default() },
            );
        }
        for told in told {
            let What::Figures(figures) = &told.what else { continue };
            for figure in figures {
                #[expect(clippy::cast_possible_truncation, reason = "it is what the format has")]
                let simple_value = Some(figure.value as f32);
                let value = Value { tag: figure.key.clone(), simple_value };
                let event = Event {
                    wall_time: seconds(told.record.time_ms),
                    step: i64::try_from(figure.step).unwrap_or(i64::MAX),
                    file_version: None,
                    summary: Some(Summary { value: vec![value] }),
                };
                frame(&mut bytes, &event);
            }
        }
        match self.files.get_mut(run) {
            Some(file) => file.write(&bytes).map_err(refused),
            None => Ok(()),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds far below 2^52")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

fn frame(bytes: &mut Vec<u8>, event: &Event) {
    let event = event.encode_to_vec();
    let length = (event.len() as u64).to_le_bytes();
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(&masked(&length).to_le_bytes());
    bytes.extend_from_slice(&event);
    bytes.extend_from_slice(&masked(&event).to_le_bytes());
}

fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wire::{Body, Fact, Place, Record, Subject, v1};

    use super::*;
    use crate::points::{Begun, Figure};

    fn told(sequence: u64, what: What) -> Told {
        let run = RunId::new("r-1").unwrap();
        let fact = Fact {
            subject: Subject::new(&run, Place::Done),
            body: Body::Done(v1::Done::default()),
        };
        let record = Record { sequence, time_ms: 5_000 + sequence, author: None, fact };
        Told { record: Arc::new(record), what }
    }

    fn story() -> Vec<Told> {
        let begun = Begun { name: "sums".into(), kind: "raft", settings: BTreeMap::new() };
        let figure = |n: u64| Figure { key: "train/loss".into(), value: 0.5, step: n };
        let figures = (2..20).map(|n| told(n, What::Figures(vec![figure(n), figure(n + 1)])));
        std::iter::once(told(1, What::Begun(begun))).chain(figures).collect()
    }

    async fn tell(directory: &Path, parts: &[&[Told]]) -> Vec<u8> {
        let run = RunId::new("r-1").unwrap();
        let mut board = TensorBoard::new(directory.to_owned());
        for part in parts {
            board.take(&run, part).await.unwrap();
        }
        fs::read(directory.join("r-1/events.out.tfevents.5.flotilla")).unwrap()
    }

    #[tokio::test]
    async fn a_file_is_the_same_however_often_its_feed_was_broken_off() {
        let directory = tempfile::tempdir().unwrap();
        let story = story();
        let whole = tell(directory.path(), &[&story]).await;
        let path = directory.path().join("r-1/events.out.tfevents.5.flotilla");
        for cut in [0, 1, 30, whole.len() / 2, whole.len() - 1, whole.len()] {
            fs::write(&path, &whole[..cut]).unwrap();
            assert!(
                tell(directory.path(), &[&story[..1], &story[1..7], &story[7..]]).await == whole
            );
        }
        // As another version wrote it.
        let mut other = whole.clone();
        other[40] ^= 1;
        fs::write(&path, [other, vec![7; 1000]].concat()).unwrap();
        assert!(tell(directory.path(), &[&story[..5], &story[5..]]).await == whole);
    }

    #[test]
    fn records_are_framed_as_tensorflow_s_are() {
        // The first record of a file TensorFlow 2 wrote: version and a wall time of 0.
        let mut bytes = Vec::new();
        let file_version = Some("brain.Event:2".to_owned());
        frame(&mut bytes, &Event { file_version, ..Event::default() });
        assert_eq!(bytes[..8], 15_u64.to_le_bytes());
        assert_eq!(bytes[12..27], *b"\x1a\x0dbrain.Event:2");
        assert_eq!(masked(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(MASK));
    }
}
