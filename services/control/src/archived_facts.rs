//! The facts of an archived cycle, read from the object store.

use std::io::{BufRead, BufReader, Seek, Write};

use flate2::read::GzDecoder;
use futures::TryStreamExt;
use store::{GetError, Store};
use tokio::sync::mpsc;
use wire::{Record, v1};

use crate::audit::error_chain;

/// The name that `services/coordinator` writes.
const FACTS_FILE: &str = "facts.jsonl.gz";

/// Downloads of one archive before it counts as damaged.
const DOWNLOAD_ATTEMPTS_MAX: u32 = 4;

const RECORDS_AHEAD_MAX: usize = 16;

/// A longer line cannot be a fact, because the bus would not have accepted it.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The reason why an archive cannot be read.
#[derive(Debug)]
pub(crate) struct ArchiveFailure {
    pub why: String,
    /// True if the same call may succeed later.
    pub is_transient: bool,
}

impl From<GetError> for ArchiveFailure {
    fn from(error: GetError) -> Self {
        Self { why: error_chain(&error), is_transient: error.is_transient() }
    }
}

/// Records in log order, up to the end of the file or the first line that cannot be read.
pub(crate) type FactStream = mpsc::Receiver<Result<Record, String>>;

/// Downloads and verifies the whole facts file of an archive, then decodes it line by line on a
/// blocking thread. Defects of the stored object are reported by the audit's check of the store.
pub(crate) async fn open_facts(
    store: &Store,
    archived: &v1::Archived,
) -> Result<FactStream, ArchiveFailure> {
    let no_tree = || ArchiveFailure { why: "its fact names no tree".into(), is_transient: false };
    let tree = archived.tree.as_ref().ok_or_else(no_tree)?;
    let file = download_facts(store, tree).await?;
    let (send, lines) = mpsc::channel(RECORDS_AHEAD_MAX);
    tokio::task::spawn_blocking(move || send_records(file, &send));
    Ok(lines)
}

/// Retries content of the right size with a wrong digest, because the damage may have happened in
/// transit.
async fn download_facts(store: &Store, tree: &v1::Tree) -> Result<std::fs::File, ArchiveFailure> {
    let mut tries = 1;
    loop {
        match download_once(store, tree).await? {
            Err(GetError::Corrupt { same_size: true, .. }) if tries < DOWNLOAD_ATTEMPTS_MAX => {
                tries += 1;
            }
            got => return Ok(got?),
        }
    }
}

/// Downloads into an unnamed temporary file and rewinds it. The outer error is a local I/O error;
/// the inner one is an error of the store.
async fn download_once(
    store: &Store,
    tree: &v1::Tree,
) -> Result<Result<std::fs::File, GetError>, ArchiveFailure> {
    let to_failure = |error: std::io::Error| ArchiveFailure {
        why: format!("keep it here: {error}"),
        is_transient: true,
    };
    let mut file = tempfile::tempfile().map_err(to_failure)?;
    let mut chunks = match store.stream_tree_file(tree, FACTS_FILE).await {
        Ok(chunks) => chunks,
        Err(error) => return Ok(Err(error)),
    };
    loop {
        match chunks.try_next().await {
            Ok(Some(chunk)) => file.write_all(&chunk).map_err(to_failure)?,
            Ok(None) => break,
            Err(error) => return Ok(Err(error)),
        }
    }
    file.rewind().map_err(to_failure)?;
    Ok(Ok(file))
}

/// Stops when the receiver is dropped, or after the first line that cannot be read.
fn send_records(file: std::fs::File, send: &mpsc::Sender<Result<Record, String>>) {
    let mut text = BufReader::new(GzDecoder::new(BufReader::new(file)));
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = std::io::Read::take(&mut text, LINE_BYTES_MAX).read_until(b'\n', &mut line);
        let record = match read {
            Ok(0) => return,
            Ok(_) => Record::from_line(&line).map_err(|error| error_chain(&error)),
            Err(error) => Err(error.to_string()),
        };
        let over = record.is_err();
        if send.blocking_send(record).is_err() || over {
            return;
        }
    }
}
