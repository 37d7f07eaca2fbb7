//! Measurements: runs that train nothing and draw samples with any models, so that checkpoints
//! without held-out samples of their own, such as those of SFT runs, can be compared.

use cycle::{Run, compared_cycle, move_to_base};
use spec::{MeasureDraft, RunSpec};
use wire::{FactBody, RunId, clock, v1};

use crate::{
    ChannelError, CheckpointError, CompareError, FleetControl, HistoryError, ModelComparison,
    SpecFiles, SubmitError,
    base_model::{run_blocking, unwatched},
    run_files::RunFiles,
    runs::find_equal_run,
};

/// The reason why a model cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error("the base of {0} is not known, or has random weights; name two checkpoints (R117)")]
    RandomBase(String),
    #[error("measure {name}")]
    Submit {
        name: String,
        #[source]
        source: Box<SubmitError>,
    },
}

/// A model, and the run that draws samples with it.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredModel {
    /// Such as `sft-1/0/150`, or `the base of sft-1`.
    pub name: String,
    pub run: RunId,
}

/// A model to measure, as its run's `spec` fact has it.
struct NamedModel {
    name: String,
    /// Of the run that made the model.
    pool: String,
    base: v1::Base,
}

impl MeasuredModel {
    /// Returns a reference to the cycle with the samples.
    pub fn sampled_cycle(&self) -> v1::CheckpointRef {
        first_cycle(&self.run)
    }
}

impl FleetControl {
    /// Starts the runs that draw the samples of a comparison, and returns them: of two checkpoints
    /// or, of one alone, of its run's base and that checkpoint. A run that drew the same samples
    /// and has not failed is returned instead of a new one. `files` are where the draft's prompts
    /// are.
    ///
    /// # Errors
    /// A checkpoint does not exist, the base has random weights, or a run cannot be submitted.
    pub async fn measure_models(
        &self,
        a: &v1::CheckpointRef,
        b: Option<&v1::CheckpointRef>,
        draft: &MeasureDraft,
        files: &SpecFiles,
    ) -> Result<[MeasuredModel; 2], MeasureError> {
        let of_a = self.find_model(a).await?;
        let [a, b] = match b {
            Some(b) => [of_a, self.find_model(b).await?],
            None => [self.find_base(&a.run).await?, of_a],
        };
        let runs = self.list_runs().await.map_err(HistoryError::from)?;
        let a = self.measure_model(a, draft, files, &runs).await?;
        let b = self.measure_model(b, draft, files, &runs).await?;
        Ok([a, b])
    }

    async fn find_model(&self, named: &v1::CheckpointRef) -> Result<NamedModel, MeasureError> {
        let found = self.find_checkpoint_model(named).await?;
        let step = if found.step > 0 { format!("/{}", found.step) } else { String::new() };
        let name = format!("{}/{}{step}", found.run, found.cycle);
        let pool = self.find_spec(&named.run).await?.pool;
        Ok(NamedModel { name, pool, base: to_base(found) })
    }

    async fn find_base(&self, run: &str) -> Result<NamedModel, MeasureError> {
        let spec = self.find_spec(run).await?;
        let base = to_base(move_to_base(run, &spec));
        if base.tree.is_none() {
            return Err(MeasureError::RandomBase(run.to_owned()));
        }
        Ok(NamedModel { name: format!("the base of {run}"), pool: spec.pool, base })
    }

    async fn find_spec(&self, run: &str) -> Result<v1::Spec, HistoryError> {
        let id = RunId::new(run).map_err(|_| HistoryError::NoRun(run.to_owned()))?;
        match self.bus.find_spec(&id).await?.map(|record| record.fact.body) {
            Some(FactBody::Spec(spec)) => Ok(spec),
            _ => Err(HistoryError::Unknown(id)),
        }
    }

    async fn measure_model(
        &self,
        model: NamedModel,
        draft: &MeasureDraft,
        files: &SpecFiles,
        runs: &[Run],
    ) -> Result<MeasuredModel, MeasureError> {
        let NamedModel { name, pool, base } = model;
        match self.start_measurement(base, &pool, draft, files, runs).await {
            Ok(run) => Ok(MeasuredModel { name, run }),
            Err(source) => Err(MeasureError::Submit { name, source: Box::new(source) }),
        }
    }

