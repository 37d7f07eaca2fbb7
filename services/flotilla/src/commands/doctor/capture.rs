//! A capture as a file: a tar of what was read, under its own paths, and an index of the looks
//! that found something else than a file's content. Compressed by zstd.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    path::Path,
};

use anyhow::{Context, bail};
use hardware::files::{Capture, Seen};
use serde::{Deserialize, Serialize};

const INDEX: &str = "index.json";

/// What a capture may hold, unpacked.
const BYTES_MAX: u64 = 64 << 20;

/// Of zstd; these are small texts.
const LEVEL: i32 = 9;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry {
    Names(Vec<String>),
    Link(String),
    Free(u64),
    Usable,
    Failed(i32),
}

pub(super) fn write(capture: &Capture, path: &Path) -> anyhow::Result<()> {
    let mut index = BTreeMap::new();
    let mut archive = tar::Builder::new(zstd::Encoder::new(File::create(path)?, LEVEL)?);
    for (place, seen) in &capture.seen {
        let entry = match seen {
            Seen::File(bytes) => {
                append(&mut archive, place.trim_start_matches('/'), bytes)?;
                continue;
            }
            Seen::Names(names) => Entry::Names(names.clone()),
            Seen::Link(link) => Entry::Link(link.clone()),
            Seen::Free(bytes) => Entry::Free(*bytes),
            Seen::Usable => Entry::Usable,
            Seen::Failed(number) => Entry::Failed(*number),
        };
        index.insert(place, entry);
    }
    append(&mut archive, INDEX, &serde_json::to_vec_pretty(&index)?)?;
    archive.into_inner()?.finish()?.sync_all()?;
    Ok(())
}

fn append(archive: &mut tar::Builder<impl Write>, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    Ok(archive.append_data(&mut header, name, bytes)?)
}

pub(super) fn read(path: &Path) -> anyhow::Result<Capture> {
    // One byte more than allowed tells that there is more.
    let unpacked = zstd::Decoder::new(File::open(path)?)?.take(BYTES_MAX + 1);
    let mut archive = tar::Archive::new(unpacked);
    let mut capture = Capture::default();
    let (mut index, mut total) = (None, 0);
    for entry in archive.entries()? {
        let mut entry = entry.context("it is no tar archive; was it made by --capture?")?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        // A sparse entry is larger than what it takes in the archive.
        (&mut entry).take(BYTES_MAX - total + 1).read_to_end(&mut bytes)?;
        total += bytes.len() as u64;
        if total > BYTES_MAX {
            bail!("it unpacks to more than {BYTES_MAX} bytes: no capture does (A115)");
        }
        if name == INDEX {
            let entries: BTreeMap<String, Entry> =
                serde_json::from_slice(&bytes).with_context(|| format!("read its {INDEX}"))?;
            index = Some(entries);
        } else {
            capture.seen.insert(format!("/{name}"), Seen::File(bytes));
        }
    }
    let index = index.with_context(|| format!("it has no {INDEX}; was it made by --capture?"))?;
    capture.seen.extend(index.into_iter().map(|(place, entry)| {
        let seen = match entry {
            Entry::Names(names) => Seen::Names(names),
            Entry::Link(link) => Seen::Link(link),
            Entry::Free(bytes) => Seen::Free(bytes),
            Entry::Usable => Seen::Usable,
            Entry::Failed(number) => Seen::Failed(number),
        };
        (place, seen)
    }));
    Ok(capture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_survives_its_file_and_damage_is_an_error() {
        let seen = [
            ("/proc/meminfo", Seen::File(b"MemTotal: 5 kB\n".to_vec())),
            ("/sys/class/kfd/kfd/topology/nodes", Seen::Names(vec!["0".into(), "1".into()])),
            ("/sys/class/drm/renderD128/device", Seen::Link("../../0000:c1:00.0".into())),
            ("/dev/kfd", Seen::Failed(13)),
            ("/dev/dri/renderD128", Seen::Usable),
            ("/@data", Seen::Free(1 << 40)),
        ];
        let capture = Capture { seen: seen.map(|(path, seen)| (path.to_owned(), seen)).into() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("box.tar.zst");
        write(&capture, &path).unwrap();
        assert_eq!(read(&path).unwrap(), capture);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        read(&path).unwrap_err();
        std::fs::write(&path, "no archive").unwrap();
        read(&path).unwrap_err();
    }
}
