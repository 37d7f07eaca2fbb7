//! A program that keeps running and judges pairs as lines of JSON.

use std::{process::Command, time::Duration};

use line_programs::{CommandLauncher, LineBounds, LineFailure, LineProgramPool, PoolSettings};
use serde_json::{Map, Value};
use spec::CommandJudgeSpec;

use crate::{
    error::{AskError, JudgeError},
    preference::{self, Preference},
    shown_pairs::ShownPair,
};

/// Longer than any comparison takes, so that no process is ended between its pairs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Processes of the user's program. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct CommandJudge {
    pool: LineProgramPool,
    timeout: Duration,
}

impl CommandJudge {
    /// Creates a judge, whose processes start with the first requests. Must be called in a tokio
    /// runtime.
    pub(crate) fn new(spec: &CommandJudgeSpec) -> Self {
        let argv = spec.argv.clone();
        let launcher = CommandLauncher::new(move || {
            let mut command = Command::new(argv.first().map_or("", String::as_str));
            command.args(argv.iter().skip(1));
            command
        });
        let bounds = LineBounds {
            start_timeout: Duration::from_secs_f64(spec.start_timeout_s),
            ..LineBounds::default()
        };
        let settings = PoolSettings {
            processes: spec.processes as usize,
            concurrent: 1,
            idle_timeout: IDLE_TIMEOUT,
            bounds,
        };
        let pool = LineProgramPool::new(Box::new(launcher), settings);
        Self { pool, timeout: Duration::from_secs_f64(spec.timeout_s) }
    }

    pub(crate) async fn ask_once(&self, shown: &ShownPair) -> Result<Preference, AskError> {
        let ShownPair { prompt, first, second, .. } = shown;
        let fields = [("prompt", prompt), ("first", first), ("second", second)];
        let request: Map<String, Value> = fields
            .into_iter()
            .map(|(name, text)| (name.to_owned(), text.as_str().into()))
            .collect();
        let reply = self.pool.request_answer(&request, self.timeout).await;
        let reply = reply.map_err(|error| match error.failure {
            LineFailure::NotStarted => {
                AskError::Unavailable(JudgeError::Command { problem: error.to_string() })
            }
            LineFailure::Request
            | LineFailure::TimedOut
            | LineFailure::Broken
            | LineFailure::Interrupted => AskError::unreadable(error.to_string()),
        })?;
        preference::parse_object(&reply).map_err(AskError::unreadable)
    }
}
