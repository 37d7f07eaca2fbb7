//! What a cycle of the demo takes beyond what is computed in it, from the facts of a real run: the
//! time from one adapter to the next in which nothing was drawn and nothing trained; and how soon
//! samples of a new adapter are there.

use std::collections::BTreeSet;

use anyhow::Context;
use bus::{Bus, Followed};
use futures::StreamExt;
use wire::{Body, Place, Record, RunId, v1};

use crate::{
    bench::{Figure, raft::on_fleet},
    commands::succeed,
    directory::Directory,
    fleet::Wanted,
    output,
    sums::{Base, Digits, Raft},
};

const CYCLES: u32 = 4;
/// Of a cycle, in percent.
const LIMIT: f64 = 5.0;

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say("fleet: cycles of the demo …");
    let directory = Directory::choose(None, "bench-overhead")?;
    let at = directory.path().join("fleet");
    let wanted = Wanted {
        agents: "trainer,generator=2,verifier,evaluator=2".into(),
        threads: None,
        outlives: false,
    };
    let records = on_fleet(&at, &wanted, 6, async |control| {
        let files = at.join("files");
        Base { seed: 1, digits: Digits::Two }.write(&files).context("write the task's files")?;
        let base = succeed(control, &files.join("base.yaml")).await?.id;
        let raft = Raft { seed: 1, base: &base, cycles: CYCLES, selection: "{}", more: "" };
        raft.write(&files).context("write the task's files")?;
        // Read as it is written: the log lets go of what is archived.
        let reading = tokio::spawn(read(control.bus().clone(), base));
        succeed(control, &files.join("raft.yaml")).await?;
        reading.await?
    })
    .await?;
    Ok([beyond(&records), handover(&records)].into_iter().flatten().collect())
}

/// All facts of the first run that is not this one, until it ends.
async fn read(bus: Bus, but: RunId) -> anyhow::Result<Vec<Record>> {
    let mut facts = bus.follow(Vec::new(), 0);
    let mut records = Vec::new();
    while let Some(followed) = facts.next().await {
        let Followed::Record(record) = followed? else { continue };
        if record.fact.subject.run == but {
            continue;
        }
        let ends = matches!(record.fact.body, Body::Done(_));
        records.push(record);
        if ends {
            break;
        }
    }
    Ok(records)
}

/// A stretch of the log's time, in seconds.
type Span = (f64, f64);

fn beyond(records: &[Record]) -> Option<Figure> {
    let trained: Vec<f64> = records.iter().filter(|record| is_final(record)).map(at_s).collect();
    // From the first adapter that was trained to the last.
    let (from, to) = (*trained.get(1)?, *trained.last()?);
    let busy = covered(records.iter().filter_map(computed).collect(), (from, to));
    let cycles = f64::from(u32::try_from(trained.len().saturating_sub(2)).ok()?);
    let beyond = (to - from - busy) / cycles;
    Some(Figure {
        name: "fleet: cycle beyond its computing",
        measured: 100.0 * (1.0 - busy / (to - from)),
        unit: "%",
        limit: Some(LIMIT),
        how: format!(
            "{:.0} ms of {:.2} s a cycle, {cycles:.0} cycles of the demo's task on 2 generators",
            1000.0 * beyond,
            (to - from) / cycles
        ),
    })
}

/// From an adapter in the log to each generator's first samples of it, beside their drawing.
fn handover(records: &[Record]) -> Option<Figure> {
    let mut waits = Vec::new();
    for trained in records.iter().filter(|record| is_final(record)) {
        let Body::Checkpoint(v1::Checkpoint { tree: Some(tree), .. }) = &trained.fact.body else {
            continue;
        };
        let mut began = BTreeSet::new();
        for record in records {
            let Body::Samples(samples) = &record.fact.body else { continue };
            if samples.adapter == tree.manifest && began.insert(&samples.agent) {
                waits.push((at_s(record) - at_s(trained), samples.wall_s));
            }
        }
    }
    let count = f64::from(u32::try_from(waits.len()).ok().filter(|count| *count > 0)?);
    let (waited, drawn) =
        waits.iter().fold((0.0, 0.0), |sum, wait| (sum.0 + wait.0, sum.1 + wait.1));
    Some(Figure {
        name: "fleet: adapter to first samples",
        measured: 1000.0 * waited / count,
        unit: "ms",
        limit: None,
        how: format!(
            "from an adapter in the log to a generator's first samples with it, on average of \
             {count:.0}; drawing them took {:.0} ms of that",
            1000.0 * drawn / count
        ),
    })
}

fn is_final(record: &Record) -> bool {
    matches!(&record.fact.body, Body::Checkpoint(checkpoint) if checkpoint.r#final)
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970")]
fn at_s(record: &Record) -> f64 {
    record.time_ms as f64 / 1000.0
}

/// When the work was done that a fact tells of, as whoever did it measured.
fn computed(record: &Record) -> Option<Span> {
    let wall_s = match (&record.fact.subject.place, &record.fact.body) {
        (Place::Samples { .. }, Body::Samples(samples)) => samples.wall_s,
        (_, Body::Checkpoint(v1::Checkpoint { wall_s, steps: 1.., .. })) => *wall_s,
        _ => return None,
    };
    let end = at_s(record);
    Some((end - wall_s, end))
}

/// How much of a span others cover together.
fn covered(mut spans: Vec<Span>, (from, to): Span) -> f64 {
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
        assert!((covered(spans, (1.0, 8.0)) - 5.0).abs() < 1e-9);
        assert!(covered(Vec::new(), (1.0, 8.0)).abs() < 1e-9);
    }
}
