//! Keeps a log in memory, with a planner whose commands are folded immediately.

use std::{collections::BTreeMap, fmt::Write};

use anyhow::Context;
use cycle::{FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, next_commands};
use wire::{Digest, Fact, FactBody, FactKey, PromptEntry, Record, RunId, Subject, v1};

#[derive(Debug, Clone, Copy)]
pub(super) struct RaftWorkload {
    pub seed: u64,
    pub cycles: u32,
    pub prompts: u32,
    pub samples_per_prompt: u32,
    pub heldout: u32,
    pub heldout_samples_per_prompt: u32,
    pub max_new_tokens: u32,
}

/// Each written fact is folded into the run at once, so that the planner always sees the latest
/// state.
pub(super) struct MemoryLog {
    run: Run,
    untaken: Vec<Record>,
    sequence: u64,
    time_ms: u64,
    prompts: Vec<PromptEntry>,
    heldout: Vec<PromptEntry>,
    fleet: FleetSnapshot,
}

impl MemoryLog {
    pub(super) fn submit_run(
        name: &str,
        sequence: u64,
        workload: RaftWorkload,
        fleet: FleetSnapshot,
    ) -> anyhow::Result<Self> {
        let id = RunId::new(name)?;
        let fact = Fact {
            subject: Subject::new(&id, FactKey::Spec),
            body: FactBody::Spec(make_raft_spec(name, workload)),
        };
        let record = Record { sequence: sequence + 1, time_ms: 0, author: None, fact };
        Ok(Self {
            run: Run::start(&record).context("a spec starts a run")?,
            untaken: vec![record],
            sequence: sequence + 1,
            time_ms: 0,
            prompts: make_prompts("p", workload.prompts)?,
            heldout: make_prompts("h", workload.heldout)?,
            fleet,
        })
    }

    pub(super) fn is_run_done(&self) -> bool {
        self.run.done.is_some()
    }

    pub(super) fn run_state(&self) -> &Run {
        &self.run
    }

    /// Moves the clock of the log forward.
    pub(super) fn advance_time(&mut self, now_ms: u64) {
        self.time_ms = self.time_ms.max(now_ms);
    }

    pub(super) fn append_fact(&mut self, place: FactKey, body: FactBody) {
        self.sequence += 1;
        self.time_ms += 1;
        let fact = Fact { subject: Subject::new(&self.run.id, place), body };
        let record = Record { sequence: self.sequence, time_ms: self.time_ms, author: None, fact };
        self.run.fold_record(&record);
        self.untaken.push(record);
    }

    pub(super) fn coordinate_fleet(&mut self, fleet: FleetSnapshot, now_ms: u64, again: bool) {
        self.fleet = fleet;
        self.advance_time(now_ms);
        self.write_commands(again);
    }

    pub(super) fn coordinate_now(&mut self) {
        self.write_commands(true);
    }

    fn write_commands(&mut self, mut again: bool) {
        loop {
            let inputs = PlannerInputs {
                prompts: &self.prompts,
                heldout: &self.heldout,
                suites: &BTreeMap::new(),
                fleet: &self.fleet,
                sizing: &JobSizing::default(),
                timeouts: &ReissueTimeouts::default(),
                check_stragglers: std::mem::take(&mut again),
                now_ms: self.time_ms,
            };
            let commands = next_commands(&self.run, inputs);
            if commands.is_empty() {
                return;
            }
            for command in commands {
                self.append_fact(command.fact.subject.key, command.fact.body);
            }
        }
    }

    pub(super) fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.untaken)
    }
}

pub(super) fn make_raft_spec(run: &str, workload: RaftWorkload) -> v1::Spec {
    let RaftWorkload { seed, cycles, prompts, samples_per_prompt, heldout, .. } = workload;
    let RaftWorkload { heldout_samples_per_prompt, max_new_tokens, .. } = workload;
    let suites = if heldout > 0 { vec!["text"] } else { Vec::new() };
    let suite = |name: &str| v1::Suite { name: name.into(), ..Default::default() };
    v1::Spec {
        run: run.into(),
        seed,
        base: Some(v1::Base { tree: Some(make_tree("base")), random_init: false, adapter: None }),
        pool: "default".into(),
        suites: suites.into_iter().map(suite).collect(),
        kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
            verifier: Some(v1::Verifier::default()),
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

pub(super) fn make_tree(name: &str) -> v1::Tree {
    let manifest = Digest::hash_bytes(name.as_bytes()).to_string();
    v1::Tree { path: format!("trees/{name}"), manifest }
}

fn make_prompts(prefix: &str, count: u32) -> anyhow::Result<Vec<PromptEntry>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    Ok(PromptEntry::parse_all(prompt_lines(prefix, count)?.as_bytes())?)
}

pub(super) fn prompt_lines(prefix: &str, count: u32) -> anyhow::Result<String> {
    let mut lines = String::new();
    for n in 0..count {
        writeln!(lines, r#"{{"id":"{prefix}-{n}","prompt":"{n}+{}=","answer":"0"}}"#, n + 1)?;
    }
    Ok(lines)
}
