//! Reports on the course of a run and on the origin of a checkpoint, derived from facts alone.

use std::collections::BTreeMap;

use cycle::{Run, advise_on_training, report_selection};
use serde::Serialize;
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    FleetControl, HistoryError,
    runs::{fold_run, run_to_proto},
};

pub use cycle::{MessageGroup, SelectionReport, SoupReport, SplitReport};

/// A report on a run, cycle by cycle.
#[derive(Debug, Clone, Serialize)]
pub struct RunReport {
    pub run: String,
    /// For example `raft`.
    pub kind: &'static str,
    pub phase: String,
    pub paused: bool,
    /// Final status with its message, if the run has ended.
    pub ended: Option<String>,
    /// Why the run is paused, or for which agents it waits; may be empty.
    pub message: String,
    pub seed: u64,
    /// Paths of the base's tree and of a trial's adapter, or `nothing`.
    pub base: String,
    /// What users did to the run: pauses, resumes and cancellations, in log order.
    pub controls: Vec<ControlReport>,
    pub cycles: Vec<CycleReport>,
    /// Selection diagnostics of one cycle: the reasons why no more samples were kept.
    #[serde(rename = "yield")]
    pub yields: Option<SelectionReport>,
    /// Canary of the policy that drew that cycle's samples, if the spec enables it.
    pub proof: Option<CanaryReport>,
    pub quarantines: Vec<v1::Quarantine>,
    /// Failed jobs, in log order.
    pub failures: Vec<v1::Failure>,
}

/// A pause, resume or cancellation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ControlReport {
    pub time_ms: u64,
    /// `pause`, `resume` or `cancel`.
    pub action: String,
    /// The user, in a closed fleet.
    pub by: Option<String>,
    /// May be empty.
    pub reason: String,
}

/// The canary results of one policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CanaryReport {
    /// Cycle that the policy samples for.
    pub cycle: u32,
    /// The vote has an outcome.
    pub decided: bool,
    pub shown: Vec<CanaryFigure>,
}

/// The canary log-probability that one agent reported.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CanaryFigure {
    /// An agent, or the trainer of a cycle.
    pub who: String,
    /// Mean log-probability in nats per token.
    pub mean: f64,
    /// Mean absolute difference from the accepted figures in nats per token.
    pub distance: Option<f64>,
}

/// A report on one cycle. Stages that it has not reached are empty.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CycleReport {
    pub cycle: u32,
    /// Policy that the training samples were drawn from.
    pub sampled_with: Option<String>,
    pub temperature: Option<f64>,
    /// Number of different prompts that are sampled; `None` in a trial.
    pub prompts: Option<usize>,
    /// Planned training samples; `None` in a trial.
    pub samples: Option<u64>,
    pub selected: Option<v1::Selected>,
    pub training: Option<v1::Training>,
    /// Checkpoint that training started from.
    pub trained_from: Option<String>,
    pub checkpoint: Option<v1::Checkpoint>,
    /// Of a training on several boxes.
    pub split: Option<SplitReport>,
    /// Perplexity of each text suite at the last checkpoint.
    pub perplexities: BTreeMap<String, f64>,
    pub done: Option<v1::CycleDone>,
    /// Orders that agents left to faster ones, by agent.
    pub declined: BTreeMap<String, u32>,
}

/// The trainings that led to a checkpoint, back to the base.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointLineage {
    /// Newest first.
    pub links: Vec<LineageStep>,
    /// Paths of the base's tree and of a trial's adapter, or `nothing`.
    pub base: String,
    /// Samples that the newest checkpoint was trained on.
    pub samples: Vec<LineageSample>,
}

/// One training of a lineage.
#[derive(Debug, Clone, Serialize)]
pub struct LineageStep {
    pub checkpoint: v1::Checkpoint,
    pub order: Option<v1::TrainOrder>,
    pub selected: Option<v1::Selected>,
    /// Such as `the base` or `cycle 2 step 57`.
    pub from: String,
}

/// A sample that was trained on, with the agents that generated and judged it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LineageSample {
    pub prompt_id: String,
    pub index: u32,
    pub reward: f64,
    pub tokens: u32,
    pub job: String,
    /// The sample's own seed is derived from it with the prompt and the index.
    pub seed: u64,
    pub generator: String,
    pub engine: String,
    pub verifier_agent: String,
    pub verifier: String,
}

