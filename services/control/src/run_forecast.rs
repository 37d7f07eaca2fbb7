//! Forecasts of runs: before they start, from the facts of earlier runs and the agents that are
//! there; and of runs that have started, from what the log had at their submission.

mod end_time;
mod memory_needs;
mod probe;

use bus::{PresenceError, ReadError};
use cycle::{Run, describe_missing_roles, is_agent_gone};
use forecast::{
    FleetAgent, FleetEvidence, ForecastQuestion, RunHistory, RunWorkload, compute_price,
    forecast_remaining, forecast_run, measure_watt_hours,
};
use serde::Serialize;
use spec::{BaseSpec, RunSpec, SuiteMeasure, VerifierSpec};
use wire::{RunId, clock, v1};

use crate::{
    FleetControl, RunError, SpecFiles, SubmitError,
    data::{PreparedKind, PreparedRun, PreparedSuite},
};

pub use end_time::parse_end_time;

/// Earlier runs that a forecast learns from.
const RUNS_MAX: usize = 4;

/// The facts of a run from which its speeds follow, as subject patterns.
const MEASURED_FACTS: [&str; 11] = [
    "spec",
    "control.*",
    "cycle.*.*",
    "samples.*.*",
    "verdicts.*.*",
    "scores.*.*",
    "selection.*",
    "order.train.>",
    "checkpoint.>",
    "eval.>",
    "done",
];

