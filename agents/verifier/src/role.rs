//! The agent's side of the verifier role: reads samples, calls one warm worker, writes verdicts.

use std::{collections::BTreeSet, path::Path, time::Instant};

use agent::{
    AgentRole, JobError, LeasedJob, PromptFiles, WorkerError, WorkerLauncher, WorkerProcess,
};
use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt, ready};
use tokio::sync::Semaphore;
use wire::{FactBody, FactKey, WorkKind, derive_environment_seed, v1};

use crate::{
    Toolchain, ToolchainTest,
    calls::{VerifierCall, VerifyItem, VerifyProgress, VerifyReply, VerifyRequest},
    episode::{PlayedEpisode, PlayedTurn},
    grants::is_system_path,
    pipeline::verifier_version,
    tools::{ToolNeed, required_tools},
    warm_worker::{SILENCE_LIMIT, WarmWorker},
};

/// One job uses all cores that it may use.
const JOBS_MAX: usize = 1;

/// The verifier role of an agent. It holds one job at a time and keeps one worker running between
/// jobs.
pub struct VerifierRole {
    toolchain: Toolchain,
    toolchain_test: ToolchainTest,
    job_permits: Semaphore,
    worker: WarmWorker,
    prompt_files: PromptFiles,
}

impl VerifierRole {
    /// Tests the toolchain of this host, which takes up to two seconds, and creates the role.
    pub fn open(launch: WorkerLauncher, toolchain: Toolchain) -> Self {
        let (toolchain, toolchain_test) = toolchain.test_host();
        if let Some(problem) = &toolchain_test.unmasked {
            tracing::error!(
                problem,
                "--allow-command: the agent's keys cannot be hidden from commands here, so they do \
                 not run outside the sandbox (V105)"
            );
        }
        for command in &toolchain.grants.commands {
            tracing::warn!(
                command = %command.display(),
                "--allow-command: anyone who can submit runs can start this outside the sandbox, \
                 with arguments and input of their choice"
            );
        }
        match &toolchain_test.contained {
            Ok(layers) => {
                tracing::info!(tools = toolchain.tools.list_versions(), layers, "verifier");
            }
            Err(problem) => tracing::warn!(
                problem,
                "programs cannot be contained here: runs whose verifiers run programs are left to \
                 other boxes"
            ),
        }
        Self {
            toolchain,
            toolchain_test,
            job_permits: Semaphore::new(JOBS_MAX),
            worker: WarmWorker::new(launch, "verify"),
            prompt_files: PromptFiles::default(),
        }
    }