    /// Returns the run that measures a model as the draft says: one of `runs` that has not failed,
    /// or a new one in the pool.
    async fn start_measurement(
        &self,
        model: v1::Base,
        pool: &str,
        draft: &MeasureDraft,
        files: &SpecFiles,
        runs: &[Run],
    ) -> Result<RunId, SubmitError> {
        let yaml = draft.to_yaml(model.tree.as_ref().map_or("", |tree| &tree.path), pool);
        let spec = run_blocking(move || RunSpec::parse(&yaml)).await?;
        let (mut files, watch) = (RunFiles::new(files), unwatched());
        self.attach_data(&spec, &mut files, &watch).await?;
        // The path in the spec names no adapter.
        let mut bases = vec![(spec.base.clone(), model)];
        let (resolved, _) = self.resolve_spec(&spec, files.files(), &mut bases, &watch).await?;
        let data_sources = files.list_sources(&spec.data_names());
        let resolved = v1::Spec { submitted_at: None, data_sources, ..resolved };
        if let Some(run) = find_equal_run(runs, &resolved) {
            return Ok(run.id.clone());
        }
        let written = v1::Spec { submitted_at: Some(clock::now()), ..resolved };
        let run = self.write_spec_fact(MeasureDraft::NAME, written.clone()).await?;
        self.require_stored_trees(&run, &written).await?;
        Ok(run)
    }

    /// Compares a checkpoint, which is `next`, with `before`, which a channel names: by the held-out
    /// samples of their runs or, if one has none, by those of the newest runs that measured both.
    /// Returns the cycle whose samples stand for `before`, too.
    pub(crate) async fn compare_with_channel(
        &self,
        channel: &RunId,
        before: &v1::ChannelMove,
        next: &v1::ChannelMove,
        candidate: &v1::CheckpointRef,
        alpha: f64,
    ) -> Result<(v1::CheckpointRef, ModelComparison), ChannelError> {
        let own = self.compare_own_samples(channel, before, next, candidate, alpha).await;
        let has_samples = !matches!(
            &own,
            Err(ChannelError::NotComparable(_)
                | ChannelError::Compare(
                    CompareError::NoSamples { .. } | CompareError::NotLast { .. }
                ))
        );
        if has_samples {
            return own;
        }
        let Some(runs) = pair_measurements(&self.list_runs().await?, before, next) else {
            return own;
        };
        let [a, b] = runs.each_ref().map(first_cycle);
        let found = self.compare_checkpoints(&a, &b, "", alpha).await?;
        Ok((a, found))
    }

    async fn compare_own_samples(
        &self,
        channel: &RunId,
        before: &v1::ChannelMove,
        next: &v1::ChannelMove,
        candidate: &v1::CheckpointRef,
        alpha: f64,
    ) -> Result<(v1::CheckpointRef, ModelComparison), ChannelError> {
        let spec = self.get_run(&RunId::new(next.run.as_str())?).await?.spec;
        let compared = compared_cycle(before, &next.run, &spec);
        let (run, cycle) = compared.ok_or_else(|| ChannelError::NotComparable(channel.clone()))?;
        let a = v1::CheckpointRef { run, cycle: Some(cycle), ..Default::default() };
        let found = self.compare_checkpoints(&a, candidate, "", alpha).await?;
        Ok((a, found))
    }
}

fn to_base(model: v1::ChannelMove) -> v1::Base {
    v1::Base { tree: model.base, random_init: false, adapter: model.adapter }
}

fn first_cycle(run: &RunId) -> v1::CheckpointRef {
    v1::CheckpointRef { run: run.to_string(), cycle: Some(0), ..Default::default() }
}

