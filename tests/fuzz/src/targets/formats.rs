//! File formats that are converted.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use formats::{convert, gguf::GgufFile, safetensors};
use tempfile::TempDir;

/// The file of a target. It holds one input at a time.
struct TargetFile {
    directory: TempDir,
    name: &'static str,
}

impl TargetFile {
    fn write_input(&self, input: &[u8]) -> PathBuf {
        let path = self.directory.path().join(self.name);
        // Overwriting a file would wait for the disk. The file may not exist yet.
        let _ = fs::remove_file(&path);
        fs::write(&path, input).expect("a file");
        path
    }
}

macro_rules! target_file {
    ($name:literal) => {{
        static PLACE: OnceLock<Mutex<TargetFile>> = OnceLock::new();
        let create = || {
            let directory = tempfile::tempdir().expect("a temporary directory");
            Mutex::new(TargetFile { directory, name: $name })
        };
        PLACE.get_or_init(create).lock().unwrap_or_else(PoisonError::into_inner)
    }};
}

/// An accepted file must contain all bytes that it declares, and must be unchanged after it was
/// written and parsed.
pub(super) fn gguf(input: &[u8]) {
    let place = target_file!("model.gguf");
    let path = place.write_input(input);
    let Ok(file) = GgufFile::open(&path) else { return };
    for tensor in &file.tensors {
        let size = tensor.range.end - tensor.range.start;
        file.read(tensor, size - 1, &mut [0]).expect("it was held against the file's length");
    }
    assert_listable(&path);
    let parsed = place.write_input(&formats::fuzzing::rewrite_gguf(&file));
    let parsed = GgufFile::open(&parsed).expect("our own");
    let plain = |file: &GgufFile| {
        let tensors = file.tensors.iter().map(|t| (t.name.clone(), t.shape.clone(), t.kind));
        let mut fields = file.fields.clone();
        fields.retain(|(name, _)| name != "general.alignment");
        (format!("{fields:?}"), tensors.collect::<Vec<_>>())
    };
    assert_eq!(plain(&file), plain(&parsed));
}

/// An accepted file must contain all bytes that it declares.
pub(super) fn safetensors(input: &[u8]) {
    let place = target_file!("model.safetensors");
    let path = place.write_input(input);
    let Ok(file) = safetensors::SafetensorsFile::open(&path) else { return };
    for (name, entry) in file.tensor_entries() {
        let tensor = file.get(name).expect("it is listed");
        if entry.range.end > entry.range.start {
            let last = entry.range.end - entry.range.start - 1;
            tensor.read(last, &mut [0]).expect("it was held against the file's length");
        }
        let _ = tensor.float_dtype();
    }
    assert_listable(&path);
}

fn assert_listable(path: &Path) {
    assert!(convert::list_contents(path).is_ok(), "what was understood can be listed");
}
