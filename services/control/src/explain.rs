//! Why a run went as it did, and what made a checkpoint: from its facts alone.

use std::collections::BTreeMap;

use cycle::{Run, yields};
use serde::Serialize;
use wire::{Body, Record, RunId, v1};

use crate::{Control, HistoryError, runs::fold};

pub use cycle::Yield;

/// A run, told cycle by cycle.
#[derive(Debug, Clone, Serialize)]
pub struct Story {
    pub run: String,
    pub kind: &'static str,
    pub phase: &'static str,
    /// How it ended, where it has.
    pub ended: Option<String>,
    pub seed: u64,
    pub base: String,
    pub cycles: Vec<CycleStory>,
    /// Of one cycle: why no more was kept.
    #[serde(rename = "yield")]
    pub yields: Option<Yield>,
    /// Of that cycle: what boxes showed of the policy that drew its samples, if they were asked.
    pub proof: Option<ProofStory>,
    pub quarantines: Vec<v1::Quarantine>,
}

/// What boxes showed of a policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProofStory {
    pub cycle: u32,
    /// Whether it is known who is right.
    pub decided: bool,
    pub shown: Vec<FigureStory>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FigureStory {
    /// An agent, or the trainer of a cycle.
    pub who: String,
    /// Nats a token.
    pub mean: f64,
    /// From those who are right.
    pub distance: Option<f64>,
}

/// What happened in a cycle, each part as far as it came.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CycleStory {
    pub cycle: u32,
    /// What training samples were drawn with.
    pub sampled_with: Option<String>,
    pub temperature: Option<f64>,
    pub prompts: Option<usize>,
    pub samples: Option<u64>,
    pub selected: Option<v1::Selected>,
    pub training: Option<v1::Training>,
    pub trained_from: Option<String>,
    pub checkpoint: Option<v1::Checkpoint>,
    /// Perplexity of each suite at the last checkpoint.
    pub perplexities: BTreeMap<String, f64>,
    pub done: Option<v1::CycleDone>,
}

/// What made a checkpoint, and what made that, back to the base.
#[derive(Debug, Clone, Serialize)]
pub struct Lineage {
    /// The newest first.
    pub links: Vec<Link>,
    /// What all of it began with.
    pub base: String,
    /// The samples the first of them was trained on.
    pub samples: Vec<Sampled>,
}

/// One training of a lineage.
#[derive(Debug, Clone, Serialize)]
pub struct Link {
    pub checkpoint: v1::Checkpoint,
    pub order: Option<v1::TrainOrder>,
    pub selected: Option<v1::Selected>,
    /// Trees by what they are called: `the base`, `cycle 2 step 57`.
    pub from: String,
}

/// A sample that was trained on, and who made and judged it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sampled {
    pub prompt_id: String,
    pub index: u32,
    pub reward: f64,
    pub tokens: u32,
    pub job: String,
    /// With which, its prompt and its index the sample's own seed is derived.
    pub seed: u64,
    pub generator: String,
    pub engine: String,
    pub verifier_agent: String,
    pub verifier: String,
}

impl Control {
    /// Tells a run, and of one cycle (the last that selected, unless another is named) why no
    /// more was kept.
    ///
    /// # Errors
    /// When there is no such run or cycle, or its facts cannot be read.
    pub async fn explain_run(&self, id: &RunId, cycle: Option<u32>) -> Result<Story, HistoryError> {
        let records = self.run_without_samples(id).await?;
        let run = fold(&records).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let (orders, plans) = (train_orders(&records), plans(&records));
        let mut selected = run.cycles.iter().rev().filter(|(_, cycle)| cycle.selected.is_some());
        let cycle = cycle.or(selected.next().map(|(number, _)| *number));
        let mut proof = None;
        let yields = match cycle {
            Some(cycle) if run.raft().is_some() => {
                let before = self.before_selection(id, cycle, records).await?;
                proof = proof_story(&before, cycle);
                let selected = run.cycles.get(&cycle).and_then(|cycle| cycle.selected.as_ref());
                selected.and_then(|selected| yields(&before, selected))
            }
            Some(_) => return Err(HistoryError::SelectsNothing(id.clone())),
            None => None,
        };
        let story = |number: &u32| cycle_story(&run, *number, &plans, &orders);
        Ok(Story {
            run: id.to_string(),
            kind: run.kind(),
            phase: run.phase().as_str(),
            ended: run.done.as_ref().map(|done| {
                let status = done.status().as_str_name().to_lowercase();
                let colon = if done.message.is_empty() { "" } else { ": " };
                format!("{status}{colon}{}", done.message)
            }),
            seed: run.spec.seed,
            base: base_of(&run),
            cycles: run.cycles.keys().map(story).collect(),
            yields,
            proof,
            quarantines: run.quarantines.clone(),
        })
    }

