//! Measures how long a coordinator takes to rebuild its state: decoding and folding facts.
//!
//! The log contains runs of the demo's size, one after the other. The core or stub agents wrote
//! each fact.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cli::output;
use cycle::{FleetMember, FleetSnapshot, Run};
use wire::{Fact, FactBody, Record};

use super::{
    BenchFigure,
    memory_log::{MemoryLog, RaftWorkload},
    stub_agents,
};

const FACTS: u64 = 100_000;

/// Accepted time to fold all facts, in seconds.
const LIMIT_S: f64 = 1.0;

/// A run of the demo's size.
const WORKLOAD: RaftWorkload = RaftWorkload {
    seed: 1,
    cycles: 10,
    prompts: 256,
    samples_per_prompt: 8,
    heldout: 300,
    heldout_samples_per_prompt: 2,
    max_new_tokens: 36,
};

#[derive(Debug, Default)]
struct ReplayTotals {
    facts: u64,
    bytes: u64,
    samples: u64,
    decode: Duration,
    fold: Duration,
}

pub(super) fn measure_replay() -> anyhow::Result<[BenchFigure; 2]> {
    output::print_message(&format!("fold: {FACTS} facts of runs of the demo's size …"));
    let mut tally = ReplayTotals::default();
    let mut sequence = 0;
    for number in 1.. {
        if tally.facts >= FACTS {
            break;
        }
        let records = write_run(&format!("r{number}"), sequence)?;
        sequence = records.last().map_or(sequence, |record| record.sequence);
        let left = usize::try_from(FACTS - tally.facts).unwrap_or(usize::MAX);
        tally.replay_records(&records[..records.len().min(left)])?;
    }
    let ReplayTotals { facts, bytes, samples, decode, fold } = tally;
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let per_s = |time: Duration| facts as f64 / time.as_secs_f64();
    let what = format!("{facts} facts with {samples} samples, {}", output::format_bytes(bytes));
    Ok([
        BenchFigure {
            name: "fold",
            measured: fold.as_secs_f64(),
            unit: "s",
            limit: Some(LIMIT_S),
            how: format!("{what}: {:.0} facts/s", per_s(fold)),
        },
        BenchFigure {
            name: "fold: decode",
            measured: decode.as_secs_f64(),
            unit: "s",
            limit: None,
            how: format!("the same from their JSON: {:.0} facts/s", per_s(decode)),
        },
    ])
}

fn write_run(name: &str, sequence: u64) -> anyhow::Result<Vec<Record>> {
    let member = FleetMember { tokens_per_s: 500.0, ..FleetMember::default() };
    let fleet = FleetSnapshot { generators: vec![member; 4], ..FleetSnapshot::default() };
    let mut log = MemoryLog::submit_run(name, sequence, WORKLOAD, fleet)?;
    let mut records = Vec::new();
    while !log.is_run_done() {
        log.coordinate_now();
        let fresh = log.take_records();
        ensure!(!fresh.is_empty(), "the run came to a halt: {:?}", log.run_state().current_phase());
        for record in &fresh {
            if let Some((place, body)) = stub_agents::answer_fact(Some(log.run_state()), record)? {
                log.append_fact(place, body);
            }
        }
        records.extend(fresh);
    }
    records.extend(log.take_records());
    ensure!(log.run_state().anomalies.is_empty(), "the run contradicts itself");
    Ok(records)
}

impl ReplayTotals {
    fn replay_records(&mut self, records: &[Record]) -> anyhow::Result<()> {
        let encoded: Vec<(String, Vec<u8>)> = records
            .iter()
            .map(|record| (record.fact.subject.to_string(), record.fact.to_json()))
            .collect();
        let began = Instant::now();
        for (subject, payload) in &encoded {
            std::hint::black_box(Fact::from_json(subject, payload)?);
        }
        self.decode += began.elapsed();
        let (first, rest) = records.split_first().context("a run has a spec")?;
        let began = Instant::now();
        let mut run = Run::start(first).context("a run starts with its spec")?;
        rest.iter().for_each(|record| run.fold_record(record));
        self.fold += began.elapsed();
        ensure!(run.anomalies.is_empty(), "a replayed run contradicts itself");
        self.facts += records.len() as u64;
        self.bytes += encoded.iter().map(|(_, payload)| payload.len() as u64).sum::<u64>();
        self.samples += records.iter().map(|record| sample_count(&record.fact.body)).sum::<u64>();
        Ok(())
    }
}

fn sample_count(body: &FactBody) -> u64 {
    match body {
        FactBody::Samples(samples) => samples.samples.len() as u64,
        _ => 0,
    }
}