impl FleetControl {
    /// Reports on a run. Selection diagnostics and canary results are those of `cycle`, or else of
    /// the last cycle that has selected. Fails if `cycle` has not selected.
    pub async fn explain_run(
        &self,
        id: &RunId,
        cycle: Option<u32>,
    ) -> Result<RunReport, HistoryError> {
        let records = self.records_without_samples(id).await?;
        let run = fold_run(&records).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let (orders, plans) = (last_train_orders(&records), cycle_plans(&records));
        let declined = count_declined(&records);
        let controls = list_controls(&records);
        let mut selected = run.cycles.iter().rev().filter(|(_, cycle)| cycle.selected.is_some());
        let cycle = cycle.or(selected.next().map(|(number, _)| *number));
        let mut proof = None;
        let yields = match cycle {
            Some(cycle) if run.raft_spec().is_some() => {
                let before = self.run_before_selection(id, cycle, records).await?;
                proof = canary_report(&before, cycle);
                let selected = run.cycles.get(&cycle).and_then(|cycle| cycle.selected.as_ref());
                let mut found = selected.and_then(|selected| report_selection(&before, selected));
                let trained = run.cycles.get(&cycle).and_then(|cycle| cycle.final_checkpoint());
                let advice = trained.map(advise_on_training).unwrap_or_default();
                found.iter_mut().for_each(|found| found.advice.extend_from_slice(&advice));
                found
            }
            Some(_) => return Err(HistoryError::SelectsNothing(id.clone())),
            None => None,
        };
        let report = |number: &u32| CycleReport {
            declined: declined.get(number).cloned().unwrap_or_default(),
            ..cycle_report(&run, *number, &plans, &orders)
        };
        // Only samples and verdicts, which these records lack, tell the phase of an open cycle.
        let now = match run.done {
            Some(_) => run_to_proto(&run),
            None => self.describe_run(id).await?,
        };
        Ok(RunReport {
            run: id.to_string(),
            kind: run.kind_name(),
            paused: now.state() == v1::run::State::Paused,
            phase: now.phase,
            message: now.message,
            failures: now.failures,
            ended: run.done.as_ref().map(|done| {
                let status = done.status().as_str_name().to_lowercase();
                let colon = if done.message.is_empty() { "" } else { ": " };
                format!("{status}{colon}{}", done.message)
            }),
            seed: run.spec.seed,
            base: base_path(&run),
            controls,
            cycles: run.cycles.keys().map(report).collect(),
            yields,
            proof,
            quarantines: run.quarantines.clone(),
        })
    }

    /// Returns the trainings that led to a checkpoint, within its own run; the base may be a
    /// checkpoint of another run.
    pub async fn explain_checkpoint(
        &self,
        checkpoint: &v1::Checkpoint,
    ) -> Result<CheckpointLineage, HistoryError> {
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.records_without_samples(&id).await?;
        let run = fold_run(&records).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let links = self.list_trainings(&run, &records, checkpoint).await?;
        let trained_on = run.cycles.get(&checkpoint.cycle).and_then(|c| c.selected.as_ref());
        let samples = match trained_on {
            Some(_) => self.list_kept_samples(&id, checkpoint.cycle, records).await?,
            None => Vec::new(),
        };
        Ok(CheckpointLineage { links, base: base_path(&run), samples })
    }

    /// Returns the trainings that led to a checkpoint of a run, the newest first.
    pub(crate) async fn list_trainings(
        &self,
        run: &Run,
        records: &[Record],
        checkpoint: &v1::Checkpoint,
    ) -> Result<Vec<LineageStep>, HistoryError> {
        let orders = last_train_orders(records);
        let mut links = Vec::new();
        let mut next = Some(checkpoint.clone());
        while let Some(checkpoint) = next.take() {
            let parent = checkpoint.parent.as_ref();
            let before = parent.and_then(|parent| {
                let all = run.cycles.range(..checkpoint.cycle).rev();
                let all = all.flat_map(|(_, cycle)| cycle.checkpoints.values());
                all.into_iter().find(|other| other.tree.as_ref() == Some(parent)).cloned()
            });
            let cycle = run.cycles.get(&checkpoint.cycle);
            let order = match checkpoint.cycle < run.first_cycle {
                true => self.find_train_order(&checkpoint).await?,
                false => orders.get(&checkpoint.cycle).cloned(),
            };
            links.push(LineageStep {
                order,
                selected: cycle.and_then(|cycle| cycle.selected.clone()),
                from: parent.map_or_else(|| "nothing".into(), |parent| tree_name(run, parent)),
                checkpoint,
            });
            next = before.filter(|before| before.cycle > 0);
        }
        Ok(links)
    }