/// The reason why a run cannot be forecast.
#[derive(Debug, thiserror::Error)]
pub enum ForecastError {
    #[error("no agents are there; start one with `flotilla agent` (R121)")]
    NoAgents,
    #[error("the run {0} (R121)")]
    MissingRoles(String),
    #[error("{0} has no training to forecast: it is a watched run, or has `raft.cycles: 0` (R121)")]
    NoTraining(String),
    #[error(
        "{0:?} is not a time: write 18:00, 2026-12-01T18:00, or a duration from now such as 8h (R121)"
    )]
    Time(String),
    #[error("the run is to end by {0}, which is in the past (R121)")]
    Past(String),
    #[error("the price of a kWh must be a number from 0 to 1000000, not {0} (R121)")]
    Price(f64),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Presence(#[from] PresenceError),
    #[error("read the log")]
    Read(#[from] ReadError),
}

/// Highest price of a kWh, in any currency.
const PRICE_MAX: f64 = 1e6;

/// A forecast of a run from the facts before its submission, beside its actual course.
#[derive(Debug, Clone, Serialize)]
pub struct ForecastComparison {
    pub forecast: v1::Forecast,
    /// Seconds from the submission to the end, without pauses and waits in the queue; `None` if the
    /// run has not ended.
    pub actual_s: Option<f64>,
    /// Energy of a run that has ended, as [`measure_watt_hours`] finds it.
    pub actual_watt_hours: Option<f64>,
    /// Price of that energy.
    pub actual_price: Option<f64>,
}

/// The ways to recognise runs of the same base.
enum BaseIdentity {
    /// The digest of the manifest.
    Digest(String),
    /// The beginning of the tree's path in the store.
    Path(String),
}

impl BaseIdentity {
    fn of_run(run: &Run) -> Self {
        let tree = run.spec.base.as_ref().and_then(|base| base.tree.as_ref());
        Self::Digest(tree.map_or_else(String::new, |it| it.manifest.clone()))
    }

    fn matches(&self, spec: &v1::Spec) -> bool {
        let tree = spec.base.as_ref().and_then(|base| base.tree.as_ref());
        tree.is_some_and(|tree| match self {
            Self::Digest(digest) => tree.manifest == *digest,
            Self::Path(path) => tree.path.starts_with(path.as_str()),
        })
    }
}

impl FleetControl {
    /// Checks a spec as [`FleetControl::check_spec`] does, and forecasts its first run. Stores and
    /// starts nothing.
    ///
    /// # Errors
    /// When the spec is wrong or trains nothing, an agent that the run needs is not there, or the
    /// request is wrong.
    pub async fn forecast_spec(
        &self,
        yaml: &str,
        files: &SpecFiles,
        request: &v1::ForecastRequest,
    ) -> Result<(v1::DataReport, v1::Forecast), ForecastError> {
        let question = check_request(request, clock::unix_time().as_secs_f64())?;
        let (report, first, prepared) = self.check_runs(yaml, files).await?;
        let other_model_type = self.find_other_model_type(&first.base, files).await;
        let spec = v1::Spec { other_model_type, ..describe_spec(&first, &prepared) };
        let workload = RunWorkload::from_spec(&spec);
        let workload = workload.ok_or_else(|| ForecastError::NoTraining(first.name.clone()))?;
        let statuses = self.require_agents(&spec).await?;
        let base = self.identify_base(&first.base).await?;
        let runs = self.list_runs().await?;
        let (histories, same) = self.read_histories(&runs, &base, u64::MAX).await?;
        let now_s = clock::unix_seconds();
        let useful = |status| find_useful_roles(status, &spec.pool, now_s);
        let agents: Vec<FleetAgent> = statuses.iter().filter_map(useful).collect();
        let evidence = FleetEvidence::from_histories(&workload, &histories, !same, &agents);
        let mut forecast =
            forecast_run(&workload, &evidence, ForecastQuestion { seed: spec.seed, ..question });
        match self.training_memory(&first.base, files, &spec).await {
            Ok(needed_bytes) => {
                let is_trainer = |status: &&v1::AgentStatus| {
                    let trains =
                        |it: &FleetAgent| it.name == status.agent && it.has_role("trainer");
                    agents.iter().any(trains)
                };
                let memory =
                    statuses.iter().filter(is_trainer).map(|status| v1::forecast::Memory {
                        agent: status.agent.clone(),
                        needed_bytes,
                        available_bytes: usable_training_bytes(status),
                        used_bytes: 0,
                    });
                forecast.memory.extend(memory);
            }
            Err(error) => forecast.assumed.push(format!("the memory suffices: {error}")),
        }
        Ok((report, forecast))
    }

    /// Returns the agents of the fleet. Fails if one that the run needs is not there.
    async fn require_agents(&self, spec: &v1::Spec) -> Result<Vec<v1::AgentStatus>, ForecastError> {
        let statuses = self.list_agents().await?;
        if statuses.is_empty() {
            return Err(ForecastError::NoAgents);
        }
        match describe_missing_roles(spec, &statuses, clock::unix_seconds()) {
            missing if missing.is_empty() => Ok(statuses),
            missing => Err(ForecastError::MissingRoles(missing)),
        }
    }

    /// Forecasts a run from the facts before its submission, for the agents that worked on it.
    ///
    /// # Errors
    /// When the run is unknown, watched or without training, or the price of a kWh is wrong.
    pub async fn forecast_submitted_run(
        &self,
        id: &RunId,
        price_per_kwh: Option<f64>,
    ) -> Result<ForecastComparison, ForecastError> {
        let request = v1::ForecastRequest { by: None, price_per_kwh };
        let question = check_request(&request, 0.0)?;
        let runs = self.list_runs().await?;
        let run = runs.iter().find(|run| run.id == *id);
        let run = run.ok_or_else(|| RunError::Unknown(id.clone()))?;
        let workload = RunWorkload::from_spec(&run.spec);
        let workload = workload.ok_or_else(|| ForecastError::NoTraining(id.to_string()))?;
        let base = BaseIdentity::of_run(run);
        let (histories, same) = self.read_histories(&runs, &base, run.spec_sequence).await?;
        let own = self.read_history(id, u64::MAX).await?;
        let agents = own.as_ref().map(RunHistory::list_participants).unwrap_or_default();
        let evidence = FleetEvidence::from_histories(&workload, &histories, !same, &agents);
        let question = ForecastQuestion { seed: run.spec.seed, ..question };
        let mut forecast = forecast_run(&workload, &evidence, question);
        let used = own.as_ref().map(RunHistory::peak_training_memory).unwrap_or_default();
        forecast.memory = self.compare_training_memory(&run.spec, used).await;
        let actual_s = run.ended_ms.map(|ended| {
            let working = ended.saturating_sub(run.submitted_ms).saturating_sub(run.halted_ms);
            working as f64 / 1000.0
        });
        let ended = own.filter(|_| actual_s.is_some());
        let actual_watt_hours = ended.and_then(|own| measure_watt_hours(&own, &histories));
        let actual_price = actual_watt_hours
            .zip(price_per_kwh)
            .map(|(energy, price)| compute_price(energy, price));
        Ok(ForecastComparison { forecast, actual_s, actual_watt_hours, actual_price })
    }

    /// Forecasts the seconds until a run ends, from its own facts and those of the newest runs of
    /// the same base. `None` if it does not work now, or if none of them has trained.
    pub async fn forecast_remaining(
        &self,
        id: &RunId,
    ) -> Result<Option<v1::forecast::Range>, ForecastError> {
        let runs = self.list_runs().await?;
        let run = runs.iter().find(|run| run.id == *id);
        let run = run.ok_or_else(|| RunError::Unknown(id.clone()))?;
        let is_working = run.current_state() == v1::run::State::Running && !run.is_halted();
        let workload = RunWorkload::from_spec(&run.spec).filter(|_| is_working);
        let (Some(workload), Some(own)) = (workload, self.read_history(id, u64::MAX).await?) else {
            return Ok(None);
        };
        let base = BaseIdentity::of_run(run);
        let (histories, same) = self.read_histories(&runs, &base, u64::MAX).await?;
        if !same || !histories.iter().any(RunHistory::has_trained) {
            return Ok(None);
        }
        let statuses = self.list_agents().await?;
        let (now_ms, now_s) = (clock::unix_millis(), clock::unix_seconds());
        let useful = |status| find_useful_roles(status, &run.spec.pool, now_s);
        let agents: Vec<FleetAgent> = statuses.iter().filter_map(useful).collect();
        let evidence = FleetEvidence::from_histories(&workload, &histories, false, &agents);
        let progress = own.read_progress(now_ms, run.worked_ms(now_ms));
        Ok(forecast_remaining(&workload, &evidence, progress, run.spec.seed))
    }

    /// Reads the newest runs before a position of the log: those of the base, or those of others if
    /// no run has trained it. The second value is true for those of the base.
    async fn read_histories(
        &self,
        runs: &[Run],
        base: &BaseIdentity,
        before: u64,
    ) -> Result<(Vec<RunHistory>, bool), ReadError> {
        let (chosen, is_same) = choose_measured_runs(runs, base, before);
        let mut histories = Vec::new();
        for run in chosen.into_iter().take(RUNS_MAX) {
            histories.extend(self.read_history(&run.id, before).await?);
        }
        Ok((histories, is_same))
    }

    async fn read_history(
        &self,
        run: &RunId,
        before: u64,
    ) -> Result<Option<RunHistory>, ReadError> {
        let filters = MEASURED_FACTS.map(|kind| format!("flotilla.{run}.{kind}"));
        let mut records = self.read_records(filters.to_vec()).await?;
        records.retain(|record| record.sequence < before);
        Ok(RunHistory::from_records(&records))
    }

    async fn identify_base(&self, base: &BaseSpec) -> Result<BaseIdentity, SubmitError> {
        let digest =
            |tree: Option<v1::Tree>| BaseIdentity::Digest(tree.unwrap_or_default().manifest);
        if let Some(name) = &base.checkpoint {
            return Ok(digest(self.find_base_checkpoint(name).await?.tree));
        }
        if let Some(name) = &base.channel {
            return Ok(digest(self.find_channel_model(name).await?.base));
        }
        let Some(model) = &base.model else { return Ok(BaseIdentity::Path("models/init-".into())) };
        Ok(BaseIdentity::Path(match model.strip_prefix("store:") {
            Some(path) => path.trim_end_matches('/').to_owned(),
            None => {
                let name = model.split('@').next().unwrap_or_default().trim_end_matches('/');
                format!("models/{}-", name.rsplit('/').next().unwrap_or_default())
            }
        }))
    }
}

/// Returns the runs before a position of the log that show how long work takes: those of the base,
/// or those of others if no run has trained it. The second value is true for those of the base. Newer
/// ones come first, and those that failed or were cancelled last. A run counts once it has ended well
/// or a cycle of it is done.
fn choose_measured_runs<'a>(
    runs: &'a [Run],
    base: &BaseIdentity,
    before: u64,
) -> (Vec<&'a Run>, bool) {
    use v1::run::State::{Cancelled, Failed, Succeeded};
    let has_worked = |run: &Run| {
        // The list of runs has no cycles of SFT runs.
        run.current_state() == Succeeded || run.cycles.values().any(|cycle| cycle.done.is_some())
    };
    let mut chosen: Vec<&Run> = runs
        .iter()
        .rev()
        .filter(|run| run.spec_sequence < before && has_worked(run))
        .filter(|run| !run.is_watched() && !run.spec.only_measures())
        .collect();
    chosen.sort_by_key(|run| matches!(run.current_state(), Failed | Cancelled));
    let is_same = chosen.iter().any(|run| base.matches(&run.spec));
    if is_same {
        chosen.retain(|run| base.matches(&run.spec));
    }
    (chosen, is_same)
}

