//! The facts of an archived cycle, as the store holds them.

use std::io::{BufRead, BufReader, Seek, Write};

use flate2::read::GzDecoder;
use futures::TryStreamExt;
use store::{GetError, Store};
use tokio::sync::mpsc;
use wire::{Record, v1};

use crate::audit::explain;

/// What `services/coordinator` calls it.
const FACTS: &str = "facts.jsonl.gz";

/// Downloads of one archive that came damaged.
const TRIES_MAX: u32 = 4;

/// Records read ahead of whoever takes them.
const READ_AHEAD: usize = 16;

/// A longer line is no fact: the bus would not have taken it.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// In log order, until one cannot be read.
pub(crate) type Lines = mpsc::Receiver<Result<Record, String>>;

/// Verifies the whole file before a line of it counts. What is wrong with the object itself is
/// found again when the store is looked at.
pub(crate) async fn facts(store: &Store, archived: &v1::Archived) -> Result<Lines, String> {
    let tree = archived.tree.as_ref().ok_or("its fact names no tree")?;
    let file = download(store, tree).await?;
    let (send, lines) = mpsc::channel(READ_AHEAD);
    tokio::task::spawn_blocking(move || read_lines(file, &send));
    Ok(lines)
}

/// Again when it came damaged: that may have happened on the way.
async fn download(store: &Store, tree: &v1::Tree) -> Result<std::fs::File, String> {
    let mut tries = 1;
    loop {
        match download_once(store, tree).await? {
            Err(GetError::Corrupt { same_size: true, .. }) if tries < TRIES_MAX => tries += 1,
            got => return got.map_err(|error| explain(&error)),
        }
    }
}

async fn download_once(
    store: &Store,
    tree: &v1::Tree,
) -> Result<Result<std::fs::File, GetError>, String> {
    let told = |error: std::io::Error| format!("keep it here: {error}");
    let mut file = tempfile::tempfile().map_err(told)?;
    let mut chunks = match store.read_file(tree, FACTS).await {
        Ok(chunks) => chunks,
        Err(error) => return Ok(Err(error)),
    };
    loop {
        match chunks.try_next().await {
            Ok(Some(chunk)) => file.write_all(&chunk).map_err(told)?,
            Ok(None) => break,
            Err(error) => return Ok(Err(error)),
        }
    }
    file.rewind().map_err(told)?;
    Ok(Ok(file))
}

/// Until nobody listens, or a line is wrong.
fn read_lines(file: std::fs::File, send: &mpsc::Sender<Result<Record, String>>) {
    let mut text = BufReader::new(GzDecoder::new(BufReader::new(file)));
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = std::io::Read::take(&mut text, LINE_BYTES_MAX).read_until(b'\n', &mut line);
        let record = match read {
            Ok(0) => return,
            Ok(_) => Record::from_line(&line).map_err(|error| explain(&error)),
            Err(error) => Err(error.to_string()),
        };
        let over = record.is_err();
        if send.blocking_send(record).is_err() || over {
            return;
        }
    }
}
