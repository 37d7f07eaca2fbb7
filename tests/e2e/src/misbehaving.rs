//! A wrapper that makes every second worker fail.

use std::path::{Path, PathBuf};

use crate::{Random, write_executable};

/// A way in which a worker fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerFault {
    /// Writes nothing and never ends.
    Hangs,
    /// Allocates memory until it dies.
    EatsMemory,
    /// Writes lines that are not replies, then works.
    Babbles,
    /// Writes half a reply and exits.
    HalfALine,
    /// Writes 100 MiB without a newline.
    Floods,
    Exits,
    /// Works, but ignores the signals that should end it.
    Deaf,
}

impl WorkerFault {
    /// A shell script. `"$@"` is the worker.
    fn script(self) -> &'static str {
        match self {
            Self::Hangs => "exec sleep 100000",
            Self::EatsMemory => "ulimit -v 400000; x=xxxxxxxx; while :; do x=$x$x; done",
            Self::Babbles => {
                "head -c 5000 /dev/urandom | base64; echo '{\"call\": 1}'; echo null; exec \"$@\""
            }
            Self::HalfALine => "printf '{\"call\":1,\"reply\":{\"samp'; exit 0",
            Self::Floods => "head -c 104857600 /dev/zero | tr '\\0' x; exit 0",
            Self::Exits => "echo 'cannot go on' >&2; exit 7",
            Self::Deaf => "trap '' TERM INT HUP; exec \"$@\"",
        }
    }
}

/// The wrapper script and its record of the applied faults.
pub struct FaultyWorkers {
    directory: PathBuf,
}

impl FaultyWorkers {
    /// Creates a wrapper that applies one of these faults to every second worker. The seed
    /// determines the order.
    pub fn create(directory: &Path, faults: &[WorkerFault], seed: u64) -> Self {
        let directory = directory.join("misbehaving");
        std::fs::create_dir_all(&directory).expect("a directory");
        let mut random = Random::new(seed);
        let mut order: Vec<(u64, WorkerFault)> =
            faults.iter().map(|&fault| (random.next_u64(), fault)).collect();
        order.sort_unstable();
        let cases: String = order
            .iter()
            .enumerate()
            .map(|(place, (_, fault))| {
                format!("{place}) echo {fault:?} >>fates; {};;\n", fault.script())
            })
            .collect();
        let text = format!(
            "#!/bin/bash\n\
             cd {here} || exit 1\n\
             exec 9>lock; flock 9\n\
             n=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $n >count\n\
             exec 9>&-\n\
             [ $((n % 2)) = 0 ] && exec \"$@\"\n\
             case $((n / 2 % {faults})) in\n{cases}esac\n",
            here = directory.display(),
            faults = faults.len(),
        );
        write_executable(&directory.join("wrapper"), text);
        Self { directory }
    }

    /// Returns the environment variable that makes agents use the wrapper.
    pub fn env(&self) -> (String, String) {
        let wrapper = self.directory.join("wrapper");
        ("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper.display().to_string())
    }

    /// Returns the faults that were applied, in order.
    pub fn applied(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.join("fates")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}