    /// Retries errors on other hosts first, if they may avoid them.
    async fn run_job(&self, job: &LeasedJob) -> Result<(), JobError> {
        let _room = self.job_permits.acquire().await.map_err(JobError::retryable_failure)?;
        let FactBody::Samples(samples) = &job.record.fact.body else {
            return Err(JobError::fatal_failure(anyhow!("not samples (E111)")));
        };
        let name = samples.job.parse().map_err(JobError::fatal_failure)?;
        let place = FactKey::Verdicts { cycle: samples.cycle, job: name };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let Some(call) = self.build_request(job, samples).await? else { return Ok(()) };
        let needs = call.verifier.how.as_ref().map(|how| required_tools(how, call.items.iter()));
        let needs = needs.unwrap_or_default();
        self.check_needs(job, &needs).await?;
        let worker = self.worker.ensure_running(&self.toolchain)?;
        let began = Instant::now();
        let total = u32::try_from(call.items.len()).unwrap_or(u32::MAX);
        let verifier = verifier_version(&call.verifier);
        let call = VerifierCall::Verify(call);
        let mut dropped = UnansweredGuard { worker: &worker, answered: false };
        let verified: Result<VerifyReply, _> = worker
            .call_with_progress(
                &call,
                &mut self.worker.launch().silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT),
                |progress| {
                    if let Ok(VerifyProgress { items }) = serde_json::from_value(progress) {
                        job.progress.set_progress(items, total, "verdicts");
                    }
                    ready(())
                },
            )
            .await;
        dropped.answered = true;
        let VerifyReply { verdicts, trouble, is_unreachable } = match verified {
            Ok(verified) => verified,
            Err(WorkerError::Refused(problem)) => {
                return Err(JobError::fatal_failure(anyhow!(problem)));
            }
            Err(error) => {
                // The worker hangs or violates the protocol: restart it.
                worker.kill_group();
                return Err(JobError::from_worker_error(error, &worker).await);
            }
        };
        if let Some(trouble) = trouble {
            self.check_errors(job, &needs, &trouble, is_unreachable).await?;
        }
        let body = v1::Verdicts {
            run: samples.run.clone(),
            cycle: samples.cycle,
            job: samples.job.clone(),
            purpose: samples.purpose,
            agent: job.agent.clone(),
            verifier,
            samples_sequence: job.record.sequence,
            verdicts,
            wall_s: began.elapsed().as_secs_f64(),
            suite: samples.suite.clone(),
        };
        job.write_result(place, FactBody::Verdicts(body)).await
    }

    /// Fails if a verdict with errors is not to be written: the verifier's server or executable is
    /// not there, so that the job is returned until it is, or other agents may avoid the errors.
    async fn check_errors(
        &self,
        job: &LeasedJob,
        needs: &BTreeSet<ToolNeed>,
        trouble: &str,
        is_unreachable: bool,
    ) -> Result<(), JobError> {
        if is_unreachable {
            return Err(JobError::host_unfit(anyhow!(
                "{trouble}; the samples are judged once it is there again (E117)"
            )));
        }
        let others = capable_agents(&job.list_other_agents().await?, needs);
        if job.errors_are_final(&others).await? {
            return Ok(());
        }
        Err(JobError::retryable_failure(anyhow!(
            "some samples could not be judged here: {trouble} (E117)"
        )))
    }

    /// Declines a job that this host cannot judge; the error names the agents that can.
    async fn check_needs(
        &self,
        job: &LeasedJob,
        needs: &BTreeSet<ToolNeed>,
    ) -> Result<(), JobError> {
        let lacking = self.toolchain.missing_needs(needs);
        if lacking.is_empty() {
            return Ok(());
        }
        let contained = lacking.iter().any(|(need, _)| need.runs_in_sandbox());
        let why = match &self.toolchain_test.contained {
            Err(problem) if contained => format!("programs cannot be contained here: {problem}"),
            _ => {
                let lacking: Vec<&str> =
                    lacking.iter().map(|(_, advice)| advice.as_str()).collect();
                format!("this box lacks {}", lacking.join("; "))
            }
        };
        let able = capable_agents(&job.list_other_agents().await?, needs);
        let whom = match &*able {
            [] => {
                "; no connected verifier has it; the run continues by itself when one does".into()
            }
            able => format!("{}{}", v1::Failure::LEFT_TO, able.join(", ")),
        };
        Err(JobError::host_unfit(anyhow!("{why}{whom} (E117)")))
    }

    /// Joins the samples with the fields of their prompts. Returns `None` if the prompts have no
    /// verifier.
    async fn build_request(
        &self,
        job: &LeasedJob,
        samples: &v1::Samples,
    ) -> Result<Option<VerifyRequest>, JobError> {
        let spec = job.read_spec().await?;
        let Some(v1::spec::Kind::Raft(raft)) = spec.kind else {
            return Err(JobError::fatal_failure(anyhow!(
                "runs of this kind are not verified (E111)"
            )));
        };
        let set = raft.find_prompt_set(samples.purpose(), &samples.suite);
        let found = set.and_then(|set| Some((set.file?, set.verifier)));
        let (file, verifier) = found.ok_or_else(|| {
            JobError::fatal_failure(anyhow!(
                "the spec names no prompts of suite {:?} (E111)",
                samples.suite
            ))
        })?;
        let Some(verifier) = verifier else { return Ok(None) };
        let prompts = self.prompt_files.load_prompts(job, file).await?;
        let join = |sample: &v1::samples::Sample| {
            let prompt = prompts.get(&sample.prompt_id).with_context(|| {
                format!("the prompts file has no prompt {:?}", sample.prompt_id)
            })?;
            let item = VerifyItem::from_prompt(prompt, sample.index, sample.text.clone());
            Ok(VerifyItem { episode: played_episode(sample, spec.seed), ..item })
        };
        let items: anyhow::Result<Vec<VerifyItem>> = samples.samples.iter().map(join).collect();
        Ok(Some(VerifyRequest {
            verifier: verifier.clone(),
            items: items.map_err(JobError::fatal_failure)?,
        }))
    }
}

