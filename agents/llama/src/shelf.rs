//! Converted base models, one GGUF file for each (model, type), shared by all processes of a box.
//!
//! There is no index: files, their locks and their times are the state. A file is converted once,
//! by whoever holds its lock; it is never removed while somebody has it open here; and when the
//! shelf is full, the least recently used goes.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use formats::convert::{self, ConvertError, Dtype};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

/// Raised when the same model would now convert to other bytes.
const GENERATION: &str = "v1";

/// Between looks while another process converts.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What is converted for one measurement and left behind by a killed process is removed after.
const SCRATCH_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// A directory of converted models.
#[derive(Debug, Clone)]
pub struct Shelf {
    directory: PathBuf,
    bytes_max: u64,
}

/// A converted model that stays where it is for as long as this is held.
#[derive(Debug)]
pub struct Shelved {
    path: PathBuf,
    _in_use: File,
}

impl Shelved {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ShelfError {
    #[error("could not {doing} {path}")]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("could not convert {model} for llama.cpp")]
    Convert { model: PathBuf, source: ConvertError },
}

impl Shelf {
    /// Creates the directory if absent. What is on it is kept below `bytes_max`, except for a
    /// single larger model and for what is in use.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn open(directory: &Path, bytes_max: u64) -> Result<Self, ShelfError> {
        for path in [directory.join("scratch"), directory.join("locks")] {
            fs::create_dir_all(&path).map_err(file("create", &path))?;
        }
        let shelf = Self { directory: directory.to_owned(), bytes_max };
        shelf.sweep();
        Ok(shelf)
    }

    /// For files of one measurement; what is left behind here is removed some day.
    pub fn scratch(&self) -> PathBuf {
        self.directory.join("scratch")
    }

    /// What a model directory converts to. `key` is what the model is known by: a digest of its
    /// content. Whoever asks for one that is being converted waits for it, and `progress` hears
    /// (0, 0) now and then.
    ///
    /// # Errors
    /// When the model cannot be converted, or a file cannot be read or written.
    pub fn model(
        &self,
        key: &str,
        model: &Path,
        dtype: Dtype,
        progress: &mut convert::Progress<'_>,
    ) -> Result<Shelved, ShelfError> {
        let name = file_name(key, dtype);
        let path = self.directory.join(&name);
        loop {
            if let Some(shelved) = self.take(&path)? {
                return Ok(shelved);
            }
            let lock = self.directory.join("locks").join(&name);
            let lock = File::create(&lock).map_err(file("create", &lock))?;
            while !try_lock(&lock, FlockOperation::NonBlockingLockExclusive)
                .map_err(file("lock", &path))?
            {
                progress(0, 0);
                std::thread::sleep(LOOK_EVERY);
            }
            // Somebody may have converted it while we waited.
            if let Some(shelved) = self.take(&path)? {
                return Ok(shelved);
            }
            self.make_room(weight_bytes(model), None);
            self.put(&path, |partial| {
                convert::model(model, partial, dtype, progress)
                    .map_err(|source| ShelfError::Convert { model: model.to_owned(), source })
            })?;
            self.make_room(0, Some(&path));
        }
    }

    /// Half a file is never seen under its name.
    fn put(
        &self,
        path: &Path,
        write: impl FnOnce(&Path) -> Result<(), ShelfError>,
    ) -> Result<(), ShelfError> {
        let partial = tempfile::Builder::new()
            .suffix(".gguf")
            .tempfile_in(self.scratch())
            .map_err(file("create a file in", &self.scratch()))?
            .into_temp_path();
        write(&partial)?;
        // A file that was named but not written would be believed after a power cut.
        File::open(&partial)
            .and_then(|written| written.sync_all())
            .map_err(file("write", &partial))?;
        partial.persist(path).map_err(|error| file("name", path)(error.error))
    }

    /// The file if it is there, kept from eviction and marked as used.
    fn take(&self, path: &Path) -> Result<Option<Shelved>, ShelfError> {
        loop {
            let in_use = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(file("open", path))?,
            };
            let locked = try_lock(&in_use, FlockOperation::NonBlockingLockShared);
            // Not ours to lock: it is being removed. Gone after we locked it: it was.
            if locked.map_err(file("lock", path))? && is_at(&in_use, path) {
                // Only the order of eviction suffers.
                let _ = in_use.set_modified(SystemTime::now());
                return Ok(Some(Shelved { path: path.to_owned(), _in_use: in_use }));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Removes the least recently used until so much more fits.
    fn make_room(&self, bytes: u64, but: Option<&Path>) {
        let mut held = Vec::new();
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(data) = entry.metadata() else { continue };
            if data.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
                let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                held.push((used, path, data.len()));
            }
        }
        held.sort();
        let mut total = held.iter().map(|(_, _, len)| len).sum::<u64>().saturating_add(bytes);
        for (_, path, len) in held {
            if total <= self.bytes_max {
                return;
            }
            if Some(path.as_path()) != but && self.evict(&path) {
                total = total.saturating_sub(len);
            }
        }
    }

    fn evict(&self, path: &Path) -> bool {
        let Ok(candidate) = File::open(path) else { return false };
        let free = try_lock(&candidate, FlockOperation::NonBlockingLockExclusive);
        free.unwrap_or(false) && is_at(&candidate, path) && fs::remove_file(path).is_ok()
    }

    fn sweep(&self) {
        for entry in fs::read_dir(self.scratch()).into_iter().flatten().flatten() {
            let age = entry.metadata().ok().and_then(|data| data.modified().ok()?.elapsed().ok());
            if age.is_some_and(|age| age > SCRATCH_AGE_MAX) {
                let path = entry.path();
                // Another process may sweep too.
                let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
            }
        }
    }
}

