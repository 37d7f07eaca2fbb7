//! The command that starts the worker with a policy, and how long it may be silent.

use std::{ffi::OsString, path::Path, time::Duration};

use agent::{ChildCommand, WorkerLauncher};
use wire::WorkKind;

use crate::GeneratorBackend;

/// A worker that reports nothing for this long is hung.
pub(crate) const PROGRESS_TIMEOUT: Duration = Duration::from_secs(300);

/// The lower bound of the adaptive timeout, however quick the worker was before. A GPU's driver may
/// compile for more than a minute before the first token.
pub(crate) const PROGRESS_TIMEOUT_MIN: Duration = Duration::from_secs(150);

/// The manifest digests of base and adapter.
pub(crate) type PolicyKey = (String, String);

/// The files of a policy that a worker loads.
pub(crate) struct PolicyFiles<'a> {
    /// The digests that identify base and adapter.
    pub key: &'a PolicyKey,
    /// `None` for an external server, which has it.
    pub base: Option<&'a Path>,
    pub adapter: Option<&'a Path>,
}

pub(crate) fn worker_command(
    launch: &WorkerLauncher,
    backend: &GeneratorBackend,
    policy: &PolicyFiles<'_>,
    (kind, slots): (WorkKind, u32),
) -> serde_json::Result<ChildCommand> {
    let mut arguments: Vec<OsString> = Vec::new();
    arguments.extend(["--backend".into(), serde_json::to_string(backend)?.into()]);
    for (name, path) in [("--base", policy.base), ("--adapter", policy.adapter)] {
        arguments.extend(path.into_iter().flat_map(|path| [name.into(), path.into()]));
    }
    let (base, adapter) = policy.key;
    arguments.extend(["--base-key".into(), base.into()]);
    arguments.extend(["--adapter-key".into(), adapter.into()]);
    arguments.extend(["--slots".into(), slots.to_string().into()]);
    Ok(launch.worker_command("generate", kind.as_str(), arguments))
}