    /// Returns the order that a checkpoint was trained by, or `None` for an adopted base or an
    /// external training.
    pub async fn find_train_order(
        &self,
        checkpoint: &v1::Checkpoint,
    ) -> Result<Option<v1::TrainOrder>, HistoryError> {
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.read_records(vec![format!("flotilla.{id}.order.train.>")]).await?;
        Ok(last_train_orders(&records).remove(&checkpoint.cycle))
    }

    /// Returns the deltas that a merged checkpoint was made of, a list for each outer step.
    pub async fn find_merged_deltas(
        &self,
        checkpoint: &v1::Checkpoint,
    ) -> Result<Vec<Vec<v1::Delta>>, HistoryError> {
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.records_without_samples(&id).await?;
        let run = fold_run(&records).ok_or(HistoryError::Unknown(id))?;
        let training = run.cycles.get(&checkpoint.cycle).map(|cycle| &cycle.split_training);
        let mut steps = 0;
        let mut merged = Vec::new();
        for step in training.into_iter().flat_map(|training| training.outer_steps.values()) {
            let counted: u32 = step.counted_deltas().map(|delta| delta.steps).sum();
            if steps < checkpoint.step && counted > 0 {
                steps += counted;
                merged.push(step.merged_deltas().cloned().collect());
            }
        }
        Ok(merged)
    }

    /// Returns the samples that a cycle kept, with the agents that generated and judged them.
    async fn list_kept_samples(
        &self,
        id: &RunId,
        cycle: u32,
        records: Vec<Record>,
    ) -> Result<Vec<LineageSample>, HistoryError> {
        let run = self.run_before_selection(id, cycle, records).await?;
        let kept = cycle::preview_selection(&run, cycle, None).unwrap_or_default().kept;
        let Some(of_cycle) = run.cycles.get(&cycle) else { return Ok(Vec::new()) };
        let mut jobs: BTreeMap<(&str, u32), (&wire::JobId, &cycle::PlannedJob)> = BTreeMap::new();
        for (job_id, job) in of_cycle.jobs_for(v1::Purpose::Train) {
            for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
                jobs.insert((&sample.prompt_id, sample.index), (job_id, job));
            }
        }
        let seed = cycle::generate_seed(run.spec.seed, cycle, v1::Purpose::Train, "");
        let of = |kept: cycle::KeptSample| {
            let (job_id, job) = jobs.get(&(kept.prompt_id.as_str(), kept.index))?;
            let samples = job.samples.as_ref()?;
            // Absent in a run without a verifier.
            let verdicts = job.verdicts.clone().unwrap_or_default();
            Some(LineageSample {
                job: job_id.to_string(),
                seed,
                generator: samples.agent.clone(),
                engine: samples.engine.clone(),
                verifier_agent: verdicts.agent,
                verifier: verdicts.verifier,
                prompt_id: kept.prompt_id,
                index: kept.index,
                reward: kept.reward,
                tokens: kept.tokens,
            })
        };
        Ok(kept.into_iter().filter_map(of).collect())
    }
}

/// Returns the results of the policy that the cycle's training samples were drawn from.
fn canary_report(before: &Run, number: u32) -> Option<CanaryReport> {
    let agreement = cycle::canary_agreement(before, number, v1::Purpose::Train)?;
    let to_figure = |figure: cycle::CanaryValue| {
        let cycle::CanaryValue { voter: who, mean, distance } = figure;
        CanaryFigure { who, mean, distance }
    };
    let shown = agreement.values.into_iter().map(to_figure).collect();
    Some(CanaryReport { cycle: number, decided: agreement.decided, shown })
}

fn last_train_orders(records: &[Record]) -> BTreeMap<u32, v1::TrainOrder> {
    let orders = records.iter().filter_map(|record| match &record.fact.body {
        FactBody::TrainOrder(order) => Some((order.cycle, order.clone())),
        _ => None,
    });
    orders.collect()
}