/// A digest of what a local model is. Of a directory: its settings and tokenizer by content, its
/// weights by name, size, time and inode. Of a GGUF file, which is never converted: its place, size
/// and time.
///
/// # Errors
/// When its files cannot be read.
pub fn local_key(model: &Path) -> Result<String, ShelfError> {
    use std::os::unix::fs::MetadataExt;
    let mut hasher = blake3::Hasher::new();
    if model.is_file() {
        let data = fs::metadata(model).map_err(file("read", model))?;
        let (seconds, nanos) = (data.mtime(), data.mtime_nsec());
        let identity = format!("{} {seconds}.{nanos} {}", model.display(), data.len());
        return Ok(hasher.update(identity.as_bytes()).finalize().to_hex().to_string());
    }
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = model.join(name);
        match fs::read(&path) {
            Ok(bytes) => drop(hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => drop(hasher.update(b"-")),
            Err(error) => return Err(file("read", &path)(error)),
        }
    }
    let mut identity = String::new();
    for path in formats::weight_files(model)
        .map_err(|error| file("list the weights of", model)(io::Error::other(error)))?
    {
        let data = fs::metadata(&path).map_err(file("read", &path))?;
        let place = path.file_name().unwrap_or_default().to_string_lossy();
        let (seconds, nanos) = (data.mtime(), data.mtime_nsec());
        // Writing to a string does not fail.
        let _ = writeln!(identity, "{place} {} {seconds}.{nanos} {}", data.len(), data.ino());
    }
    Ok(hasher.update(identity.as_bytes()).finalize().to_hex().to_string())
}

fn file_name(key: &str, dtype: Dtype) -> String {
    // A digest may come with its kind before it.
    let key: String = key.chars().filter(char::is_ascii_alphanumeric).take(80).collect();
    let dtype = match dtype {
        Dtype::F32 => "f32",
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
        Dtype::Q8_0 => "q8_0",
    };
    format!("{key}-{dtype}-{GENERATION}.gguf")
}

/// About what the model takes when converted.
fn weight_bytes(model: &Path) -> u64 {
    let files = formats::weight_files(model).unwrap_or_default();
    files.iter().filter_map(|path| fs::metadata(path).ok()).map(|data| data.len()).sum()
}

fn try_lock(file: &File, how: FlockOperation) -> io::Result<bool> {
    loop {
        match flock(file, how) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the open file is the one of that name.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |data: io::Result<fs::Metadata>| data.ok().map(|data| (data.dev(), data.ino()));
    let named = identity(fs::metadata(path));
    named.is_some() && named == identity(file.metadata())
}

fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShelfError {
    let path = path.to_owned();
    move |source| ShelfError::File { doing, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shelf(bytes_max: u64) -> (tempfile::TempDir, Shelf) {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(directory.path(), bytes_max).unwrap();
        (directory, shelf)
    }

    fn put(shelf: &Shelf, key: &str, age_s: u64) -> PathBuf {
        let path = shelf.directory.join(file_name(key, Dtype::F16));
        shelf
            .put(&path, |partial| fs::write(partial, [0; 100]).map_err(file("write", partial)))
            .unwrap();
        let used = SystemTime::now() - Duration::from_secs(age_s);
        File::open(&path).unwrap().set_modified(used).unwrap();
        path
    }

    #[test]
    fn the_least_recently_used_goes_first_and_never_one_in_use() {
        let (_directory, shelf) = shelf(250);
        let [oldest, middle, newest] =
            [("a", 30), ("b", 20), ("c", 10)].map(|(key, age)| put(&shelf, key, age));
        let in_use = shelf.take(&oldest).unwrap().unwrap();
        shelf.make_room(100, None);
        let there = [&oldest, &middle, &newest].map(|path| path.exists());
        assert_eq!(there, [true, false, false]);
        drop(in_use);
        shelf.make_room(200, None);
        assert!(!oldest.exists());
    }

    #[test]
    fn using_a_model_makes_it_the_last_to_go() {
        let (_directory, shelf) = shelf(250);
        let [old, new] = [("a", 30), ("b", 20)].map(|(key, age)| put(&shelf, key, age));
        drop(shelf.take(&old).unwrap().unwrap());
        shelf.make_room(100, None);
        assert_eq!((old.exists(), new.exists()), (true, false));
    }

    #[test]
    fn what_fails_half_way_leaves_nothing_behind() {
        let (_directory, shelf) = shelf(250);
        let path = shelf.directory.join(file_name("a", Dtype::F32));
        let failed = shelf.put(&path, |partial| {
            fs::write(partial, "half").unwrap();
            Err(file("write", partial)(io::ErrorKind::StorageFull.into()))
        });
        assert!(failed.is_err() && !path.exists());
        assert_eq!(fs::read_dir(shelf.scratch()).unwrap().count(), 0);
    }

    #[test]
    fn a_changed_model_has_another_key() {
        let model = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(model.path().join(name), text).unwrap();
        write("config.json", "{}");
        write("model.safetensors", "weights");
        let before = local_key(model.path()).unwrap();
        assert_eq!(local_key(model.path()).unwrap(), before);
        write("config.json", "{ }");
        let other_settings = local_key(model.path()).unwrap();
        write("model.safetensors", "other weights");
        let keys = [before, other_settings, local_key(model.path()).unwrap()];
        assert_eq!(std::collections::BTreeSet::from(keys).len(), 3);
    }
}