/// Returns the turns of a sample; `None` if it has none.
fn played_episode(sample: &v1::samples::Sample, run_seed: u64) -> Option<PlayedEpisode> {
    let turn = |turn: &v1::samples::Turn| PlayedTurn {
        action: turn.text.clone(),
        observation: turn.observation.clone(),
    };
    (!sample.turns.is_empty()).then(|| PlayedEpisode {
        seed: derive_environment_seed(run_seed, &sample.prompt_id),
        turns: sample.turns.iter().map(turn).collect(),
        is_cut: sample.finish() == v1::samples::Finish::Length,
    })
}

/// Kills the worker if a call is dropped before its answer, for example because the run was
/// cancelled.
struct UnansweredGuard<'a> {
    worker: &'a WorkerProcess,
    answered: bool,
}

impl Drop for UnansweredGuard<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.worker.kill_group();
        }
    }
}

/// Returns the agents that announce everything needed. Needs that agents do not announce are
/// assumed to be met.
fn capable_agents(others: &[v1::AgentStatus], needs: &BTreeSet<ToolNeed>) -> Vec<String> {
    let has = |status: &v1::AgentStatus, need: &ToolNeed| match need {
        ToolNeed::Command { program, paths } => can_run_command(&status.abilities, program, paths),
        _ => {
            let tag = format!("verifier:{}", need.need_tag());
            !need.runs_in_sandbox() || status.abilities.contains(&tag)
        }
    };
    let able = |status: &&v1::AgentStatus| needs.iter().all(|need| has(status, need));
    others.iter().filter(able).map(|status| status.agent.clone()).collect()
}

/// Returns true if the owner allowed the executable, or contains commands and has opened all paths
/// that this one reads. Symbolic links of that host are unknown here.
fn can_run_command(abilities: &[String], program: &str, paths: &[String]) -> bool {
    let has = |ability: &str| abilities.iter().any(|it| it == ability);
    let directory = Path::new(program).parent().filter(|_| program.contains('/'));
    let read = directory.into_iter().chain(paths.iter().map(Path::new));
    let is_open = |path: &Path| {
        let open = abilities.iter().filter_map(|it| it.strip_prefix("verifier:path:"));
        let open: Vec<&str> = open.collect();
        is_system_path(path) || open.iter().any(|open| path.starts_with(open) || *open == program)
    };
    has(&format!("verifier:command:{program}"))
        || has("verifier:command") && read.into_iter().all(is_open)
}

impl AgentRole for VerifierRole {
    fn work_kind(&self) -> WorkKind {
        WorkKind::Verify
    }

    fn wait_for_room(&self) -> BoxFuture<'_, ()> {
        // The job takes its own permit when it starts.
        async { drop(self.job_permits.acquire().await) }.boxed()
    }

    fn describe_engine(&self) -> String {
        match &self.toolchain_test.contained {
            Ok(_) => self.toolchain.tools.list_versions(),
            Err(_) => "no programs: they cannot be contained here; the agent's log says why".into(),
        }
    }

    fn list_abilities(&self) -> Vec<String> {
        self.toolchain.list_abilities()
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.run_job(job).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_left_to_boxes_that_contain_it_or_were_allowed_it() {
        let abilities = |all: &[&str]| all.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        let contains = abilities(&["verifier:command", "verifier:path:/opt/judge"]);
        let allowed = abilities(&["verifier:command:/srv/judge"]);
        let old = abilities(&["verifier:python"]);
        let data = ["/opt/judge/data".to_owned()];
        for (program, paths, expected) in [
            ("judge", &[][..], [true, false]),
            ("/usr/bin/judge", &[], [true, false]),
            ("/opt/judge/run", &data, [true, false]),
            ("/opt/other", &[], [false, false]),
            ("/srv/judge", &[], [false, true]),
            ("judge", &["/etc".to_owned()], [false, false]),
        ] {
            let can = [&contains, &allowed].map(|box_| can_run_command(box_, program, paths));
            assert_eq!(can, expected, "{program}");
            assert!(!can_run_command(&old, program, paths), "{program}");
        }
    }
}
