//! Capture files: a tar archive, compressed by gzip, of the files that were read under their own
//! paths, and an index of the reads that returned something else.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    path::Path,
};

use anyhow::{Context, bail};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};

use crate::host_files::{CapturedEntry, HostCapture};

const INDEX_FILE: &str = "index.json";

/// Against decompression bombs.
const UNPACKED_BYTES_MAX: u64 = 64 << 20;

/// Writes a capture to a file.
///
/// # Errors
/// When the file cannot be written.
pub fn write_capture(capture: &HostCapture, path: &Path) -> anyhow::Result<()> {
    let mut index = BTreeMap::new();
    let packed = GzEncoder::new(File::create(path)?, Compression::best());
    let mut archive = tar::Builder::new(packed);
    for (place, seen) in &capture.entries {
        if let CapturedEntry::File(bytes) = seen {
            append_file(&mut archive, place.trim_start_matches('/'), bytes)?;
        } else {
            index.insert(place, seen);
        }
    }
    append_file(&mut archive, INDEX_FILE, &serde_json::to_vec_pretty(&index)?)?;
    archive.into_inner()?.finish()?.sync_all()?;
    Ok(())
}

fn append_file(
    archive: &mut tar::Builder<impl Write>,
    name: &str,
    bytes: &[u8],
) -> anyhow::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    Ok(archive.append_data(&mut header, name, bytes)?)
}

/// Reads the file of a capture.
///
/// # Errors
/// When it cannot be read, is no capture, or is too large.
pub fn read_capture(path: &Path) -> anyhow::Result<HostCapture> {
    // One byte above the limit shows that there is more.
    let unpacked = GzDecoder::new(File::open(path)?).take(UNPACKED_BYTES_MAX + 1);
    let mut archive = tar::Archive::new(unpacked);
    let mut capture = HostCapture::default();
    let (mut index, mut total) = (None, 0);
    for entry in archive.entries()? {
        let mut entry = entry.context("not a tar archive; pass a file written by --capture")?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        // A sparse entry is larger than its size in the archive.
        (&mut entry).take(UNPACKED_BYTES_MAX - total + 1).read_to_end(&mut bytes)?;
        total += bytes.len() as u64;
        if total > UNPACKED_BYTES_MAX {
            bail!(
                "unpacks to more than {UNPACKED_BYTES_MAX} bytes; pass a file written by --capture (A115)"
            );
        }
        if name == INDEX_FILE {
            let entries: BTreeMap<String, CapturedEntry> =
                serde_json::from_slice(&bytes).with_context(|| format!("read its {INDEX_FILE}"))?;
            index = Some(entries);
        } else {
            capture.entries.insert(format!("/{name}"), CapturedEntry::File(bytes));
        }
    }
    let index = index
        .with_context(|| format!("no {INDEX_FILE} in it; pass a file written by --capture"))?;
    capture.entries.extend(index);
    Ok(capture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_survives_its_file_and_damage_is_an_error() {
        let seen = [
            ("/proc/meminfo", CapturedEntry::File(b"MemTotal: 5 kB\n".to_vec())),
            (
                "/sys/class/kfd/kfd/topology/nodes",
                CapturedEntry::Names(vec!["0".into(), "1".into()]),
            ),
            ("/sys/class/drm/renderD128/device", CapturedEntry::Link("../../0000:c1:00.0".into())),
            ("/dev/kfd", CapturedEntry::Failed(13)),
            ("/dev/dri/renderD128", CapturedEntry::Usable),
            ("/@data", CapturedEntry::Free(1 << 40)),
        ];
        let capture =
            HostCapture { entries: seen.map(|(path, seen)| (path.to_owned(), seen)).into() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("box.tar.gz");
        write_capture(&capture, &path).unwrap();
        assert_eq!(read_capture(&path).unwrap(), capture);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        read_capture(&path).unwrap_err();
        std::fs::write(&path, "no archive").unwrap();
        read_capture(&path).unwrap_err();
    }
}
