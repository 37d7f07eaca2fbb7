//! What a killed agent held, handed back by the one that is started in its place: nobody
//! need wait until the lease has run out.
//!
//! One small file a job in hand, below the agent's directory, removed when the job is
//! settled. It is a hint: one that is lost or torn costs a lease's wait and nothing else.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bus::{Bus, Delivery};

/// More than any agent holds.
const JOBS_MAX: usize = 1024;

/// Longer is no delivery's name.
const BYTES_MAX: u64 = 1024;

/// The note of one job in hand, for as long as this lives.
pub(crate) struct Note(PathBuf);

impl Note {
    pub(crate) fn leave(directory: &Path, delivery: &Delivery) -> Self {
        let directory = held(directory);
        let path = directory.join(delivery.sequence.to_string());
        let written =
            fs::create_dir_all(&directory).and_then(|()| fs::write(&path, delivery.name()));
        if let Err(error) = written {
            tracing::debug!(%error, "noting a job in hand");
        }
        Self(path)
    }

    /// The lease was kept just now.
    pub(crate) fn renew(&self) {
        if let Ok(file) = File::options().write(true).open(&self.0) {
            // A note that looks old is not used.
            let _ = file.set_modified(SystemTime::now());
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        // It may never have been written.
        let _ = fs::remove_file(&self.0);
    }
}

/// Hands back what this agent's predecessor held, as far as its lease may still run.
pub(crate) async fn hand_back(bus: &Bus, directory: &Path, lease: Duration) {
    let entries = fs::read_dir(held(directory)).into_iter().flatten().flatten();
    for path in entries.take(JOBS_MAX).map(|entry| entry.path()) {
        let young = fs::metadata(&path).is_ok_and(|file| {
            let age = file.modified().ok().and_then(|at| at.elapsed().ok());
            file.len() <= BYTES_MAX && age.is_some_and(|age| age < lease)
        });
        let name = young.then(|| fs::read_to_string(&path).ok()).flatten();
        // Gone first: a name that is trouble is trouble once.
        let _ = fs::remove_file(&path);
        let Some(name) = name else { continue };
        match bus.hand_back(&name).await {
            Ok(()) => tracing::info!(job = %path.display(), "handed back what a killed agent held"),
            Err(error) => tracing::debug!(%error, "handing back what a killed agent held"),
        }
    }
}

fn held(directory: &Path) -> PathBuf {
    directory.join("held")
}