    /// Tells what made a checkpoint. A run's own chain only: its base may be another run's.
    ///
    /// # Errors
    /// When there is no such checkpoint, or its facts cannot be read.
    pub async fn explain_checkpoint(
        &self,
        checkpoint: &v1::Checkpoint,
    ) -> Result<Lineage, HistoryError> {
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.run_without_samples(&id).await?;
        let run = fold(&records).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let orders = train_orders(&records);
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
            links.push(Link {
                order: orders.get(&checkpoint.cycle).cloned(),
                selected: cycle.and_then(|cycle| cycle.selected.clone()),
                from: parent.map_or_else(|| "nothing".into(), |parent| name(&run, parent)),
                checkpoint,
            });
            next = before.filter(|before| before.cycle > 0);
        }
        let trained_on = run.cycles.get(&checkpoint.cycle).and_then(|c| c.selected.as_ref());
        let samples = match trained_on {
            Some(_) => self.sampled(&id, checkpoint.cycle, records).await?,
            None => Vec::new(),
        };
        Ok(Lineage { links, base: base_of(&run), samples })
    }

    /// The order a checkpoint was trained by; `None` for an adopted base and a watched training.
    ///
    /// # Errors
    /// When its run's facts cannot be read.
    pub async fn train_order(
        &self,
        checkpoint: &v1::Checkpoint,
    ) -> Result<Option<v1::TrainOrder>, HistoryError> {
        let id = RunId::new(checkpoint.run.as_str());
        let id = id.map_err(|_| HistoryError::NoRun(checkpoint.run.clone()))?;
        let records = self.read_all(vec![format!("flotilla.{id}.order.train.>")]).await?;
        Ok(train_orders(&records).remove(&checkpoint.cycle))
    }

    /// What a cycle kept, with who made and judged each.
    async fn sampled(
        &self,
        id: &RunId,
        cycle: u32,
        records: Vec<Record>,
    ) -> Result<Vec<Sampled>, HistoryError> {
        let run = self.before_selection(id, cycle, records).await?;
        let kept = cycle::select_again(&run, cycle, None).unwrap_or_default().kept;
        let Some(of_cycle) = run.cycles.get(&cycle) else { return Ok(Vec::new()) };
        let mut jobs: BTreeMap<(&str, u32), (&wire::JobId, &cycle::Job)> = BTreeMap::new();
        for (job_id, job) in of_cycle.jobs_for(v1::Purpose::Train) {
            for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
                jobs.insert((&sample.prompt_id, sample.index), (job_id, job));
            }
        }
        let seed = cycle::generate_seed(run.spec.seed, cycle, v1::Purpose::Train, "");
        let of = |kept: cycle::Kept| {
            let (job_id, job) = jobs.get(&(kept.prompt_id.as_str(), kept.index))?;
            let (samples, verdicts) = (job.samples.as_ref()?, job.verdicts.as_ref()?);
            Some(Sampled {
                job: job_id.to_string(),
                seed,
                generator: samples.agent.clone(),
                engine: samples.engine.clone(),
                verifier_agent: verdicts.agent.clone(),
                verifier: verdicts.verifier.clone(),
                prompt_id: kept.prompt_id,
                index: kept.index,
                reward: kept.reward,
                tokens: kept.tokens,
            })
        };
        Ok(kept.into_iter().filter_map(of).collect())
    }
}

