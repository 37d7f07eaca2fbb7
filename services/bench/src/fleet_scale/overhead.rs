//! Measures the overhead of a cycle of the demo, from the facts of a real run.
//!
//! The overhead is the time from one adapter to the next in which no agent sampled or trained. The
//! second figure is the time from a new adapter to its first samples.

use std::collections::BTreeSet;

use anyhow::Context;
use bus::{Bus, LogEvent};
use cli::{
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::FleetProcessOptions,
    output, run_to_success,
    work_directory::WorkDirectory,
};
use futures::StreamExt;
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{BenchFigure, raft_effect::with_fleet};

const CYCLES: u32 = 4;
/// Accepted overhead of a cycle, in percent.
const LIMIT_PERCENT: f64 = 5.0;

pub(super) async fn measure_overhead() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message("fleet: cycles of the demo …");
    let directory = WorkDirectory::open_or_create(None, "bench-overhead")?;
    let at = directory.as_path().join("fleet");
    let wanted = FleetProcessOptions {
        agents: "trainer,generator=2,verifier,evaluator=2".into(),
        threads: None,
        detached: false,
    };
    let records = with_fleet(&at, &wanted, 6, async |control| {
        let files = at.join("files");
        BaseRunFiles { seed: 1, digits: DigitCount::Two }
            .write_files(&files)
            .context("write the task's files")?;
        let base = run_to_success(control, &files.join("base.yaml")).await?.id;
        let raft =
            RaftRunFiles { seed: 1, base: &base, cycles: CYCLES, selection: "{}", extra_lines: "" };
        raft.write_spec(&files).context("write the task's files")?;
        // Read the facts while they are written: archived facts leave the log.
        let reading = tokio::spawn(read_run(control.bus().clone(), base));
        run_to_success(control, &files.join("raft.yaml")).await?;
        reading.await?
    })
    .await?;
    Ok([overhead_figure(&records), handover_figure(&records)].into_iter().flatten().collect())
}

async fn read_run(bus: Bus, but: RunId) -> anyhow::Result<Vec<Record>> {
    let mut facts = bus.follow_facts(Vec::new(), 0);
    let mut records = Vec::new();
    while let Some(followed) = facts.next().await {
        let LogEvent::Record(record) = followed? else { continue };
        if record.fact.subject.run == but {
            continue;
        }
        let ends = matches!(record.fact.body, FactBody::Done(_));
        records.push(record);
        if ends {
            break;
        }
    }
    Ok(records)
}

/// A start and an end, in seconds of the log's time.
type TimeSpan = (f64, f64);

/// Returns the share of time without computation, or `None` with fewer than two trained adapters.
fn overhead_figure(records: &[Record]) -> Option<BenchFigure> {
    let trained: Vec<f64> =
        records.iter().filter(|record| is_final_checkpoint(record)).map(record_time_s).collect();
    // From the first trained adapter to the last.
    let (from, to) = (*trained.get(1)?, *trained.last()?);
    let busy = covered_seconds(records.iter().filter_map(compute_span).collect(), (from, to));
    let cycles = f64::from(u32::try_from(trained.len().saturating_sub(2)).ok()?);
    let beyond = (to - from - busy) / cycles;
    Some(BenchFigure {
        name: "fleet: cycle beyond its computing",
        measured: 100.0 * (1.0 - busy / (to - from)),
        unit: "%",
        limit: Some(LIMIT_PERCENT),
        how: format!(
            "{:.0} ms of {:.2} s per cycle; {cycles:.0} cycles of the demo's task, 2 generators",
            1000.0 * beyond,
            (to - from) / cycles
        ),
    })
}

fn handover_figure(records: &[Record]) -> Option<BenchFigure> {
    let mut waits = Vec::new();
    for trained in records.iter().filter(|record| is_final_checkpoint(record)) {
        let FactBody::Checkpoint(v1::Checkpoint { tree: Some(tree), .. }) = &trained.fact.body
        else {
            continue;
        };
        let mut began = BTreeSet::new();
        for record in records {
            let FactBody::Samples(samples) = &record.fact.body else { continue };
            if samples.adapter == tree.manifest && began.insert(&samples.agent) {
                waits.push((record_time_s(record) - record_time_s(trained), samples.wall_s));
            }
        }
    }
    let count = f64::from(u32::try_from(waits.len()).ok().filter(|count| *count > 0)?);
    let (waited, drawn) =
        waits.iter().fold((0.0, 0.0), |sum, wait| (sum.0 + wait.0, sum.1 + wait.1));
    Some(BenchFigure {
        name: "fleet: adapter to first samples",
        measured: 1000.0 * waited / count,
        unit: "ms",
        limit: None,
        how: format!(
            "from an adapter's fact to a generator's first samples with it, mean of {count:.0}; \
             sampling took {:.0} ms of that",
            1000.0 * drawn / count
        ),
    })
}

fn is_final_checkpoint(record: &Record) -> bool {
    matches!(&record.fact.body, FactBody::Checkpoint(checkpoint) if checkpoint.r#final)
}

/// Returns the time of a record, in seconds since 1970.
#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970")]
fn record_time_s(record: &Record) -> f64 {
    record.time_ms as f64 / 1000.0
}

fn compute_span(record: &Record) -> Option<TimeSpan> {
    let wall_s = match (&record.fact.subject.key, &record.fact.body) {
        (FactKey::Samples { .. }, FactBody::Samples(samples)) => samples.wall_s,
        (_, FactBody::Checkpoint(v1::Checkpoint { wall_s, steps: 1.., .. })) => *wall_s,
        _ => return None,
    };
    let end = record_time_s(record);
    Some((end - wall_s, end))
}

/// Returns how many seconds of a span the given spans cover; overlaps count once.
fn covered_seconds(mut spans: Vec<TimeSpan>, (from, to): TimeSpan) -> f64 {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut covered, mut reached) = (0.0, from);
    for (begin, end) in spans {
        let (begin, end) = (begin.max(reached), end.min(to));
        if end > begin {
            covered += end - begin;
            reached = end;
        }
    }
    covered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_covered_once() {
        let spans = vec![(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 9.0)];
        assert!((covered_seconds(spans, (1.0, 8.0)) - 5.0).abs() < 1e-9);
        assert!(covered_seconds(Vec::new(), (1.0, 8.0)).abs() < 1e-9);
    }
}