/// Returns the memory that a training may use on an agent: without a limit, that of its box if it
/// has no GPU; 0 if unknown.
fn usable_training_bytes(status: &v1::AgentStatus) -> u64 {
    match status.training_bytes {
        0 if status.profile == "cpu" => status.memory_bytes,
        known => known,
    }
}

fn check_request(
    request: &v1::ForecastRequest,
    now_s: f64,
) -> Result<ForecastQuestion, ForecastError> {
    if let Some(price) = request.price_per_kwh.filter(|it| !(0.0..=PRICE_MAX).contains(it)) {
        return Err(ForecastError::Price(price));
    }
    let within_s = request.by.as_ref().map(|by| by.seconds as f64 - now_s);
    if let (Some(by), Some(within)) = (&request.by, within_s)
        && within <= 0.0
    {
        return Err(ForecastError::Past(end_time::format_end_time(by)));
    }
    Ok(ForecastQuestion { within_s, price_per_kwh: request.price_per_kwh, seed: 0 })
}

/// Returns an agent with the roles in which it may work for a pool; `None` if it has none now.
fn find_useful_roles(status: &v1::AgentStatus, pool: &str, now_s: u64) -> Option<FleetAgent> {
    let is_ready = status.state() == v1::agent_status::State::Ready;
    let serves_all = |role: &String| ["verifier", "scorer", "evaluator"].contains(&role.as_str());
    let mut agent = FleetAgent::from_status(status);
    agent.roles.retain(|role| status.pool == pool || serves_all(role));
    (is_ready && !is_agent_gone(status, now_s) && !agent.roles.is_empty()).then_some(agent)
}

