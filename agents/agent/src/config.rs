//! The identity and settings of an agent.

use std::{path::PathBuf, time::Duration};

use hardware::{KnownStack, StackVersions};
use wire::{AgentId, Pool, v1};

use crate::HostDoctor;

/// The intervals of what an agent does beside its jobs.
#[derive(Debug, Clone, Copy)]
pub struct AgentIntervals {
    /// Between two checks of a host that failed one, or of its memory.
    pub host_check: Duration,
    /// Between two durable records of the status, which the placement of a waiting training reads.
    pub status_record: Duration,
}

/// The versions that an agent works with, as far as they are known before its roles start.
#[derive(Debug, Clone, Default)]
pub struct AgentStack {
    /// The name of its installed stack; empty if it uses other programs of its host.
    pub name: String,
    /// The versions of its host.
    pub host: StackVersions,
    /// Those that are known to work on its accelerator.
    pub known: Option<KnownStack>,
}

impl AgentStack {
    /// Describes the stack with the engines of the roles.
    pub(crate) fn to_proto(&self, engines: &[String]) -> v1::Stack {
        let found = self.host.clone().with_engines(engines);
        let known = self.known.as_ref();
        let differences = known.map(|known| known.list_differences(&found)).unwrap_or_default();
        let StackVersions { kernel, rocm, torch, llama_cpp } = found;
        v1::Stack { name: self.name.clone(), kernel, rocm, torch, llama_cpp, differences }
    }
}

/// The identity and settings of one agent.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Unique in the fleet.
    pub id: AgentId,
    /// The program's version, for users.
    pub version: String,
    pub pool: Pool,
    /// The agent's own directory, for worker logs and other files.
    pub directory: PathBuf,
    /// The time after which an unrenewed lease expires.
    pub lease: Duration,
    /// The name of the host's hardware profile.
    pub profile: String,
    pub stack: AgentStack,
    pub doctor: HostDoctor,
    pub intervals: AgentIntervals,
    /// Requested roles that this process cannot take until it is restarted.
    pub withheld: Vec<v1::Withheld>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_reported_with_its_engines_and_differences() {
        let known = KnownStack {
            kernel: None,
            rocm: None,
            python: "3.12".into(),
            torch: "2.11.0".into(),
            packages: Vec::new(),
            llama_cpp: 11_669,
        };
        let host = StackVersions { kernel: "6.18.9".into(), ..StackVersions::default() };
        let stack = AgentStack { name: "new".into(), host, known: Some(known) };
        let reported = stack.to_proto(&["trainer: pytorch-2.12.0".to_owned()]);
        let names = (reported.name.as_str(), reported.kernel.as_str(), reported.torch.as_str());
        assert_eq!(names, ("new", "6.18.9", "2.12.0"));
        assert_eq!(reported.differences, ["torch 2.12.0, known to work: 2.11.0"]);
        assert_eq!(AgentStack::default().to_proto(&[]), v1::Stack::default());
    }
}
