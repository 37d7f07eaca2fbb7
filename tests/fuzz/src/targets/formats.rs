//! Files that are converted.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use formats::{convert, gguf::GgufFile, safetensors};
use tempfile::TempDir;

/// Only one input is in a target's file at a time.
struct Place {
    directory: TempDir,
    name: &'static str,
}

impl Place {
    fn with(&self, input: &[u8]) -> PathBuf {
        let path = self.directory.path().join(self.name);
        // Writing over a file would wait for the disk; it may not be there yet.
        let _ = fs::remove_file(&path);
        fs::write(&path, input).expect("a file");
        path
    }
}

macro_rules! place {
    ($name:literal) => {{
        static PLACE: OnceLock<Mutex<Place>> = OnceLock::new();
        let create = || {
            let directory = tempfile::tempdir().expect("a temporary directory");
            Mutex::new(Place { directory, name: $name })
        };
        PLACE.get_or_init(create).lock().unwrap_or_else(PoisonError::into_inner)
    }};
}

/// What is understood is written and read again, and every byte it promises is there.
pub(super) fn gguf(input: &[u8]) {
    let place = place!("model.gguf");
    let path = place.with(input);
    let Ok(file) = GgufFile::open(&path) else { return };
    for tensor in &file.tensors {
        let size = tensor.range.end - tensor.range.start;
        file.read(tensor, size - 1, &mut [0]).expect("it was held against the file's length");
    }
    listed(&path);
    let again = place.with(&formats::fuzzing::rewrite_gguf(&file));
    let again = GgufFile::open(&again).expect("our own");
    let plain = |file: &GgufFile| {
        let tensors = file.tensors.iter().map(|t| (t.name.clone(), t.shape.clone(), t.kind));
        let mut fields = file.fields.clone();
        fields.retain(|(name, _)| name != "general.alignment");
        (format!("{fields:?}"), tensors.collect::<Vec<_>>())
    };
    assert_eq!(plain(&file), plain(&again));
}

/// Every byte that is promised is there.
pub(super) fn safetensors(input: &[u8]) {
    let place = place!("model.safetensors");
    let path = place.with(input);
    let Ok(file) = safetensors::SafetensorsFile::open(&path) else { return };
    for (name, entry) in file.tensor_entries() {
        let tensor = file.get(name).expect("it is listed");
        if entry.range.end > entry.range.start {
            let last = entry.range.end - entry.range.start - 1;
            tensor.read(last, &mut [0]).expect("it was held against the file's length");
        }
        let _ = tensor.float_dtype();
    }
    listed(&path);
}

fn listed(path: &Path) {
    assert!(convert::list_contents(path).is_ok(), "what was understood can be listed");
}
