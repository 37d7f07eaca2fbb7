//! The verifier role: it reads samples and writes verdicts.
//!
//! `judge` compiles the settings of a verifier and decides; `program` runs programs in the sandbox;
//! `command`, `http` and `model` ask an executable, a server or a model; `environment` replays
//! episodes of several turns; `pipeline` judges many completions at once.
//! An `error` is a failure of the verifier and never a reward of 0. `docs/VERIFIERS.md` lists the
//! inputs and rewards of each verifier.

mod calls;
mod command;
mod endpoint_client;
mod environment;
mod environment_host;
mod episode;
mod fences;
mod grants;
mod host_process;
mod http;
mod judge;
mod judge_result;
mod language;
mod model;
mod offline;
mod pipeline;
mod plugin_answer;
mod program;
mod role;
mod served_commands;
mod toolchain;
mod tools;
mod verdict_cache;
mod warm_worker;
mod worker;

pub use calls::VerifyItem;
pub use environment::EpisodeStep;
pub use environment_host::{ActionError, EnvironmentHost, OpenEnvironment};
pub use episode::{EnvironmentAnswer, PlayedEpisode, PlayedTurn};
pub use grants::{GrantError, OwnerGrants};
pub use offline::{OfflineVerifier, TimedVerdict};
pub use role::VerifierRole;
pub use toolchain::{Toolchain, ToolchainTest};
pub use tools::{VerifierTool, VerifierTools};
pub use worker::serve_verify_calls;

#[doc(hidden)]
pub mod fuzzing {
    use serde::Deserialize;
    use wire::v1::{Verifier, verifier::How};

    pub use crate::calls::fuzz_messages as calls;
    use crate::{calls::VerifyRequest, pipeline, toolchain::Toolchain};

    /// Parses the answer of a command, and the answers of one that keeps running.
    pub fn fuzz_answer(output: &[u8]) {
        let _ = crate::command::parse_answer(output);
        line_programs::fuzzing::fuzz_lines(output);
    }

    /// Judges as the worker does, but starts no program and contacts no endpoint.
    pub fn fuzz_judge(call: &serde_json::Value) {
        let Ok(call) = VerifyRequest::deserialize(call) else { return };
        if !call.verifier.how.as_ref().is_some_and(is_local) {
            return;
        }
        let Ok(verifier) = pipeline::ConfiguredVerifier::new(&call.verifier) else { return };
        pipeline::JudgePipeline::new(Toolchain::without_programs()).judge_items(
            &verifier,
            &call.items,
            1,
            &|_| {},
        );
    }

    /// Returns true if neither a command nor an endpoint is needed.
    fn is_local(how: &How) -> bool {
        let of = |verifier: Option<&Verifier>| {
            verifier.and_then(|verifier| verifier.how.as_ref()).is_none_or(is_local)
        };
        match how {
            How::Command(_) | How::Http(_) | How::LlmJudge(_) | How::Environment(_) => false,
            How::Chain(chain) => chain.stages.iter().all(|stage| of(stage.verifier.as_ref())),
            _ => true,
        }
    }
}
