//! A cache of converted base models, one GGUF file for each pair of model and type, shared by all
//! processes of a host.
//!
//! There is no index: the files, their locks and their times are the state. The process that holds
//! a file's lock converts it; others wait. A file is never removed while a process has it open
//! here. If the cache is full, the least recently used file is removed.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use formats::{
    convert::{self, ConversionDtype, ConvertError},
    peft,
};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::converters::{ConverterError, LlamaConverters, ModelConverter};

/// To be raised when the same model would convert to other bytes.
const GENERATION: &str = "v1";

/// The interval of attempts to lock a file that another process converts.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Older scratch files are removed; killed processes leave them.
const SCRATCH_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// A directory of converted models.
///
/// `get_or_convert` returns a cached file, or converts the model:
///
/// 1. Open and lock the cached file (shared), and return it if it exists.
/// 2. Lock the name exclusively in `locks/`; wait while another process converts.
/// 3. Check again, evict old files, convert into `scratch/`, sync, and rename.
#[derive(Debug, Clone)]
pub struct GgufCache {
    directory: PathBuf,
    /// The total size above which files are evicted.
    bytes_max: u64,
}

/// A converted model, protected from eviction until this is dropped.
#[derive(Debug)]
pub struct CachedGguf {
    path: PathBuf,
    /// Holds the shared lock.
    _in_use: File,
}

impl CachedGguf {
    pub fn file_path(&self) -> &Path {
        &self.path
    }
}

#[derive(Debug, thiserror::Error)]
pub enum GgufCacheError {
    #[error("could not {doing} {path}")]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("could not convert {path} for llama.cpp")]
    Convert { path: PathBuf, source: ConvertError },
    #[error(transparent)]
    Converters(#[from] ConverterError),
}

impl GgufCache {
    /// Opens a cache, and creates its directory if missing. The total size is kept below
    /// `bytes_max`, except for a single larger model and for files in use.
    pub fn open(directory: &Path, bytes_max: u64) -> Result<Self, GgufCacheError> {
        for path in [directory.join("scratch"), directory.join("locks")] {
            fs::create_dir_all(&path).map_err(file_error("create", &path))?;
        }
        let cache = Self { directory: directory.to_owned(), bytes_max };
        cache.remove_old_scratch();
        Ok(cache)
    }

    /// Returns the directory for the files of one measurement. Files left there are removed when
    /// the cache is opened a day later.
    pub fn scratch_directory(&self) -> PathBuf {
        self.directory.join("scratch")
    }

    /// Returns the converted model of a directory; converts it if it is not cached. `key`
    /// identifies the model: a digest of its content. A model outside of the table of architectures
    /// is converted by `converters`. If another process converts it, this call waits, and calls
    /// `progress(0, 0)` now and then.
    pub fn get_or_convert(
        &self,
        key: &str,
        model: &Path,
        dtype: ConversionDtype,
        converters: Option<&LlamaConverters>,
        progress: &mut convert::ConvertProgress<'_>,
    ) -> Result<CachedGguf, GgufCacheError> {
        let bytes = estimate_bytes(model);
        match ModelConverter::choose(model, converters)? {
            ModelConverter::Native => {
                let name = cache_file_name(key, dtype.name(), GENERATION);
                self.get_or_write(&name, bytes, progress, |partial, progress| {
                    convert::convert_model(model, partial, dtype, progress)
                        .map_err(convert_error(model))
                })
            }
            ModelConverter::Upstream(converters) => {
                let name = cache_file_name(key, dtype.name(), converters.version());
                self.get_or_write(&name, bytes, progress, |partial, progress| {
                    let mut on_heartbeat = || progress(0, 0);
                    Ok(converters.convert_model(
                        (model, partial),
                        dtype,
                        bytes,
                        &mut on_heartbeat,
                    )?)
                })
            }
        }
    }

    /// Writes an adapter of a base's directory as the GGUF file `converted`. The adapter of a base
    /// outside of the table is converted by `converters`, once, and cached.
    pub fn convert_adapter(
        &self,
        base: &Path,
        adapter: &Path,
        converted: &Path,
        converters: Option<&LlamaConverters>,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), GgufCacheError> {
        let upstream = match ModelConverter::choose(base, converters)? {
            ModelConverter::Native => {
                let written = convert::convert_lora(base, adapter, converted, ConversionDtype::F32);
                return written.map_err(convert_error(adapter));
            }
            ModelConverter::Upstream(upstream) => upstream,
        };
        let files = [
            base.join("config.json"),
            adapter.join(peft::CONFIG_FILE),
            adapter.join(peft::TENSOR_FILE),
        ];
        let name = cache_file_name(&digest_files(&files)?, "lora", upstream.version());
        let bytes = fs::metadata(&files[2]).map_or(0, |data| data.len());
        let mut progress = |_: u64, _: u64| on_heartbeat();
        let cached = self.get_or_write(&name, bytes, &mut progress, |partial, progress| {
            Ok(upstream.convert_adapter((base, adapter, partial), &mut || progress(0, 0))?)
        })?;
        fs::copy(cached.file_path(), converted).map_err(file_error("write", converted))?;
        Ok(())
    }