/// Returns the spec of a run as the `spec` fact would have it, without files and base.
pub(crate) fn describe_spec(spec: &RunSpec, prepared: &PreparedRun) -> v1::Spec {
    let blob = |bytes: usize| Some(v1::Blob { bytes: bytes as u64, ..v1::Blob::default() });
    let kind = match (&prepared.kind, &spec.raft, &spec.sft) {
        (PreparedKind::Raft { prompts, heldout }, Some(raft), _) => {
            v1::spec::Kind::Raft(v1::spec::Raft {
                prompt_count: prompts.prompt_count(),
                heldout_count: heldout.as_ref().map_or(0, |file| file.prompt_count()),
                verifier: raft.verifier.as_ref().and_then(VerifierSpec::to_proto),
                teacher: raft.teacher.as_ref().map(|_| v1::Tree::default()),
                prompt_suites: describe_prompt_suites(spec, &prepared.suites),
                ..raft.to_proto(&spec.measured_suites())
            })
        }
        (PreparedKind::Sft { dataset }, _, Some(sft)) => v1::spec::Kind::Sft(v1::spec::Sft {
            dataset: blob(dataset.len()),
            training: Some(sft.training.to_proto(sft.lora.as_ref())),
        }),
        _ => unreachable!("prepared by the same section"),
    };
    let texts = spec.evals.iter().filter(|suite| suite.text.is_some());
    v1::Spec {
        seed: spec.seed,
        pool: spec.pool.clone(),
        suites: texts.map(|_| v1::Suite::default()).collect(),
        kind: Some(kind),
        ..v1::Spec::default()
    }
}

