//! Runs stages: limits and times them, samples the host meanwhile, and records how they ended.

use std::time::{Duration, Instant};

use agent::JobError;
use anyhow::anyhow;
use serde_json::Map;

use crate::{
    report::{StageFigures, StageOutcome, StageReport, shorten_log},
    telemetry_log::TelemetryLog,
};

/// The stages of a burn-in so far.
pub(crate) struct StageRunner<'a> {
    pub(crate) telemetry: TelemetryLog,
    pub(crate) stages: Vec<StageReport>,
    /// True if a stage was skipped because the time of all stages was over.
    pub(crate) is_cut_short: bool,
    began: Instant,
    /// The longest time of one stage, and of all.
    stage_limit: Duration,
    limit: Duration,
    announce: &'a mut dyn FnMut(&str),
}

impl<'a> StageRunner<'a> {
    /// Begins the time of all stages. `limits` are the longest time of one stage and of all;
    /// `announce` receives the name of each stage before it runs.
    pub(crate) fn new(
        telemetry: TelemetryLog,
        (stage_limit, limit): (Duration, Duration),
        announce: &'a mut dyn FnMut(&str),
    ) -> Self {
        let (stages, began) = (Vec::new(), Instant::now());
        Self { telemetry, stages, is_cut_short: false, began, stage_limit, limit, announce }
    }

    /// Runs a stage and records it. Returns its result; `None` if it failed, took too long, which
    /// ends its processes, or was skipped because no time is left.
    pub(crate) async fn run_stage<T>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = anyhow::Result<(T, StageFigures)>>,
    ) -> Option<T> {
        let left = self.limit.saturating_sub(self.began.elapsed());
        if left.is_zero() {
            self.is_cut_short = true;
            let limit = self.limit.as_secs();
            let reason = format!(
                "the {limit} s of --limit are over; raise it, or pass a smaller --model (E107)"
            );
            self.skip_stage(name, &reason);
            return None;
        }
        (self.announce)(name);
        let (mark, began) = (self.telemetry.mark_begin(), Instant::now());
        let done = match tokio::time::timeout(self.stage_limit.min(left), work).await {
            Ok(done) => done,
            Err(_) => Err(self.describe_timeout(left)),
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

    /// Returns the error of a stage that was ended. `left` is the time of all that it had.
    fn describe_timeout(&self, left: Duration) -> anyhow::Error {
        let (stage_limit, limit) = (self.stage_limit.as_secs(), self.limit.as_secs());
        if left < self.stage_limit {
            let left = left.as_secs_f64();
            return anyhow!(
                "not done within {left:.1} s, the rest of --limit {limit}; raise it, or pass a \
                 smaller --model (E107)"
            );
        }
        anyhow!(
            "not done within {stage_limit} s; raise --stage-limit, or pass a smaller --model (E107)"
        )
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

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(work)
    }

    fn run(work: impl Future<Output = anyhow::Result<((), StageFigures)>>) -> StageReport {
        let directory = tempfile::tempdir().unwrap();
        let telemetry = TelemetryLog::start(LiveFiles::new(directory.path()));
        let mut announced = Vec::new();
        let mut announce = |name: &str| announced.push(name.to_owned());
        let limits = (Duration::from_millis(200), Duration::from_secs(60));
        let mut runner = StageRunner::new(telemetry, limits, &mut announce);
        block_on(runner.run_stage("train", work));
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
    fn stages_share_the_time_of_all_and_are_skipped_when_it_is_over() {
        let directory = tempfile::tempdir().unwrap();
        let telemetry = TelemetryLog::start(LiveFiles::new(directory.path()));
        let mut announced = Vec::new();
        let mut announce = |name: &str| announced.push(name.to_owned());
        let limits = (Duration::from_secs(60), Duration::from_millis(200));
        let mut runner = StageRunner::new(telemetry, limits, &mut announce);
        for name in ["train", "serve"] {
            let hung = std::future::pending::<anyhow::Result<((), StageFigures)>>();
            assert_eq!(block_on(runner.run_stage(name, hung)), None);
            assert_eq!(runner.is_cut_short, name == "serve");
        }
        let stages = std::mem::take(&mut runner.stages);
        drop(runner);
        assert_eq!(announced, ["train"]);
        let outcomes = [StageOutcome::Failed, StageOutcome::Skipped];
        assert_eq!([stages[0].outcome, stages[1].outcome], outcomes);
        for StageReport { reason, .. } in &stages {
            assert!(reason.contains("of --limit") && reason.contains("raise it"), "{reason}");
        }
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