fn proof_story(before: &Run, number: u32) -> Option<ProofStory> {
    let agreement = cycle::agreement(before, number, v1::Purpose::Train)?;
    let story = |figure: cycle::Figure| {
        let cycle::Figure { who, mean, distance } = figure;
        FigureStory { who, mean, distance }
    };
    let shown = agreement.shown.into_iter().map(story).collect();
    Some(ProofStory { cycle: number, decided: agreement.decided, shown })
}

/// The last order of each cycle's training.
fn train_orders(records: &[Record]) -> BTreeMap<u32, v1::TrainOrder> {
    let orders = records.iter().filter_map(|record| match &record.fact.body {
        Body::TrainOrder(order) => Some((order.cycle, order.clone())),
        _ => None,
    });
    orders.collect()
}

/// The plans, which folding lets go of when a cycle is archived.
fn plans(records: &[Record]) -> BTreeMap<u32, v1::Plan> {
    let plans = records.iter().filter_map(|record| match &record.fact.body {
        Body::Plan(plan) => Some((plan.cycle, plan.clone())),
        _ => None,
    });
    plans.collect()
}

fn base_of(run: &Run) -> String {
    let tree = run.spec.base.as_ref().and_then(|base| base.tree.as_ref());
    tree.map_or_else(|| "nothing".into(), |tree| tree.path.clone())
}

/// What a tree is called in its run.
fn name(run: &Run, tree: &v1::Tree) -> String {
    let all = run.cycles.values().flat_map(|cycle| cycle.checkpoints.values());
    let found = all.into_iter().find(|checkpoint| checkpoint.tree.as_ref() == Some(tree));
    match found {
        Some(checkpoint) if checkpoint.cycle > 0 => {
            format!("cycle {} step {}", checkpoint.cycle, checkpoint.step)
        }
        _ => "the base".into(),
    }
}

fn cycle_story(
    run: &Run,
    number: u32,
    plans: &BTreeMap<u32, v1::Plan>,
    orders: &BTreeMap<u32, v1::TrainOrder>,
) -> CycleStory {
    let mut story = CycleStory { cycle: number, ..CycleStory::default() };
    let Some(cycle) = run.cycles.get(&number) else { return story };
    if let Some(plan) = plans.get(&number).filter(|_| number > 0) {
        let train = plan.jobs.iter().filter(|job| job.purpose() == v1::Purpose::Train);
        let draws: Vec<&v1::plan::Draw> = train.flat_map(|job| &job.draws).collect();
        let mut lines: Vec<u32> = draws.iter().map(|draw| draw.prompt).collect();
        lines.sort_unstable();
        lines.dedup();
        story.prompts = Some(lines.len());
        story.samples = Some(draws.iter().map(|draw| u64::from(draw.count)).sum());
        let policy = run.policy(number, v1::Purpose::Train);
        story.sampled_with = policy.map(|policy| name(run, policy.tree()));
        let sampling =
            run.raft().and_then(|raft| cycle::sampling(raft, number, v1::Purpose::Train, ""));
        story.temperature = sampling.map(|sampling| sampling.temperature);
    }
    story.selected = cycle.selected.clone();
    if let Some(order) = orders.get(&number) {
        let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
        story.trained_from = order.adapter.as_ref().or(base).map(|tree| name(run, tree));
        story.training = order.training.clone();
    }
    story.checkpoint = cycle.final_checkpoint().cloned();
    let step = story.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let evals = cycle.evals.iter().filter(|((at, _), _)| Some(*at) == step);
    story.perplexities =
        evals.map(|((_, suite), eval)| (suite.to_string(), eval.perplexity)).collect();
    story.done = cycle.done.clone();
    story
}
