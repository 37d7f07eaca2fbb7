//! A log in memory and its coordinator: the core decides, what it decides is folded at once.

use std::{collections::BTreeMap, fmt::Write};

use anyhow::Context;
use cycle::{Fleet, Inputs, Run, Sizing, Waiting, decide};
use wire::{Body, Digest, Fact, Place, Prompt, Record, RunId, Subject, v1};

/// A reward-ranked run to drive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workload {
    pub seed: u64,
    pub cycles: u32,
    pub prompts: u32,
    pub samples_per_prompt: u32,
    pub heldout: u32,
    pub heldout_samples_per_prompt: u32,
    pub max_new_tokens: u32,
}

pub(super) struct Log {
    run: Run,
    /// Written since `take`.
    fresh: Vec<Record>,
    sequence: u64,
    time_ms: u64,
    prompts: Vec<Prompt>,
    heldout: Vec<Prompt>,
    fleet: Fleet,
}

impl Log {
    /// A run that was just submitted, its first fact after `sequence`.
    pub(super) fn submit(
        name: &str,
        sequence: u64,
        workload: Workload,
        fleet: Fleet,
    ) -> anyhow::Result<Self> {
        let id = RunId::new(name)?;
        let fact = Fact {
            subject: Subject::new(&id, Place::Spec),
            body: Body::Spec(spec(name, workload)),
        };
        let record = Record { sequence: sequence + 1, time_ms: 0, author: None, fact };
        Ok(Self {
            run: Run::start(&record).context("a spec starts a run")?,
            fresh: vec![record],
            sequence: sequence + 1,
            time_ms: 0,
            prompts: prompts("p", workload.prompts)?,
            heldout: prompts("h", workload.heldout)?,
            fleet,
        })
    }

    pub(super) fn is_done(&self) -> bool {
        self.run.done.is_some()
    }

    pub(super) fn run(&self) -> &Run {
        &self.run
    }

    pub(super) fn write(&mut self, place: Place, body: Body) {
        self.sequence += 1;
        self.time_ms += 1;
        let fact = Fact { subject: Subject::new(&self.run.id, place), body };
        let record = Record { sequence: self.sequence, time_ms: self.time_ms, author: None, fact };
        self.run.fold(&record);
        self.fresh.push(record);
    }

    /// Decides on a fleet at a time, and perhaps what should be ordered once more.
    pub(super) fn coordinate_with(&mut self, fleet: Fleet, now_ms: u64, again: bool) {
        self.fleet = fleet;
        self.time_ms = self.time_ms.max(now_ms);
        self.decide(again);
    }

    /// Decides until there is nothing to say.
    pub(super) fn coordinate(&mut self) {
        self.decide(true);
    }

    fn decide(&mut self, mut again: bool) {
        loop {
            let inputs = Inputs {
                prompts: &self.prompts,
                heldout: &self.heldout,
                suites: &BTreeMap::new(),
                fleet: &self.fleet,
                sizing: &Sizing::default(),
                waiting: &Waiting::default(),
                again: std::mem::take(&mut again),
                now_ms: self.time_ms,
            };
            let commands = decide(&self.run, inputs);
            if commands.is_empty() {
                return;
            }
            for command in commands {
                self.write(command.fact.subject.place, command.fact.body);
            }
        }
    }

    /// The records written since the last call.
    pub(super) fn take(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.fresh)
    }
}

pub(super) fn spec(run: &str, workload: Workload) -> v1::Spec {
    let Workload { seed, cycles, prompts, samples_per_prompt, heldout, .. } = workload;
    let Workload { heldout_samples_per_prompt, max_new_tokens, .. } = workload;
    let suites = if heldout > 0 { vec!["text"] } else { Vec::new() };
    let suite = |name: &str| v1::Suite { name: name.into(), ..Default::default() };
    v1::Spec {
        run: run.into(),
        seed,
        base: Some(v1::Base { tree: Some(tree("base")), random_init: false }),
        pool: "default".into(),
        suites: suites.into_iter().map(suite).collect(),
        kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
            prompts: Some(v1::Blob::default()),
            prompt_count: prompts,
            heldout_count: heldout,
            cycles,
            samples_per_prompt,
            heldout_samples_per_prompt,
            sampling: Some(v1::Sampling {
                temperature: 0.8,
                top_p: 1.0,
                max_new_tokens,
                ..Default::default()
            }),
            selection: Some(v1::Selection {
                keep_per_prompt: 1,
                min_reward: 0.5,
                ..Default::default()
            }),
            ..Default::default()
        })),
        ..Default::default()
    }
}

pub(super) fn tree(name: &str) -> v1::Tree {
    let manifest = Digest::of(name.as_bytes()).to_string();
    v1::Tree { path: format!("trees/{name}"), manifest }
}

fn prompts(prefix: &str, count: u32) -> anyhow::Result<Vec<Prompt>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    Ok(Prompt::parse_all(lines(prefix, count)?.as_bytes())?)
}

/// A file of prompts.
pub(super) fn lines(prefix: &str, count: u32) -> anyhow::Result<String> {
    let mut lines = String::new();
    for n in 0..count {
        writeln!(lines, r#"{{"id":"{prefix}-{n}","prompt":"{n}+{}=","answer":"0"}}"#, n + 1)?;
    }
    Ok(lines)
}
