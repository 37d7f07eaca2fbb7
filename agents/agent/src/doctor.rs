//! Checks of the host before a role is enabled, and before an order is taken.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use doctor::{DoctorFinding, Severity, TrainingPlan};
use hardware::{HardwareProfile, host_files::LiveFiles, host_snapshot::HostSnapshot};
use tokio::{sync::Mutex, time::Instant};

use crate::nvidia_memory;

/// The host checks with the user's settings. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HostDoctor {
    settings: Arc<DoctorSettings>,
    /// The memory for training on a GPU of NVIDIA; `None` on other hosts.
    nvidia_bytes: Option<Arc<NvidiaMemory>>,
}

/// The bytes of memory for training, and when they were read.
#[derive(Debug, Default)]
struct NvidiaMemory(Mutex<Option<(Instant, u64)>>);

/// Reading the memory of a GPU of NVIDIA wakes it, so it is not read for each check.
const NVIDIA_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct DoctorSettings {
    root: PathBuf,
    ignored: Vec<String>,
    training_bytes: Option<u64>,
}

impl HostDoctor {
    /// Creates the checks of the host whose file system is below `root`, which is `/` except in
    /// tests; runs none yet. Failed checks with one of the `ignored` ids (such as `C-28`) do not
    /// count. `training_bytes` overrides the detected memory for training.
    pub fn new(root: PathBuf, ignored: Vec<String>, training_bytes: Option<u64>) -> Self {
        let settings = Arc::new(DoctorSettings { root, ignored, training_bytes });
        Self { settings, nvidia_bytes: None }
    }

    /// Detects the memory for training as the host of this profile reports it.
    #[must_use]
    pub fn with_profile(self, profile: &HardwareProfile) -> Self {
        Self { nvidia_bytes: profile.is_cuda().then(Arc::default), ..self }
    }

    async fn take_snapshot(&self) -> HostSnapshot {
        let root = self.settings.root.clone();
        let take = move || HostSnapshot::take_snapshot(&LiveFiles::new(root));
        // A snapshot that panicked is empty.
        tokio::task::spawn_blocking(take).await.unwrap_or_default()
    }

    /// Returns the failed check that keeps a role that uses the GPU from running on this host.
    pub(crate) async fn check_role(&self, role: &str) -> Option<DoctorFinding> {
        self.first_failure(doctor::findings_for_role(&self.take_snapshot().await, role))
    }

    /// Returns the first failed check that keeps a planned training from running on this host;
    /// `None` if it may run. Ignored checks do not count. Logs the plan's warnings.
    pub async fn check_plan(
        &self,
        profile: &HardwareProfile,
        plan: &TrainingPlan,
    ) -> Option<DoctorFinding> {
        let findings = doctor::check_plan(&self.take_snapshot().await, profile, plan);
        for DoctorFinding { id, seen, remedy, .. } in
            findings.iter().filter(|finding| finding.severity == Severity::Warn)
        {
            tracing::warn!(id, seen, remedy, "a training as it is planned");
        }
        self.first_failure(findings)
    }

    /// Returns the memory in bytes that a training may use now: the user's setting, otherwise for a
    /// training on the GPU the detected budget. `None` if that is unknown, and without a setting
    /// for a training on the CPU.
    pub async fn training_budget_bytes(&self, on_gpu: bool) -> Option<u64> {
        match (self.settings.training_bytes, &self.nvidia_bytes) {
            (None, Some(known)) if on_gpu => {
                let mut known = known.0.lock().await;
                if known.is_none_or(|(at, _)| at.elapsed() >= NVIDIA_INTERVAL) {
                    *known = read_nvidia_bytes().await.map(|bytes| (Instant::now(), bytes));
                }
                known.map(|(_, bytes)| bytes)
            }
            (None, None) if on_gpu => doctor::memory_budget(&self.take_snapshot().await),
            (setting, _) => setting,
        }
    }

    /// Returns true if the user ignores the check with this id (such as `C-28`).
    pub fn is_ignored(&self, id: &str) -> bool {
        self.settings.ignored.iter().any(|ignored| ignored == id)
    }

    fn first_failure(&self, findings: Vec<DoctorFinding>) -> Option<DoctorFinding> {
        let mut failures =
            findings.into_iter().filter(|finding| finding.severity == Severity::Fail);
        failures.find(|finding| !self.is_ignored(finding.id))
    }
}

async fn read_nvidia_bytes() -> Option<u64> {
    let variable = |name: &str| std::env::var(name).ok();
    let read = move || nvidia_memory::read_budget(Path::new("nvidia-smi"), variable);
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(id: &'static str, severity: Severity) -> DoctorFinding {
        let (seen, remedy) = (String::new(), String::new());
        DoctorFinding { id, severity, seen, why: "", remedy, source: "" }
    }

    #[tokio::test]
    async fn only_a_gpu_of_nvidia_is_asked_for_its_memory() {
        let doctor = |name: &str, setting| {
            let profile = HardwareProfile::load_named(name).unwrap();
            HostDoctor::new("/none".into(), Vec::new(), setting).with_profile(&profile)
        };
        assert_eq!(doctor("rocm", None).training_budget_bytes(true).await, None);
        let cuda = doctor("cuda", None);
        *cuda.nvidia_bytes.as_ref().unwrap().0.lock().await = Some((Instant::now(), 7));
        assert_eq!(cuda.training_budget_bytes(true).await, Some(7));
        assert_eq!(cuda.training_budget_bytes(false).await, None);
        assert_eq!(doctor("cuda", Some(5)).training_budget_bytes(true).await, Some(5));
    }

    #[test]
    fn the_first_failure_that_is_not_ignored_counts() {
        let ignoring = |ids: &[&str]| {
            let ids = ids.iter().map(|&id| id.to_owned()).collect();
            let doctor = HostDoctor::new("/".into(), ids, None);
            let fail = Severity::Fail;
            let findings = [("C-20", Severity::Warn), ("C-28", fail), ("C-34", fail)];
            let findings = findings.map(|(id, severity)| finding(id, severity));
            doctor.first_failure(findings.into()).map(|finding| finding.id)
        };
        assert_eq!(ignoring(&[]), Some("C-28"));
        assert_eq!(ignoring(&["C-28"]), Some("C-34"));
        assert_eq!(ignoring(&["C-28", "C-34"]), None);
    }
}
