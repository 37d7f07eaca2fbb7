//! Whole logs: folded, planned after each fact, and audited.

use std::{collections::BTreeMap, sync::OnceLock};

use cycle::{
    FleetMember, FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, audit_records,
    next_commands,
};
use wire::{Fact, PromptEntry, Record};

use super::assert_roundtrip;
use crate::lines;

/// More facts only need more time.
const FACTS_MAX: usize = 256;

/// One fact per line, `subject payload`. All facts belong to one run.
pub(super) fn fold(input: &[u8]) {
    let facts = input.split(|byte| *byte == b'\n').filter_map(|line| {
        let (subject, payload) = lines::split_fact(line)?;
        Fact::from_json(subject, payload).ok()
    });
    let records: Vec<Record> = (1..)
        .zip(facts.take(FACTS_MAX))
        .map(|(sequence, fact)| Record { sequence, time_ms: time_ms(sequence), author: None, fact })
        .collect();
    let mut run: Option<Run> = None;
    for record in &records {
        match &mut run {
            Some(run) => run.fold_record(record),
            None => run = Run::start(record),
        }
        if let Some(run) = &run {
            next(run);
            let _ = control::run_to_proto(run);
        }
    }
    let _ = audit_records(&records);
}

/// The clock of the log may jump, also backwards.
fn time_ms(sequence: u64) -> u64 {
    if sequence.is_multiple_of(7) { u64::MAX - sequence } else { sequence * 1000 }
}

fn next(run: &Run) {
    static PROMPTS: OnceLock<Vec<PromptEntry>> = OnceLock::new();
    let prompts = PROMPTS.get_or_init(prompts);
    let speeds = [10.0, 0.0, -1.0, f64::NAN, f64::INFINITY];
    let member = |tokens_per_s| FleetMember { tokens_per_s, ..FleetMember::default() };
    let generators: Vec<FleetMember> = speeds.map(member).into();
    let others = generators[..1].to_vec();
    let fleet = FleetSnapshot {
        generators,
        verifiers: others.clone(),
        trainers: others,
        ..FleetSnapshot::default()
    };
    let raft = run.raft_spec();
    let names = raft.iter().flat_map(|raft| &raft.prompt_suites).map(|suite| suite.name.clone());
    let suites: BTreeMap<_, _> = names.map(|name| (name, prompts[..2].to_vec())).collect();
    let inputs = PlannerInputs {
        prompts,
        heldout: &prompts[..4],
        suites: &suites,
        fleet: &fleet,
        sizing: &JobSizing::default(),
        timeouts: &ReissueTimeouts::default(),
        check_stragglers: true,
        now_ms: if run.sequence.is_multiple_of(2) { u64::MAX } else { run.sequence },
    };
    for command in next_commands(run, inputs) {
        assert_roundtrip(&command.fact);
    }
}

fn prompts() -> Vec<PromptEntry> {
    let lines: Vec<String> =
        (0..8).map(|n| format!(r#"{{"id":"p{n}","prompt":"{n}+1="}}"#)).collect();
    PromptEntry::parse_all(lines.join("\n").as_bytes()).expect("these are prompts")
}
