//! A probe: one small cycle of a spec, run for at most a minute, whose facts show the speeds of a
//! fleet that has not worked on the base before.

use std::time::Duration;

use futures::StreamExt;
use spec::{RaftSpec, RunSpec};
use tokio::time::timeout;
use wire::{RunId, v1};

use super::ForecastError;
use crate::{FleetControl, SpecFiles, base_model::unwatched, run_files::RunFiles};

/// Time after which a probe is cancelled. The facts that it has written by then count.
const PROBE_TIME: Duration = Duration::from_secs(60);

/// Most prompts that a probe samples from.
const PROBE_PROMPTS: u32 = 32;

/// Most optimizer steps of the probe of an SFT run.
const PROBE_STEPS: u32 = 8;

/// Name of probes; their ids are `probe-<number>`.
const PROBE_NAME: &str = "probe";

impl FleetControl {
    /// Submits a probe of a spec's first run, and waits until it has ended or is cancelled. It
    /// stores the base, starts at once and moves no channel.
    ///
    /// # Errors
    /// When the spec is wrong or trains nothing, or an agent that the run needs is not there.
    pub async fn probe_spec(&self, yaml: &str, files: &SpecFiles) -> Result<RunId, ForecastError> {
        let (_, spec, prepared) = self.check_runs(yaml, files).await?;
        let described = super::describe_spec(&spec, &prepared);
        if described.only_measures() {
            return Err(ForecastError::NoTraining(spec.name));
        }
        self.require_agents(&described).await?;
        let spec = shrink_spec(spec);
        let (mut files, watch) = (RunFiles::new(files), unwatched());
        self.attach_data(&spec, &mut files, &watch).await?;
        let (resolved, _) =
            self.resolve_spec(&spec, files.files(), &mut Vec::new(), &watch).await?;
        let data_sources = files.list_sources(&spec.data_names());
        let resolved = v1::Spec { data_sources, ..resolved };
        let run = self.write_spec_fact(PROBE_NAME, resolved).await?;
        let mut facts = self.watch_run(&run, 0).await?;
        let has_ended = timeout(PROBE_TIME, async {
            while let Some(record) = facts.next().await {
                record?;
            }
            Ok::<(), ForecastError>(())
        });
        if let Ok(ended) = has_ended.await {
            ended?;
            return Ok(run);
        }
        let control = v1::Control {
            action: v1::control::Action::Cancel.into(),
            reason: "the time of the probe is over".to_owned(),
            ..v1::Control::default()
        };
        match self.control_run(&run, control).await {
            // It ended at the last moment.
            Ok(_) | Err(crate::RunError::Ended { .. }) => Ok(run),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns one small cycle of a spec, without what slows it down or lasts: held-out prompts, suites
/// of prompts, queues and promotions.
fn shrink_spec(mut spec: RunSpec) -> RunSpec {
    PROBE_NAME.clone_into(&mut spec.name);
    (spec.promote, spec.queue, spec.sweep) = (None, None, None);
    spec.evals.retain(|suite| suite.text.is_some());
    spec.raft = spec.raft.map(|raft| RaftSpec {
        cycles: 1,
        prompts_per_cycle: limit_count(raft.prompts_per_cycle, PROBE_PROMPTS),
        heldout: None,
        pass_at: None,
        curriculum: Default::default(),
        gates: Default::default(),
        staleness: 0,
        ..raft
    });
    if let Some(sft) = &mut spec.sft {
        sft.training.max_steps = limit_count(sft.training.max_steps, PROBE_STEPS);
    }
    spec
}

/// Returns the smaller one of two counts; 0 is no limit.
fn limit_count(wanted: u32, most: u32) -> u32 {
    if wanted == 0 { most } else { wanted.min(most) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAFT: &str = "
name: mine
base: { checkpoint: base-1 }
evals:
  - { name: text, text: a.txt }
  - { name: carry, prompts: c.jsonl, verifier: { numeric: {} } }
promote: { channel: stable }
queue: { priority: 3 }
raft:
  prompts: prompts.jsonl
  heldout: heldout.jsonl
  heldout_samples_per_prompt: 4
  pass_at: [1, 4]
  cycles: 5
  prompts_per_cycle: 400
  samples_per_prompt: 6
  staleness: 1
  verifier: { exact: {} }
  training: { max_steps: 70 }
  gates: { pass_rate: { margin: 0.2, then: stop }, patience: 3 }
";

    const SFT: &str = "{ base: { checkpoint: base-1 }, sft: { data: a.jsonl } }";

    #[test]
    fn a_probe_is_one_small_cycle_that_measures_no_prompts_and_moves_no_channel() {
        let probe = shrink_spec(RunSpec::parse(RAFT).unwrap());
        assert_eq!(probe.check_fields(), Ok(()), "its spec is valid");
        assert_eq!((probe.name.as_str(), probe.promote, probe.queue), ("probe", None, None));
        let suites: Vec<&str> = probe.evals.iter().map(|suite| suite.name.as_str()).collect();
        assert_eq!(suites, ["text"]);
        let raft = probe.raft.unwrap();
        assert_eq!((raft.cycles, raft.prompts_per_cycle, raft.staleness), (1, PROBE_PROMPTS, 0));
        assert_eq!((raft.heldout, raft.pass_at), (None, None));
        assert_eq!(raft.gates, Default::default());
        assert_eq!((raft.samples_per_prompt, raft.training.max_steps), (6, 70), "as in the spec");
    }

    #[test]
    fn a_probe_is_no_larger_than_its_run() {
        let parse = |yaml: &str| shrink_spec(RunSpec::parse(yaml).unwrap());
        let prompts = |yaml: &str| parse(yaml).raft.unwrap().prompts_per_cycle;
        assert_eq!(prompts(&RAFT.replace("prompts_per_cycle: 400", "prompts_per_cycle: 5")), 5);
        assert_eq!(prompts(&RAFT.replace("prompts_per_cycle: 400", "prompts_per_cycle: 0")), 32);
        let steps = |yaml: &str| parse(yaml).sft.unwrap().training.max_steps;
        assert_eq!(steps(SFT), PROBE_STEPS);
        assert_eq!(steps(&SFT.replace("a.jsonl", "a.jsonl, training: { max_steps: 3 }")), 3);
    }
}