    /// Returns the cached file of a name; writes it if it is not there.
    fn get_or_write(
        &self,
        name: &str,
        bytes: u64,
        progress: &mut convert::ConvertProgress<'_>,
        write: impl Fn(&Path, &mut convert::ConvertProgress<'_>) -> Result<(), GgufCacheError>,
    ) -> Result<CachedGguf, GgufCacheError> {
        let path = self.directory.join(name);
        loop {
            if let Some(cached) = self.open_cached(&path)? {
                return Ok(cached);
            }
            let lock = self.directory.join("locks").join(name);
            let lock = File::create(&lock).map_err(file_error("create", &lock))?;
            while !try_lock(&lock, FlockOperation::NonBlockingLockExclusive)
                .map_err(file_error("lock", &path))?
            {
                progress(0, 0);
                std::thread::sleep(LOCK_POLL_INTERVAL);
            }
            // Another process may have converted it in the meantime.
            if let Some(cached) = self.open_cached(&path)? {
                return Ok(cached);
            }
            self.evict_until_fits(bytes, None);
            self.write_atomically(&path, |partial| write(partial, progress))?;
            self.evict_until_fits(0, Some(&path));
        }
    }

    /// Renames a temporary file, so that an incomplete file never has the final name.
    fn write_atomically(
        &self,
        path: &Path,
        write: impl FnOnce(&Path) -> Result<(), GgufCacheError>,
    ) -> Result<(), GgufCacheError> {
        let partial = tempfile::Builder::new()
            .suffix(".gguf")
            .tempfile_in(self.scratch_directory())
            .map_err(file_error("create a file in", &self.scratch_directory()))?
            .into_temp_path();
        write(&partial)?;
        // Without the sync, a power cut could leave a named file with missing content.
        File::open(&partial)
            .and_then(|written| written.sync_all())
            .map_err(file_error("write", &partial))?;
        partial.persist(path).map_err(|error| file_error("name", path)(error.error))
    }

    /// Protects an existing file from eviction and marks it as used.
    fn open_cached(&self, path: &Path) -> Result<Option<CachedGguf>, GgufCacheError> {
        loop {
            let in_use = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(file_error("open", path))?,
            };
            let locked = try_lock(&in_use, FlockOperation::NonBlockingLockShared);
            // If the lock fails, the file is being removed. If the path differs after locking, it
            // was removed.
            if locked.map_err(file_error("lock", path))? && is_same_file(&in_use, path) {
                // A failure affects only the order of eviction.
                let _ = in_use.set_modified(SystemTime::now());
                return Ok(Some(CachedGguf { path: path.to_owned(), _in_use: in_use }));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Removes the least recently used files, except `but`, until `bytes` more fit or only files in
    /// use are left.
    fn evict_until_fits(&self, bytes: u64, but: Option<&Path>) {
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
            if Some(path.as_path()) != but && self.try_evict(&path) {
                total = total.saturating_sub(len);
            }
        }
    }

    /// Removes a file unless it is in use. Returns true if it was removed.
    fn try_evict(&self, path: &Path) -> bool {
        let Ok(candidate) = File::open(path) else { return false };
        let free = try_lock(&candidate, FlockOperation::NonBlockingLockExclusive);
        free.unwrap_or(false) && is_same_file(&candidate, path) && fs::remove_file(path).is_ok()
    }

    fn remove_old_scratch(&self) {
        for entry in fs::read_dir(self.scratch_directory()).into_iter().flatten().flatten() {
            let age = entry.metadata().ok().and_then(|data| data.modified().ok()?.elapsed().ok());
            if age.is_some_and(|age| age > SCRATCH_AGE_MAX) {
                let path = entry.path();
                // Another process may remove it at the same time.
                let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
            }
        }
    }
}

/// Returns a digest that identifies a local model. For a directory: settings and tokenizer by
/// content; weights by name, size, time and inode. For a GGUF file, which is never converted: its
/// path, size and time.
pub fn local_model_key(model: &Path) -> Result<String, GgufCacheError> {
    use std::os::unix::fs::MetadataExt;
    let mut hasher = blake3::Hasher::new();
    if model.is_file() {
        let data = fs::metadata(model).map_err(file_error("read", model))?;
        let (seconds, nanos) = (data.mtime(), data.mtime_nsec());
        let identity = format!("{} {seconds}.{nanos} {}", model.display(), data.len());
        return Ok(hasher.update(identity.as_bytes()).finalize().to_hex().to_string());
    }
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = model.join(name);
        match fs::read(&path) {
            Ok(bytes) => drop(hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => drop(hasher.update(b"-")),
            Err(error) => return Err(file_error("read", &path)(error)),
        }
    }
    let mut identity = String::new();
    for path in formats::list_weight_files(model)
        .map_err(|error| file_error("list the weights of", model)(io::Error::other(error)))?
    {
        let data = fs::metadata(&path).map_err(file_error("read", &path))?;
        let place = path.file_name().unwrap_or_default().to_string_lossy();
        let (seconds, nanos) = (data.mtime(), data.mtime_nsec());
        // Writing to a string does not fail.
        let _ = writeln!(identity, "{place} {} {seconds}.{nanos} {}", data.len(), data.ino());
    }
    Ok(hasher.update(identity.as_bytes()).finalize().to_hex().to_string())
}

fn cache_file_name(key: &str, kind: &str, generation: &str) -> String {
    // A digest may begin with its kind and a colon.
    let key: String = key.chars().filter(char::is_ascii_alphanumeric).take(80).collect();
    format!("{key}-{kind}-{generation}.gguf")
}

/// Returns a digest of the content of files.
fn digest_files(paths: &[PathBuf]) -> Result<String, GgufCacheError> {
    let mut hasher = blake3::Hasher::new();
    for path in paths {
        let file = File::open(path).map_err(file_error("read", path))?;
        let length = file.metadata().map_err(file_error("read", path))?.len();
        hasher.update(&length.to_le_bytes());
        hasher.update_reader(file).map_err(file_error("read", path))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The size of the weight files.
fn estimate_bytes(model: &Path) -> u64 {
    let files = formats::list_weight_files(model).unwrap_or_default();
    files.iter().filter_map(|path| fs::metadata(path).ok()).map(|data| data.len()).sum()
}

/// Returns false if another process holds the lock.
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

fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |data: io::Result<fs::Metadata>| data.ok().map(|data| (data.dev(), data.ino()));
    let named = identity(fs::metadata(path));
    named.is_some() && named == identity(file.metadata())
}

fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> GgufCacheError {
    let path = path.to_owned();
    move |source| GgufCacheError::File { doing, path, source }
}

fn convert_error(path: &Path) -> impl FnOnce(ConvertError) -> GgufCacheError {
    let path = path.to_owned();
    move |source| GgufCacheError::Convert { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(bytes_max: u64) -> (tempfile::TempDir, GgufCache) {
        let directory = tempfile::tempdir().unwrap();
        let cache = GgufCache::open(directory.path(), bytes_max).unwrap();
        (directory, cache)
    }

    fn put(cache: &GgufCache, key: &str, age_s: u64) -> PathBuf {
        let path = cache.directory.join(cache_file_name(key, "f16", GENERATION));
        cache
            .write_atomically(&path, |partial| {
                fs::write(partial, [0; 100]).map_err(file_error("write", partial))
            })
            .unwrap();
        let used = SystemTime::now() - Duration::from_secs(age_s);
        File::open(&path).unwrap().set_modified(used).unwrap();
        path
    }

    #[test]
    fn the_least_recently_used_goes_first_and_never_one_in_use() {
        let (_directory, cache) = cache(250);
        let [oldest, middle, newest] =
            [("a", 30), ("b", 20), ("c", 10)].map(|(key, age)| put(&cache, key, age));
        let in_use = cache.open_cached(&oldest).unwrap().unwrap();
        cache.evict_until_fits(100, None);
        let there = [&oldest, &middle, &newest].map(|path| path.exists());
        assert_eq!(there, [true, false, false]);
        drop(in_use);
        cache.evict_until_fits(200, None);
        assert!(!oldest.exists());
    }

    #[test]
    fn using_a_model_makes_it_the_last_to_go() {
        let (_directory, cache) = cache(250);
        let [old, new] = [("a", 30), ("b", 20)].map(|(key, age)| put(&cache, key, age));
        drop(cache.open_cached(&old).unwrap().unwrap());
        cache.evict_until_fits(100, None);
        assert_eq!((old.exists(), new.exists()), (true, false));
    }

    #[test]
    fn a_failed_conversion_leaves_no_file_behind() {
        let (_directory, cache) = cache(250);
        let path = cache.directory.join(cache_file_name("a", "f32", GENERATION));
        let failed = cache.write_atomically(&path, |partial| {
            fs::write(partial, "half").unwrap();
            Err(file_error("write", partial)(io::ErrorKind::StorageFull.into()))
        });
        assert!(failed.is_err() && !path.exists());
        assert_eq!(fs::read_dir(cache.scratch_directory()).unwrap().count(), 0);
    }

    #[test]
    fn a_changed_model_has_another_key() {
        let model = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(model.path().join(name), text).unwrap();
        write("config.json", "{}");
        write("model.safetensors", "weights");
        let before = local_model_key(model.path()).unwrap();
        assert_eq!(local_model_key(model.path()).unwrap(), before);
        write("config.json", "{ }");
        let other_settings = local_model_key(model.path()).unwrap();
        write("model.safetensors", "other weights");
        let keys = [before, other_settings, local_model_key(model.path()).unwrap()];
        assert_eq!(std::collections::BTreeSet::from(keys).len(), 3);
    }
}
