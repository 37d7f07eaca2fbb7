//! How long a coordinator takes to learn where things stand: facts decoded, facts folded.
//!
//! The log is that of runs of the demo's size, one after the other, each fact what the
//! core or an agent would have written.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cycle::{Fleet, Member, Run};
use wire::{Body, Fact, Record};

use super::{
    Figure, agents,
    log::{Log, Workload},
};
use crate::output;

const FACTS: u64 = 100_000;

/// Seconds for all of them.
const LIMIT_S: f64 = 1.0;

const WORKLOAD: Workload = Workload {
    seed: 1,
    cycles: 10,
    prompts: 256,
    samples_per_prompt: 8,
    heldout: 300,
    heldout_samples_per_prompt: 2,
    max_new_tokens: 36,
};

#[derive(Debug, Default)]
struct Tally {
    facts: u64,
    bytes: u64,
    samples: u64,
    decode: Duration,
    fold: Duration,
}

pub(super) fn measure() -> anyhow::Result<[Figure; 2]> {
    output::say(&format!("fold: {FACTS} facts of runs of the demo's size …"));
    let mut tally = Tally::default();
    let mut sequence = 0;
    for number in 1.. {
        if tally.facts >= FACTS {
            break;
        }
        let records = write_run(&format!("r{number}"), sequence)?;
        sequence = records.last().map_or(sequence, |record| record.sequence);
        let left = usize::try_from(FACTS - tally.facts).unwrap_or(usize::MAX);
        tally.replay(&records[..records.len().min(left)])?;
    }
    let Tally { facts, bytes, samples, decode, fold } = tally;
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let per_s = |time: Duration| facts as f64 / time.as_secs_f64();
    let what = format!("{facts} facts with {samples} samples, {}", output::bytes(bytes));
    Ok([
        Figure {
            name: "fold",
            measured: fold.as_secs_f64(),
            unit: "s",
            limit: Some(LIMIT_S),
            how: format!("{what}: {:.0} facts/s", per_s(fold)),
        },
        Figure {
            name: "fold: decode",
            measured: decode.as_secs_f64(),
            unit: "s",
            limit: None,
            how: format!("the same from their JSON: {:.0} facts/s", per_s(decode)),
        },
    ])
}

/// A whole run, from its spec to its end.
fn write_run(name: &str, sequence: u64) -> anyhow::Result<Vec<Record>> {
    let member = Member { tokens_per_s: 500.0, ..Member::default() };
    let fleet = Fleet { generators: vec![member; 4], ..Fleet::default() };
    let mut log = Log::submit(name, sequence, WORKLOAD, fleet)?;
    let mut records = Vec::new();
    while !log.is_done() {
        log.coordinate();
        let fresh = log.take();
        ensure!(!fresh.is_empty(), "the run came to a halt: {:?}", log.run().phase());
        for record in &fresh {
            if let Some((place, body)) = agents::answer(Some(log.run()), record)? {
                log.write(place, body);
            }
        }
        records.extend(fresh);
    }
    records.extend(log.take());
    ensure!(log.run().anomalies.is_empty(), "the run contradicts itself");
    Ok(records)
}

impl Tally {
    /// What a coordinator that starts does with a run's facts.
    fn replay(&mut self, records: &[Record]) -> anyhow::Result<()> {
        let encoded: Vec<(String, Vec<u8>)> = records
            .iter()
            .map(|record| (record.fact.subject.to_string(), record.fact.encode()))
            .collect();
        let began = Instant::now();
        for (subject, payload) in &encoded {
            std::hint::black_box(Fact::decode(subject, payload)?);
        }
        self.decode += began.elapsed();
        let (first, rest) = records.split_first().context("a run has a spec")?;
        let began = Instant::now();
        let mut run = Run::start(first).context("a run starts with its spec")?;
        rest.iter().for_each(|record| run.fold(record));
        self.fold += began.elapsed();
        ensure!(run.anomalies.is_empty(), "a replayed run contradicts itself");
        self.facts += records.len() as u64;
        self.bytes += encoded.iter().map(|(_, payload)| payload.len() as u64).sum::<u64>();
        self.samples += records.iter().map(|record| samples(&record.fact.body)).sum::<u64>();
        Ok(())
    }
}

fn samples(body: &Body) -> u64 {
    match body {
        Body::Samples(samples) => samples.samples.len() as u64,
        _ => 0,
    }
}
