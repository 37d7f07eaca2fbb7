//! Looks at the box before it is relied on: before a role is taken up, and before an order is.

use std::{path::PathBuf, sync::Arc};

use hardware::{
    Profile,
    doctor::{self, Finding, Plan, Severity},
    files::Live,
    snapshot::Snapshot,
};

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Doctor {
    settings: Arc<Settings>,
}

#[derive(Debug)]
struct Settings {
    root: PathBuf,
    ignored: Vec<String>,
    training_bytes: Option<u64>,
}

impl Doctor {
    /// Looks below `root`, which is `/` but for tests. Failures of the `ignored` ids are none.
    /// `training_bytes` is what a training may plan with, where the user knows better.
    pub fn new(root: PathBuf, ignored: Vec<String>, training_bytes: Option<u64>) -> Self {
        Self { settings: Arc::new(Settings { root, ignored, training_bytes }) }
    }

    async fn look(&self) -> Snapshot {
        let root = self.settings.root.clone();
        let look = move || Snapshot::take(&Live::new(root));
        // A look that panicked saw nothing.
        tokio::task::spawn_blocking(look).await.unwrap_or_default()
    }

    /// What keeps a role that uses the GPU from being done here.
    pub(crate) async fn against_role(&self, role: &str) -> Option<Finding> {
        self.worst(doctor::for_role(&self.look().await, role))
    }

    /// What keeps a training from being done here as it is planned.
    pub async fn against_plan(&self, profile: &Profile, plan: &Plan) -> Option<Finding> {
        let findings = doctor::for_plan(&self.look().await, profile, plan);
        for Finding { id, seen, remedy, .. } in
            findings.iter().filter(|finding| finding.severity == Severity::Warn)
        {
            tracing::warn!(id, seen, remedy, "a training as it is planned");
        }
        self.worst(findings)
    }

    /// What a training may plan with just now; `None` where nobody knows.
    pub async fn training_bytes(&self, on_gpu: bool) -> Option<u64> {
        match self.settings.training_bytes {
            None if on_gpu => doctor::budget(&self.look().await),
            said => said,
        }
    }

    /// Whether the user wants nothing to be made of a finding.
    pub fn ignores(&self, id: &str) -> bool {
        self.settings.ignored.iter().any(|ignored| ignored == id)
    }

    fn worst(&self, findings: Vec<Finding>) -> Option<Finding> {
        let mut failures =
            findings.into_iter().filter(|finding| finding.severity == Severity::Fail);
        failures.find(|finding| !self.ignores(finding.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(id: &'static str, severity: Severity) -> Finding {
        let (seen, remedy) = (String::new(), String::new());
        Finding { id, severity, seen, why: "", remedy, source: "" }
    }

    #[test]
    fn the_first_failure_that_is_not_ignored_counts() {
        let ignoring = |ids: &[&str]| {
            let ids = ids.iter().map(|&id| id.to_owned()).collect();
            let doctor = Doctor::new("/".into(), ids, None);
            let fail = Severity::Fail;
            let findings = [("C-20", Severity::Warn), ("C-28", fail), ("C-34", fail)];
            let findings = findings.map(|(id, severity)| finding(id, severity));
            doctor.worst(findings.into()).map(|finding| finding.id)
        };
        assert_eq!(ignoring(&[]), Some("C-28"));
        assert_eq!(ignoring(&["C-28"]), Some("C-34"));
        assert_eq!(ignoring(&["C-28", "C-34"]), None);
    }
}
