//! An on-disk list of held leases, one small file for each. A restarted agent returns the leases
//! that a killed one held, so that no job waits until its lease expires. The files are hints: a
//! lost or torn one costs one lease's wait.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bus::{Bus, Delivery};
use wire::WorkKind;

/// No agent holds more jobs.
const LEASE_FILES_MAX: usize = 1024;

/// No delivery name is longer.
const LEASE_FILE_BYTES_MAX: u64 = 1024;

/// The journal file of one held job, removed when this is dropped.
pub(crate) struct LeaseFile(PathBuf);

impl LeaseFile {
    /// Writes the journal file of a delivery. A write error is only logged.
    /// Several roles of an agent may hold the same fact.
    pub(crate) fn create_for(directory: &Path, kind: WorkKind, delivery: &Delivery) -> Self {
        let directory = journal_directory(directory);
        let path = directory.join(format!("{kind}-{}", delivery.sequence));
        let written = fs::create_dir_all(&directory)
            .and_then(|()| fs::write(&path, delivery.ack_subject_name()));
        if let Err(error) = written {
            tracing::debug!(%error, "lease not recorded in the journal");
        }
        Self(path)
    }

    /// Updates the file's modification time after a lease renewal.
    pub(crate) fn mark_renewed(&self) {
        if let Ok(file) = File::options().write(true).open(&self.0) {
            // If this fails, the file looks old and is ignored after a restart.
            let _ = file.set_modified(SystemTime::now());
        }
    }
}

impl Drop for LeaseFile {
    fn drop(&mut self) {
        // The file may never have been written.
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns the deliveries that this agent's predecessor held, if their leases may still run.
/// Removes all journal files.
pub(crate) async fn release_leftover_leases(bus: &Bus, directory: &Path, lease: Duration) {
    let entries = fs::read_dir(journal_directory(directory)).into_iter().flatten().flatten();
    for path in entries.take(LEASE_FILES_MAX).map(|entry| entry.path()) {
        let young = fs::metadata(&path).is_ok_and(|file| {
            let age = file.modified().ok().and_then(|at| at.elapsed().ok());
            file.len() <= LEASE_FILE_BYTES_MAX && age.is_some_and(|age| age < lease)
        });
        let name = young.then(|| fs::read_to_string(&path).ok()).flatten();
        // The file is removed first, so that a harmful name causes trouble only once.
        let _ = fs::remove_file(&path);
        let Some(name) = name else { continue };
        match bus.release_delivery(&name).await {
            Ok(()) => tracing::info!(job = %path.display(), "released a lease of a killed agent"),
            Err(error) => tracing::debug!(%error, "releasing a lease of a killed agent failed"),
        }
    }
}

fn journal_directory(directory: &Path) -> PathBuf {
    directory.join("held")
}
