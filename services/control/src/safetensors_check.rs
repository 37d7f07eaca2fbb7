//! A check that a safetensors file is complete: its header determines its length. An interrupted
//! download is detected here and not in a trainer an hour later.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use formats::safetensors::{DeclaredTensors, LENGTH_BYTES, parse_header_length};

/// The reason why a weights file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a safetensors file: {reason}; download it again (M103)")]
    Header { path: PathBuf, reason: String },
    #[error("{path} has {found} bytes, its header says {expected}; download it again (M103)")]
    Truncated { path: PathBuf, expected: u64, found: u64 },
}

/// Checks that a safetensors file is as long as its header requires. Reads only the header.
///
/// # Errors
/// Returns an error if the file cannot be read, its header is invalid, or its length differs.
pub(crate) fn check_weights(path: &Path) -> Result<(), WeightsError> {
    let unread = |source| WeightsError::Read { path: path.to_owned(), source };
    let wrong = |reason: String| WeightsError::Header { path: path.to_owned(), reason };
    let mut file = File::open(path).map_err(unread)?;
    let found = file.metadata().map_err(unread)?.len();
    let mut length = [0; LENGTH_BYTES];
    if found < 8 {
        return Err(wrong(format!("it has {found} bytes")));
    }
    file.read_exact(&mut length).map_err(unread)?;
    let length = parse_header_length(length)
        .map_err(|length| wrong(format!("its header would have {length} bytes")))?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).map_err(unread)?;
    if (header.len() as u64) < length {
        let path = path.to_owned();
        return Err(WeightsError::Truncated { path, expected: 8 + length, found });
    }
    let declared = DeclaredTensors::parse(&header).map_err(|error| wrong(error.to_string()))?;
    let expected = (8 + length).saturating_add(declared.data_bytes);
    if expected == found {
        return Ok(());
    }
    Err(WeightsError::Truncated { path: path.to_owned(), expected, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_are_not_whole_are_told_of() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let length = (header.len() as u64).to_le_bytes();
        let whole = [length.as_slice(), header, &[0; 8]].concat();
        let told = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            check_weights(&path).map_err(|error| error.to_string())
        };
        assert_eq!(told(&whole), Ok(()));
        for (bytes, words) in [
            (&whole[..whole.len() - 1], "its header says"),
            (&whole[..40], "its header says"),
            (&whole[..5], "it has 5 bytes"),
            (b"version https://git-lfs.github.com/spec/v1\n".as_slice(), "header would have"),
            ([length.as_slice(), &[b' '; 300]].concat().as_slice(), "not a safetensors file"),
            ([whole.as_slice(), b"x"].concat().as_slice(), "its header says"),
        ] {
            let error = told(bytes).unwrap_err();
            assert!(error.contains(words) && error.contains("model.safetensors"), "{error}");
        }
    }
}
