//! `flotilla court`: compares objectives on the samples of a cycle.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, bail};
use control::{Court, CourtRanking, CourtTrial, FleetControl, RankedObjective, rank_objectives};
use cycle::Run;
use futures::{StreamExt, TryStreamExt, stream};
use objective::{Objective, ObjectiveName};
use wire::{RunId, v1::run::State};

use crate::{
    args::{CourtArgs, GlobalArgs},
    output, run_progress,
};

const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The runs that are submitted at once.
const SUBMISSIONS_AT_ONCE: usize = 4;

pub(crate) async fn run_court(flags: &GlobalArgs, args: &CourtArgs) -> anyhow::Result<()> {
    let run = RunId::new(args.run.as_str())?;
    let objectives = parse_objectives(&args.objectives, &args.set)?;
    let control = flags.fleet.connect_control().await?;
    let court = control.prepare_court(&run, args.cycle, &objectives).await?;
    let there = control.list_runs().await?;
    let mut runs: Vec<Vec<RunId>> = Vec::new();
    for trial in &court.trials {
        let submit = |seed| submit_trial(&control, &court, trial, seed, &there);
        let submitted = stream::iter(1..=args.seeds).map(submit).buffered(SUBMISSIONS_AT_ONCE);
        runs.push(submitted.try_collect().await?);
    }
    output::print_message(&format!(
        "{run}, cycle {}: {} runs train {} objectives; to go on after an interruption, give the \
         same command with --cycle {}",
        court.cycle,
        runs.iter().map(Vec::len).sum::<usize>(),
        runs.len(),
        court.cycle
    ));
    let ended = await_runs(&control, &runs).await?;
    let rate = |id: &RunId| {
        let done = ended.get(id).and_then(|run| run.cycles.get(&1)?.done.as_ref());
        done.and_then(|done| done.heldout.as_ref()).map(|rate| rate.mean)
    };
    let rates = |ids: &Vec<RunId>| ids.iter().map(|id| (id.to_string(), rate(id))).collect();
    let ranking = rank_objectives(&court, runs.iter().map(rates).collect());
    output::print_json_or(flags.json, &ranking, || print_ranking(&ranking))
}

async fn submit_trial(
    control: &FleetControl,
    court: &Court,
    trial: &CourtTrial,
    seed: u32,
    there: &[Run],
) -> anyhow::Result<RunId> {
    let submitted = control.submit_trial(court, trial, seed, there).await;
    submitted.with_context(|| format!("submit {}, seed {seed}", trial.objective))
}

/// Waits until all runs have ended, and returns them by id.
async fn await_runs(
    control: &FleetControl,
    runs: &[Vec<RunId>],
) -> anyhow::Result<BTreeMap<RunId, Run>> {
    let wanted: Vec<&RunId> = runs.iter().flatten().collect();
    let bar = run_progress::create_bar();
    bar.set_length(wanted.len() as u64);
    let (mut reported, mut shown_wait) = (0, String::new());
    loop {
        let all = control.list_runs().await?;
        let ours = all.into_iter().filter(|run| wanted.contains(&&run.id));
        let ours: BTreeMap<RunId, Run> = ours.map(|run| (run.id.clone(), run)).collect();
        let is_over = |run: &&Run| run.done.is_some();
        let over = ours.values().filter(is_over).count();
        bar.set_position(over as u64);
        if over > reported && !output::stderr_is_terminal() {
            let verb = if over == 1 { "has" } else { "have" };
            output::print_message(&format!("{over} of {} runs {verb} ended", wanted.len()));
        }
        reported = over;
        let open = ours.values().find(|run| run.current_state() == State::Running);
        if let Some(open) = open {
            let agents = control.list_agents().await?;
            let now_s = wire::clock::unix_seconds();
            let waits = cycle::describe_missing_roles(&open.spec, &agents, now_s);
            if !waits.is_empty() && waits != shown_wait {
                output::print_message(&format!("{} {waits}", open.id));
            }
            shown_wait = waits;
        }
        if over == wanted.len() {
            bar.finish_and_clear();
            return Ok(ours);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn parse_objectives(names: &[String], settings: &[String]) -> anyhow::Result<Vec<Objective>> {
    let mut objectives = Vec::new();
    for name in names {
        let found = ObjectiveName::find(name).with_context(|| format!("--objectives {name}"))?;
        if objectives.iter().any(|it: &Objective| it.name() == found) {
            bail!("--objectives: {name} is named twice (O101)");
        }
        objectives.push(Objective::new(found));
    }
    for setting in settings {
        let parts = setting.split_once('.');
        let parts = parts.and_then(|(name, rest)| Some((name, rest.split_once('=')?)));
        let (name, (key, value)) = parts.with_context(|| {
            format!("--set {setting}: write OBJECTIVE.KEY=VALUE, such as dapo.kl=0.001 (O101)")
        })?;
        let value =
            value.parse().with_context(|| format!("--set {setting}: not a number (O101)"))?;
        let named = objectives.iter_mut().find(|it| it.name().as_str() == name);
        let named = named.with_context(|| {
            format!("--set {setting}: {name} is none of the --objectives (O101)")
        })?;
        named.set(key, value).with_context(|| format!("--set {setting}"))?;
    }
    Ok(objectives)
}

fn print_ranking(ranking: &CourtRanking) {
    let CourtRanking { run, cycle, before, ranking } = ranking;
    let before = before.map_or(String::new(), |rate| {
        format!("; held-out pass rate before it: {:.1} %", 100.0 * rate)
    });
    output::print_line(&format!("{run}, cycle {cycle}{before}"));
    let interval = |low: f64, high: f64| format!("{:.1} to {:.1}", 100.0 * low, 100.0 * high);
    let row = |(place, it): (usize, &RankedObjective)| {
        let succeeded = it.runs.iter().filter(|(_, rate)| rate.is_some()).count();
        [
            (place + 1).to_string(),
            it.objective.clone(),
            it.mean.map_or("-".into(), |mean| format!("{:.1}", 100.0 * mean)),
            it.interval.map_or("-".into(), |(low, high)| interval(low, high)),
            it.behind.map_or("-".into(), |(_, low, high)| interval(low, high)),
            it.kept.to_string(),
            it.tokens.to_string(),
            succeeded.to_string(),
        ]
    };
    let header = [
        ">",
        "objective",
        ">pass rate %",
        "95 %",
        "behind the first, 95 %",
        ">kept",
        ">tokens",
        ">seeds",
    ];
    output::print_table(header, ranking.iter().enumerate().map(row));
}
