//! Measures a Python verifier that keeps running, against one process for each completion.

use std::time::{Duration, Instant};

use anyhow::bail;
use cli::output;
use serde_json::Map;
use verifier::{OfflineVerifier, Toolchain, VerifyItem};
use wire::v1::{
    Verifier,
    verdicts::Outcome,
    verifier::{Command, How},
};

use super::BenchFigure;
use crate::verifier_speed::open_toolchain;

/// Completions of a round with one process for each, and with processes that keep running.
const STARTED: usize = 60;
const SERVED: usize = 6000;

/// Rounds of each method, which alternate; the best one counts, because the machine may be busy.
const TURNS: usize = 3;

/// Accepted time relative to one process for each completion: a fiftieth.
const LIMIT: f64 = 1.0 / 50.0;

/// Works in both ways, with modules of the standard library alone.
const SCRIPT: &str = "\
import json, re, sys
for line in sys.stdin:
    sample = json.loads(line)
    found = re.findall(r'-?[0-9]+', sample['completion'])
    right = found and found[-1] == sample['answer']
    verdict = {'outcome': 'pass' if right else 'fail'}
    if 'id' in sample:
        verdict['id'] = sample['id']
    print(json.dumps(verdict), flush=True)
";

/// Measures both ways in the sandbox. Returns `None` on a host without Python or without a sandbox,
/// and prints the reason.
pub(super) fn measure_served() -> anyhow::Result<Option<BenchFigure>> {
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    output::print_message(&format!("served: a Python verifier, {jobs} completions at a time …"));
    let (toolchain, tested) = open_toolchain()?.test_host();
    let lacking = match tested.contained {
        Err(problem) => Some(problem),
        Ok(_) if !toolchain.tools.0.contains_key("python") => {
            Some("there is no python3 on PATH".to_owned())
        }
        Ok(_) => None,
    };
    if let Some(problem) = lacking {
        output::print_message(&format!("served: skipped: {problem}"));
        return Ok(None);
    }
    let (mut started, mut served) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        started = started.min(time_completion(&toolchain, false, STARTED, jobs)?);
        served = served.min(time_completion(&toolchain, true, SERVED, jobs)?);
    }
    let rate = |time: Duration| 1.0 / time.as_secs_f64();
    Ok(Some(BenchFigure {
        name: "served verifier: time of one process each",
        measured: served.as_secs_f64() / started.as_secs_f64(),
        unit: "x",
        limit: Some(LIMIT),
        how: format!(
            "{:.0} completions/s by processes that keep running, {:.1} with one process each: \
             {:.0} times as many",
            rate(served),
            rate(started),
            rate(served) / rate(started)
        ),
    }))
}

/// Returns the time per completion of a verifier that has judged a few completions before.
fn time_completion(
    toolchain: &Toolchain,
    serve: bool,
    completions: usize,
    jobs: usize,
) -> anyhow::Result<Duration> {
    let argv = ["python3", "-c", SCRIPT].map(str::to_owned).to_vec();
    let start_timeout_s = if serve { 60.0 } else { 0.0 };
    let command = Command { argv, timeout_s: 60.0, serve, start_timeout_s, ..Command::default() };
    let settings = Verifier { how: Some(How::Command(command)) };
    let once = OfflineVerifier::new(settings, toolchain.clone(), jobs)?;
    let items: Vec<VerifyItem> = (0..completions).map(make_item).collect();
    once.judge_items(&items[..jobs.min(completions)]);
    let began = Instant::now();
    let judged = once.judge_items(&items);
    let took = began.elapsed() / u32::try_from(completions)?;
    match judged.iter().find(|one| one.verdict.outcome() != Outcome::Pass) {
        None => Ok(took),
        Some(one) => bail!("a completion did not pass: {}", one.verdict.detail),
    }
}

fn make_item(number: usize) -> VerifyItem {
    VerifyItem {
        prompt_id: number.to_string(),
        index: 0,
        prompt: format!("{number} + 1 = "),
        completion: format!("It is {}.", number + 1),
        answer: Some((number + 1).to_string()),
        episode: None,
        fields: Map::new(),
    }
}