fn list_controls(records: &[Record]) -> Vec<ControlReport> {
    let controls = records.iter().filter_map(|record| match &record.fact.body {
        FactBody::Control(control) => {
            let action = control.action().as_str_name().to_lowercase();
            let user = wire::control_user(control, record.author.as_ref());
            let by = user.map(|user| user.to_string());
            let reason = control.short_reason().to_owned();
            Some(ControlReport { time_ms: record.time_ms, action, by, reason })
        }
        _ => None,
    });
    controls.collect()
}

/// Counts declined orders by cycle and agent.
fn count_declined(records: &[Record]) -> BTreeMap<u32, BTreeMap<String, u32>> {
    let mut counts: BTreeMap<u32, BTreeMap<String, u32>> = BTreeMap::new();
    for record in records {
        if let FactKey::Declined { cycle, agent, .. } = &record.fact.subject.key {
            let by_agent = counts.entry(*cycle).or_default();
            *by_agent.entry(agent.to_string()).or_default() += 1;
        }
    }
    counts
}

/// A folded run drops the plan once the cycle is archived.
fn cycle_plans(records: &[Record]) -> BTreeMap<u32, v1::Plan> {
    let plans = records.iter().filter_map(|record| match &record.fact.body {
        FactBody::Plan(plan) => Some((plan.cycle, plan.clone())),
        _ => None,
    });
    plans.collect()
}

/// Returns the path of the base's tree, with that of the adapter from which a trial starts.
fn base_path(run: &Run) -> String {
    let Some(v1::Base { tree: Some(tree), adapter, .. }) = &run.spec.base else {
        return "nothing".into();
    };
    match adapter {
        Some(adapter) => format!("{} with {}", tree.path, adapter.path),
        None => tree.path.clone(),
    }
}

/// Returns `the base`, `cycle 2 step 57`, or the path of the adapter from which a trial starts.
fn tree_name(run: &Run, tree: &v1::Tree) -> String {
    if run.spec.base.as_ref().and_then(|base| base.adapter.as_ref()) == Some(tree) {
        return tree.path.clone();
    }
    let all = run.cycles.values().flat_map(|cycle| cycle.checkpoints.values());
    let found = all.into_iter().find(|checkpoint| checkpoint.tree.as_ref() == Some(tree));
    match found {
        Some(checkpoint) if checkpoint.cycle > 0 => {
            format!("cycle {} step {}", checkpoint.cycle, checkpoint.step)
        }
        _ => "the base".into(),
    }
}

fn cycle_report(
    run: &Run,
    number: u32,
    plans: &BTreeMap<u32, v1::Plan>,
    orders: &BTreeMap<u32, v1::TrainOrder>,
) -> CycleReport {
    let mut report = CycleReport { cycle: number, ..CycleReport::default() };
    let Some(cycle) = run.cycles.get(&number) else { return report };
    if let Some(plan) = plans.get(&number).filter(|_| number > 0) {
        let train = plan.jobs.iter().filter(|job| job.purpose() == v1::Purpose::Train);
        let draws: Vec<&v1::plan::Draw> = train.flat_map(|job| &job.draws).collect();
        let mut lines: Vec<u32> = draws.iter().map(|draw| draw.prompt).collect();
        lines.sort_unstable();
        lines.dedup();
        // A trial is trained on samples of another run.
        if run.raft_spec().is_some_and(|raft| raft.dataset.is_none()) {
            report.prompts = Some(lines.len());
            report.samples = Some(draws.iter().map(|draw| u64::from(draw.count)).sum());
        }
        let policy = run.sampling_policy(number, v1::Purpose::Train);
        report.sampled_with = policy.map(|policy| tree_name(run, policy.adapter_or_base()));
        let sampling = run
            .raft_spec()
            .and_then(|raft| cycle::sampling_settings(raft, number, v1::Purpose::Train, ""));
        report.temperature = sampling.map(|sampling| sampling.temperature);
    }
    report.selected = cycle.selected.clone();
    if let Some(order) = orders.get(&number) {
        let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
        report.trained_from = order.adapter.as_ref().or(base).map(|tree| tree_name(run, tree));
        report.training = order.training.clone();
    }
    report.checkpoint = cycle.final_checkpoint().cloned();
    report.split = cycle.split_training.report_split();
    let step = report.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let evals = cycle.evals.iter().filter(|((at, _), _)| Some(*at) == step);
    report.perplexities =
        evals.map(|((_, suite), eval)| (suite.to_string(), eval.perplexity)).collect();
    report.done = cycle.done.clone();
    report
}
