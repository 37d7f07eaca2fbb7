//! A model directory that appears complete or not at all.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Map, json};
use tempfile::TempDir;

use super::super::ConvertError;
use super::super::atomic_file::{self, AtomicFile};
use crate::safetensors::LocatedTensor;
use crate::{SIDE_FILES, SINGLE_WEIGHTS_FILE};

/// The limit of transformers.
const SHARD_BYTES_MAX: u64 = 5_000_000_000;

pub(super) struct WeightShard {
    pub(super) name: String,
    pub(super) tensors: Range<usize>,
}

/// Distributes the tensors over files of at most [`SHARD_BYTES_MAX`], in order. A larger tensor
/// gets a file of its own.
pub(super) fn plan_shards(tensors: &[LocatedTensor<'_>]) -> Vec<WeightShard> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut held = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        let size = super::tensor_bytes(tensor);
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
        1 => SINGLE_WEIGHTS_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let shard = |(index, tensors)| WeightShard { name: name(index), tensors };
    ranges.into_iter().enumerate().map(shard).collect()
}

/// A directory that is filled under a temporary name beside the final one.
pub(super) struct AtomicDirectory<'a> {
    out: &'a Path,
    temporary: TempDir,
}

impl<'a> AtomicDirectory<'a> {
    /// Fails if `out` exists and is not empty.
    pub(super) fn create_at(out: &'a Path) -> Result<Self, ConvertError> {
        let empty = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
        if out.exists() && !empty {
            return Err(ConvertError::Exists { path: out.into() });
        }
        let temporary = tempfile::Builder::new()
            .prefix(".convert-")
            .suffix(".partial")
            .permissions(fs::Permissions::from_mode(0o777))
            .tempdir_in(atomic_file::parent_directory(out))
            .map_err(AtomicFile::write_error(out))?;
        Ok(Self { out, temporary })
    }

    pub(super) fn temporary_path(&self) -> &Path {
        self.temporary.path()
    }

    /// Writes no index for a single file.
    pub(super) fn write_index(
        &self,
        shards: &[WeightShard],
        tensors: &[LocatedTensor<'_>],
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
        let total: u64 = tensors.iter().map(super::tensor_bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        self.write("model.safetensors.index.json", format!("{index:#}\n").as_bytes())
    }

    /// Copies `config.json` and the [`SIDE_FILES`] that exist from the base.
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
        let path = self.temporary_path().join(name);
        let mut out = AtomicFile::create_at(&path)?;
        out.write_all(content).map_err(AtomicFile::write_error(&path))?;
        out.commit_file()
    }

    /// Renames the directory, whose files are already synced, also over an empty directory.
    pub(super) fn commit_directory(self) -> Result<(), ConvertError> {
        let renamed = fs::rename(self.temporary_path(), self.out);
        let synced = renamed.and_then(|()| {
            fs::File::open(atomic_file::parent_directory(self.out)).and_then(|dir| dir.sync_all())
        });
        synced.map_err(AtomicFile::write_error(self.out))?;
        // The temporary name no longer exists, so there is nothing to remove.
        let _ = self.temporary.keep();
        Ok(())
    }
}
