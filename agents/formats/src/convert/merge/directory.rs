//! A model directory that is there whole or not at all.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Map, json};
use tempfile::TempDir;

use super::super::ConvertError;
use super::super::output::{self, Output};
use crate::safetensors::Located;
use crate::{SIDE_FILES, SINGLE_FILE};

/// As transformers has it.
const SHARD_BYTES_MAX: u64 = 5_000_000_000;

pub(super) struct Shard {
    pub(super) name: String,
    /// Which of the model's tensors.
    pub(super) tensors: Range<usize>,
}

pub(super) fn shards(tensors: &[Located<'_>]) -> Vec<Shard> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut held = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        let size = super::size(tensor);
        match ranges.last_mut() {
            Some(range) if held + size <= SHARD_BYTES_MAX => {
                range.end = index + 1;
                held += size;
            }
            _ => {
                ranges.push(index..index + 1);
                held = size;
            }
        }
    }
    let count = ranges.len();
    let name = |index: usize| match count {
        1 => SINGLE_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let shard = |(index, tensors)| Shard { name: name(index), tensors };
    ranges.into_iter().enumerate().map(shard).collect()
}

/// Filled under a name of its own beside the final one.
pub(super) struct Directory<'a> {
    out: &'a Path,
    temporary: TempDir,
}

impl<'a> Directory<'a> {
    pub(super) fn create(out: &'a Path) -> Result<Self, ConvertError> {
        let empty = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
        if out.exists() && !empty {
            return Err(ConvertError::Exists { path: out.into() });
        }
        let temporary = tempfile::Builder::new()
            .prefix(".convert-")
            .suffix(".partial")
            .permissions(fs::Permissions::from_mode(0o777))
            .tempdir_in(output::parent(out))
            .map_err(Output::failed(out))?;
        Ok(Self { out, temporary })
    }

    pub(super) fn path(&self) -> &Path {
        self.temporary.path()
    }

    pub(super) fn write_index(
        &self,
        shards: &[Shard],
        tensors: &[Located<'_>],
    ) -> Result<(), ConvertError> {
        if shards.len() < 2 {
            return Ok(());
        }
        let mut map = Map::new();
        for shard in shards {
            for tensor in &tensors[shard.tensors.clone()] {
                map.insert(tensor.name.into(), json!(shard.name));
            }
        }
        let total: u64 = tensors.iter().map(super::size).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        self.write("model.safetensors.index.json", format!("{index:#}\n").as_bytes())
    }

    pub(super) fn copy_side_files(&self, base: &Path) -> Result<(), ConvertError> {
        for name in SIDE_FILES.into_iter().chain(["config.json"]) {
            let from = base.join(name);
            if from.exists() {
                let content =
                    fs::read(&from).map_err(|source| ConvertError::Read { path: from, source })?;
                self.write(name, &content)?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), ConvertError> {
        let path = self.path().join(name);
        let mut out = Output::create(&path)?;
        out.write_all(content).map_err(Output::failed(&path))?;
        out.finish()
    }

    /// Its files are on disk; now it gets its name, which an empty directory may have had.
    pub(super) fn finish(self) -> Result<(), ConvertError> {
        let renamed = fs::rename(self.path(), self.out);
        let synced = renamed
            .and_then(|()| fs::File::open(output::parent(self.out)).and_then(|dir| dir.sync_all()));
        synced.map_err(Output::failed(self.out))?;
        // It has gone from where it was.
        let _ = self.temporary.keep();
        Ok(())
    }
}