/// Returns the newest runs that measured the models by samples of the same prompts, drawn with the
/// same settings and random numbers, and judged alike.
fn pair_measurements(runs: &[Run], a: &v1::ChannelMove, b: &v1::ChannelMove) -> Option<[RunId; 2]> {
    let [of_a, of_b] = [a, b].map(|model| list_measurements(runs, model));
    of_b.into_iter().find_map(|b| {
        let is_like = |a: &&&Run| a.spec.seed == b.spec.seed && a.spec.kind == b.spec.kind;
        let a = of_a.iter().find(is_like)?;
        Some([a.id.clone(), b.id.clone()])
    })
}

/// Returns the runs that measured a model by held-out samples with verdicts, the newest first.
fn list_measurements<'a>(runs: &'a [Run], model: &v1::ChannelMove) -> Vec<&'a Run> {
    let has_verdicts = |raft: &v1::spec::Raft| raft.heldout.is_some() && raft.verifier.is_some();
    let measured = |run: &&Run| {
        run.spec.only_measures()
            && run.raft_spec().is_some_and(has_verdicts)
            && run.current_state() == v1::run::State::Succeeded
            && move_to_base(run.id.as_str(), &run.spec).has_model_of(model)
    };
    runs.iter().rev().filter(measured).collect()
}

#[cfg(test)]
mod tests {
    use wire::{Fact, FactKey, Record, Subject};

    use super::*;

    fn tree(name: &str) -> Option<v1::Tree> {
        Some(v1::Tree { path: name.into(), manifest: name.into() })
    }

    fn model(base: &str, adapter: Option<&str>) -> v1::ChannelMove {
        let (base, adapter) = (tree(base), adapter.and_then(tree));
        v1::ChannelMove { base, adapter, ..Default::default() }
    }

    /// Returns a run that measured a model with this many samples of each prompt.
    fn measured(number: u64, model: &v1::ChannelMove, samples: u32, succeeded: bool) -> Run {
        let id = RunId::new(format!("measure-{number}")).unwrap();
        let raft = v1::spec::Raft {
            heldout_samples_per_prompt: samples,
            heldout: Some(v1::Blob::default()),
            verifier: Some(v1::Verifier::default()),
            ..Default::default()
        };
        let spec = v1::Spec {
            run: id.to_string(),
            base: Some(to_base(model.clone())),
            kind: Some(v1::spec::Kind::Raft(raft)),
            ..Default::default()
        };
        let subject = Subject::new(&id, FactKey::Spec);
        let fact = Fact { subject, body: FactBody::Spec(spec) };
        let mut run =
            Run::start(&Record { sequence: number, time_ms: 1, author: None, fact }).unwrap();
        let status = if succeeded { v1::done::Status::Succeeded } else { v1::done::Status::Failed };
        run.done = Some(v1::Done { status: status.into(), ..Default::default() });
        run
    }

    #[test]
    fn the_newest_measurements_that_are_alike_stand_for_two_models() {
        let (base, tuned, other) = (model("m", None), model("m", Some("a")), model("n", None));
        let mut runs = vec![
            measured(1, &base, 1, true),
            measured(2, &tuned, 1, true),
            measured(3, &base, 2, true),
            measured(4, &tuned, 2, true),
            measured(5, &tuned, 3, true),
            measured(6, &base, 3, false),
            measured(7, &other, 4, true),
        ];
        // A judge compares those.
        for mut unjudged in [measured(8, &base, 5, true), measured(9, &tuned, 5, true)] {
            if let Some(v1::spec::Kind::Raft(raft)) = &mut unjudged.spec.kind {
                raft.verifier = None;
            }
            runs.push(unjudged);
        }
        let pair = |a, b| pair_measurements(&runs, a, b).map(|runs| runs.map(|it| it.to_string()));
        let expected = Some(["measure-3", "measure-4"].map(str::to_owned));
        assert_eq!(pair(&base, &tuned), expected, "5 has no partner that succeeded");
        assert_eq!(pair(&base, &other), None);
        let mut trained = runs[0].clone();
        if let Some(v1::spec::Kind::Raft(raft)) = &mut trained.spec.kind {
            raft.cycles = 1;
        }
        assert!(list_measurements(&[trained], &base).is_empty(), "it is a run of its own");
    }
}
