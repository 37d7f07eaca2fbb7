//! What messages say that takes looking at more than one of their fields.

use crate::v1;

impl v1::Spec {
    /// The kind of run, as users write it.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            Some(v1::spec::Kind::Raft(_)) => "raft",
            Some(v1::spec::Kind::Watched(_)) => "watched",
            Some(v1::spec::Kind::Sft(_)) | None => "sft",
        }
    }
}

impl v1::Quarantine {
    /// Those of a cycle whose samples count no more.
    pub fn jobs_of(&self, cycle: u32) -> impl Iterator<Item = &str> {
        self.jobs.iter().filter(move |job| job.cycle == cycle).map(|job| job.job.as_str())
    }
}
