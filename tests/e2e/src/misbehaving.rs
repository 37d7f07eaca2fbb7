//! Workers that misbehave: a wrapper that lets every other worker go wrong.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::Random;

/// What may become of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Says nothing, and goes on for ever.
    Hangs,
    /// Asks for memory until there is none, and dies of it.
    EatsMemory,
    /// Writes lines that are no answers, then works.
    Babbles,
    /// Writes half an answer and ends.
    HalfALine,
    /// Writes 100 MiB without a line's end.
    Floods,
    Exits,
    /// Works, but does not listen when told to end.
    Deaf,
}

impl Fate {
    /// In the shell; `"$@"` is the worker.
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

/// The wrapper and what it has done so far.
pub struct Misbehaving {
    directory: PathBuf,
}

impl Misbehaving {
    /// Every other worker meets one of these fates, in an order that the seed has.
    ///
    /// # Panics
    /// When the directory cannot be written.
    pub fn create(directory: &Path, fates: &[Fate], seed: u64) -> Self {
        let directory = directory.join("misbehaving");
        std::fs::create_dir_all(&directory).expect("a directory");
        let mut random = Random::new(seed);
        let mut order: Vec<(u64, Fate)> = fates.iter().map(|&fate| (random.draw(), fate)).collect();
        order.sort_unstable();
        let cases: String = order
            .iter()
            .enumerate()
            .map(|(place, (_, fate))| {
                format!("{place}) echo {fate:?} >>fates; {};;\n", fate.script())
            })
            .collect();
        let text = format!(
            "#!/bin/bash\n\
             cd {here} || exit 1\n\
             exec 9>lock; flock 9\n\
             n=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $n >count\n\
             exec 9>&-\n\
             [ $((n % 2)) = 0 ] && exec \"$@\"\n\
             case $((n / 2 % {fates})) in\n{cases}esac\n",
            here = directory.display(),
            fates = fates.len(),
        );
        let wrapper = directory.join("wrapper");
        std::fs::write(&wrapper, text).expect("a file");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&wrapper, executable).expect("our own file");
        Self { directory }
    }

    /// What the environment of an agent must hold.
    pub fn env(&self) -> (String, String) {
        let wrapper = self.directory.join("wrapper");
        ("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper.display().to_string())
    }

    /// The fates that workers met, in order.
    pub fn met(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.join("fates")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}