fn describe_prompt_suites(spec: &RunSpec, prepared: &[PreparedSuite]) -> Vec<v1::PromptSuite> {
    let pairs = spec.evals.iter().zip(prepared);
    let suites = pairs.filter_map(|(suite, prepared)| {
        let (Ok(SuiteMeasure::Prompts(suite)), PreparedSuite::Prompts(prompts)) =
            (suite.resolve_kind(""), prepared)
        else {
            return None;
        };
        Some(v1::PromptSuite {
            count: prompts.prompt_count(),
            verifier: suite.verifier.to_proto(),
            samples_per_prompt: suite.samples_per_prompt,
            ..v1::PromptSuite::default()
        })
    });
    suites.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_of_other_pools_only_verify_score_and_measure() {
        let status = v1::AgentStatus {
            pool: "other".into(),
            roles: ["generator", "evaluator"].map(str::to_owned).into(),
            state: v1::agent_status::State::Ready.into(),
            seen_at: Some(wire::Timestamp { seconds: 1000, nanos: 0 }),
            ..v1::AgentStatus::default()
        };
        let roles = |pool, now_s| find_useful_roles(&status, pool, now_s).map(|it| it.roles);
        assert_eq!(roles("default", 1010), Some(vec!["evaluator".to_owned()]));
        assert_eq!(roles("other", 1010).unwrap().len(), 2);
        assert_eq!(roles("other", 2000), None, "it is gone");
    }

    #[test]
    fn the_memory_of_a_box_without_a_gpu_is_known() {
        let bytes = |profile: &str, training_bytes| {
            let (profile, memory_bytes) = (profile.to_owned(), 25);
            usable_training_bytes(&v1::AgentStatus {
                profile,
                memory_bytes,
                training_bytes,
                ..v1::AgentStatus::default()
            })
        };
        assert_eq!([bytes("cpu", 0), bytes("cpu", 7), bytes("gfx906", 0)], [25, 7, 0]);
    }

    /// Returns runs with these ends and this number of done cycles, in log order.
    fn runs(ends: &[(Option<v1::done::Status>, u32)]) -> Vec<Run> {
        let run = |(n, (end, cycles)): (u64, &(Option<v1::done::Status>, u32))| {
            let id = RunId::new(format!("r-{n}")).unwrap();
            let record = |key, body| {
                let fact = wire::Fact { subject: wire::Subject::new(&id, key), body };
                wire::Record { sequence: n + 1, time_ms: 1, author: None, fact }
            };
            let raft = v1::spec::Raft { cycles: 9, ..v1::spec::Raft::default() };
            let kind = Some(v1::spec::Kind::Raft(raft));
            let tree = Some(v1::Tree { manifest: "m".into(), ..v1::Tree::default() });
            let base = Some(v1::Base { tree, ..v1::Base::default() });
            let spec = wire::FactBody::Spec(v1::Spec { kind, base, ..v1::Spec::default() });
            let mut run = Run::start(&record(wire::FactKey::Spec, spec)).unwrap();
            for cycle in 0..*cycles {
                let done = v1::CycleDone { cycle, ..v1::CycleDone::default() };
                run.cycles.entry(cycle).or_default().done = Some(done);
            }
            run.done = end.map(|status| v1::Done { status: status.into(), ..v1::Done::default() });
            run
        };
        (0..).zip(ends).map(run).collect()
    }

    #[test]
    fn finished_runs_are_the_measurements_and_stalled_ones_are_none() {
        use v1::done::Status::{Cancelled, Failed, Succeeded};
        let runs = runs(&[
            (Some(Succeeded), 0),
            (Some(Cancelled), 2),
            (Some(Succeeded), 3),
            (None, 1),
            (Some(Cancelled), 0),
            (Some(Failed), 0),
            (None, 0),
        ]);
        let chosen = |base: &BaseIdentity, before| {
            let (chosen, is_same) = choose_measured_runs(&runs, base, before);
            (chosen.iter().map(|run| run.id.to_string()).collect::<Vec<_>>().join(" "), is_same)
        };
        let base = BaseIdentity::of_run(&runs[0]);
        assert_eq!(chosen(&base, u64::MAX), ("r-3 r-2 r-0 r-1".into(), true));
        assert_eq!(chosen(&base, 3), ("r-0 r-1".into(), true));
        let other = BaseIdentity::Path("models/other".into());
        assert_eq!(chosen(&other, u64::MAX), ("r-3 r-2 r-0 r-1".into(), false));
    }

    #[test]
    fn a_wrong_price_or_a_past_time_is_refused() {
        let ask = |price, by: Option<i64>| {
            let by = by.map(|seconds| wire::Timestamp { seconds, nanos: 0 });
            let request = v1::ForecastRequest { by, price_per_kwh: price };
            check_request(&request, 1000.0)
        };
        for price in [-0.1, f64::NAN, f64::INFINITY, 1e9] {
            let error = ask(Some(price), None).unwrap_err().to_string();
            assert!(error.contains("price of a kWh"), "{error}");
        }
        let error = ask(None, Some(999)).unwrap_err().to_string();
        assert!(error.contains("in the past"), "{error}");
        let question = ask(Some(0.3), Some(1100)).unwrap();
        assert_eq!((question.within_s, question.price_per_kwh), (Some(100.0), Some(0.3)));
    }
}
