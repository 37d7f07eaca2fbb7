//! Runs stages: limits and times them, samples the host meanwhile, and records how they ended.

use std::time::{Duration, Instant};

use agent::JobError;
use serde_json::Map;

use crate::{
    report::{StageFigures, StageOutcome, StageReport, shorten_log},
    telemetry_log::TelemetryLog,
};

/// The stages of a burn-in so far.
pub(crate) struct StageRunner<'a> {
    pub(crate) telemetry: TelemetryLog,
    pub(crate) stages: Vec<StageReport>,
    /// The longest time of one stage.
    limit: Duration,
    announce: &'a mut dyn FnMut(&str),
}

impl<'a> StageRunner<'a> {
    /// `announce` receives the name of each stage before it runs.
    pub(crate) fn new(
        telemetry: TelemetryLog,
        limit: Duration,
        announce: &'a mut dyn FnMut(&str),
    ) -> Self {
        Self { telemetry, stages: Vec::new(), limit, announce }
    }

    /// Runs a stage and records it. Returns its result; `None` if it failed or took too long, which
    /// ends its processes.
    pub(crate) async fn run_stage<T>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = anyhow::Result<(T, StageFigures)>>,
    ) -> Option<T> {
        (self.announce)(name);
        let (mark, began) = (self.telemetry.mark_begin(), Instant::now());
        let limit = self.limit;
        let done = match tokio::time::timeout(limit, work).await {
            Ok(done) => done,
            Err(_) => Err(anyhow::anyhow!(
                "not done within {} s; raise --stage-limit, or pass a smaller --model (E107)",
                limit.as_secs()
            )),
        };
        let seconds = began.elapsed().as_secs_f64();
        let host = self.telemetry.summarize_since(&mark);
        let (result, figures, outcome, reason, log) = match done {
            Ok((result, figures)) => {
                (Some(result), figures, StageOutcome::Passed, String::new(), String::new())
            }
            Err(error) => {
                let reason = format!("{error:#}");
                (None, failed_figures(&error), StageOutcome::Failed, reason, worker_log(&error))
            }
        };
        let StageFigures { summary, values: figures } = figures;
        self.stages.push(StageReport {
            name,
            outcome,
            reason,
            seconds,
            summary,
            figures,
            host,
            log,
        });
        result
    }

    /// Records a stage that does not run, with the reason.
    pub(crate) fn skip_stage(&mut self, name: &'static str, reason: &str) {
        self.stages.push(StageReport {
            name,
            outcome: StageOutcome::Skipped,
            reason: reason.to_owned(),
            seconds: 0.0,
            summary: String::new(),
            figures: Map::new(),
            host: Default::default(),
            log: String::new(),
        });
    }
}

/// A failure with measurements, such as a difference that is too large.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct MeasuredFailure {
    /// Has an error code.
    pub(crate) reason: String,
    pub(crate) figures: StageFigures,
}

fn failed_figures(error: &anyhow::Error) -> StageFigures {
    let measured = error.downcast_ref::<MeasuredFailure>();
    measured.map(|failure| failure.figures.clone()).unwrap_or_default()
}

/// Returns the end of the log of the worker that failed.
fn worker_log(error: &anyhow::Error) -> String {
    match error.downcast_ref() {
        Some(JobError::Failed { log_tail, .. }) => shorten_log(log_tail),
        Some(JobError::Stopped | JobError::HandedOver(_)) | None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use hardware::host_files::LiveFiles;
    use serde_json::json;

    use super::*;

    fn run(work: impl Future<Output = anyhow::Result<((), StageFigures)>>) -> StageReport {
        let directory = tempfile::tempdir().unwrap();
        let telemetry = TelemetryLog::start(LiveFiles::new(directory.path()));
        let mut announced = Vec::new();
        let mut announce = |name: &str| announced.push(name.to_owned());
        let limit = Duration::from_millis(200);
        let mut runner = StageRunner::new(telemetry, limit, &mut announce);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(runner.run_stage("train", work));
        let report = runner.stages.pop().unwrap();
        drop(runner);
        assert_eq!(announced, ["train"]);
        report
    }

    #[test]
    fn a_stage_passes_fails_with_its_figures_or_takes_too_long() {
        let figures = || StageFigures::new("3 bytes".into(), json!({ "bytes": 3 }));
        let passed = run(async { Ok(((), figures())) });
        assert_eq!((passed.outcome, passed.reason.as_str()), (StageOutcome::Passed, ""));
        assert_eq!(passed.figures["bytes"], 3);
        let failure = MeasuredFailure { reason: "too far apart (E106)".into(), figures: figures() };
        let failed = run(async { Err(failure.into()) });
        assert_eq!(failed.outcome, StageOutcome::Failed);
        assert_eq!(failed.reason, "too far apart (E106)");
        assert_eq!(failed.summary, "3 bytes");
        let hung = run(std::future::pending());
        assert_eq!(hung.outcome, StageOutcome::Failed);
        assert!(hung.reason.contains("not done within"), "{}", hung.reason);
    }

    #[test]
    fn the_log_of_a_worker_is_kept() {
        let log_tail = "HIP error\n".to_owned();
        let message = "the worker died (E107)".to_owned();
        let fault = agent::JobFault::WorkFailed;
        let failed = run(async { Err(JobError::Failed { fault, message, log_tail }.into()) });
        assert_eq!(failed.log, "HIP error\n");
        assert_eq!(failed.reason, "the worker died (E107)");
    }
}
