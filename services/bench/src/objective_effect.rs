//! Measures `flotilla-bench objectives`: how runs learn with other objectives than RAFT, from a
//! teacher, and whether `flotilla court` ranks objectives as new runs do.
//!
//! It runs the built-in tasks on a real fleet of this machine. Rates depend only on the seeds, and
//! one seed takes half an hour, so each result is a file of `--results`: what is there is read instead
//! of measured again.

mod markdown;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, bail};
use cli::{
    VERSION, await_success,
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::FleetProcessOptions,
    output, run_to_success, submit_run,
    work_directory::WorkDirectory,
};
use control::{CourtRanking, FleetControl, rank_objectives};
use objective::{Objective, ObjectiveName};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;
use wire::RunId;

use crate::{
    args::BenchArgs,
    conditions::{Conditions, ConditionsMeter},
    raft_effect::{run_result::RunResult, with_fleet},
};

/// The compared objectives, each with the epochs and the learning rate of its trainings; the first
/// is the one that others are compared with. Failures count for most of them, and with as many
/// steps as RAFT, they drive the tiny model away.
const OBJECTIVES: [(ObjectiveName, u32, f64); 8] = [
    (ObjectiveName::Raft, 3, 0.002),
    (ObjectiveName::RaftPlusPlus, 3, 0.002),
    (ObjectiveName::Rloo, 1, 0.0003),
    (ObjectiveName::DrGrpo, 1, 0.001),
    (ObjectiveName::Dapo, 1, 0.001),
    (ObjectiveName::Cispo, 1, 0.001),
    (ObjectiveName::Dpo, 1, 0.001),
    (ObjectiveName::Kto, 1, 0.0003),
];

/// The objectives that a court ranks, by the training settings of RAFT.
const COURT: [ObjectiveName; 6] = [
    ObjectiveName::Raft,
    ObjectiveName::RaftPlusPlus,
    ObjectiveName::Rloo,
    ObjectiveName::DrGrpo,
    ObjectiveName::Dapo,
    ObjectiveName::Dpo,
];

const CYCLES: u32 = 6;

/// The cycle of RAFT whose pass rate a student must reach.
const REACHED_CYCLE: usize = 4;

/// With a quarter of RAFT's samples a cycle, a student draws less than a third of its tokens.
const STUDENT_CYCLES: u32 = 5;

const AGENTS: &str = "trainer,generator=2,verifier,scorer,evaluator";
const AGENT_COUNT: usize = 6;

#[derive(Debug, Serialize)]
struct ObjectivesReport {
    #[serde(flatten)]
    conditions: Conditions,
    seeds: u32,
    /// Versions of the programs that measured the results.
    versions: BTreeSet<String>,
    tasks: Vec<TaskRuns>,
    students: Vec<Student>,
    court: CourtAgreement,
}

/// The runs of all objectives on a task.
#[derive(Debug, Serialize)]
struct TaskRuns {
    title: &'static str,
    /// One list for each objective, with a run for each seed.
    objectives: Vec<(&'static str, Vec<RunResult>)>,
}

/// The content of a file of results.
#[derive(Debug, Serialize, Deserialize)]
struct StoredResult<T> {
    version: String,
    result: T,
}

/// Files of results, and the versions that measured those that were used.
struct ResultFiles {
    directory: PathBuf,
    versions: BTreeSet<String>,
}

/// A student beside the RAFT run on the same base.
#[derive(Debug, Serialize, Deserialize)]
struct Student {
    teacher_rate: f64,
    /// Pass rate and drawn training tokens after each cycle.
    student: Vec<(f64, u64)>,
    raft: Vec<(f64, u64)>,
}

/// The pass rates of a court, and of new runs of one cycle with the same seeds.
#[derive(Debug, Serialize, Deserialize)]
struct CourtAgreement {
    ranking: CourtRanking,
    /// Objective and mean pass rate after one cycle.
    runs: Vec<(String, f64)>,
    kendall_tau: f64,
}

pub(super) async fn bench_objectives(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let directory = WorkDirectory::open_or_create(args.dir.as_deref(), "bench-objectives")?;
    let meter = ConditionsMeter::start();
    let at = directory.as_path();
    let wanted = FleetProcessOptions { agents: AGENTS.into(), threads: None, detached: false };
    let results = args.results.as_deref().unwrap_or(at);
    fs::create_dir_all(results).with_context(|| format!("create {}", results.display()))?;
    let mut files = ResultFiles { directory: results.to_owned(), versions: BTreeSet::new() };
    let measured = with_fleet(&new_fleet_directory(at), &wanted, AGENT_COUNT, async |control| {
        measure_all(control, at, &mut files, args.seeds).await
    })
    .await;
    let (tasks, students, court) = match measured {
        Ok(measured) => measured,
        Err(error) => {
            let kept = directory.keep_files();
            return Err(error.context(format!("its logs are in {}", kept.display())));
        }
    };
    let (conditions, versions) = (meter.finish(), files.versions);
    let report =
        ObjectivesReport { conditions, seeds: args.seeds, versions, tasks, students, court };
    if args.json {
        output::print_json(&json!(report))?;
    } else {
        output::print_text(&markdown::write_markdown(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a directory for a fleet that no earlier process used.
fn new_fleet_directory(parent: &Path) -> PathBuf {
    let mut number = 1;
    loop {
        let path = parent.join(format!("fleet-{number}"));
        if !path.exists() {
            return path;
        }
        number += 1;
    }
}

impl ResultFiles {
    /// Reads the result NAME.json, or measures it and writes the file.
    async fn read_or_measure<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        measurement: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let file = self.directory.join(name).with_extension("json");
        let stored: StoredResult<T> = if file.exists() {
            let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            serde_json::from_slice(&bytes).with_context(|| {
                format!("{}: not a result of this build; delete it", file.display())
            })?
        } else {
            let measured = StoredResult { version: VERSION.to_owned(), result: measurement.await? };
            fs::write(&file, serde_json::to_vec(&measured)?)
                .with_context(|| format!("write {}", file.display()))?;
            measured
        };
        self.versions.insert(stored.version);
        Ok(stored.result)
    }
}

/// Measures one seed after the other, so that those which are complete are comparable.
async fn measure_all(
    control: &FleetControl,
    directory: &Path,
    files: &mut ResultFiles,
    seeds: u32,
) -> anyhow::Result<(Vec<TaskRuns>, Vec<Student>, CourtAgreement)> {
    let tasks = [("Two-digit sums", DigitCount::Two), ("Three-digit sums", DigitCount::Three)];
    let objectives = || OBJECTIVES.map(|(name, ..)| (name.as_str(), Vec::new())).into();
    let mut measured =
        tasks.map(|(title, digits)| (digits, TaskRuns { title, objectives: objectives() }));
    let mut students = Vec::new();
    for seed in 1..=u64::from(seeds) {
        for (digits, task) in &mut measured {
            let name = format!("{digits:?}-{seed}").to_lowercase();
            let task_files = directory.join(&name);
            let results = run_objectives(control, &task_files, seed, *digits);
            let results: Vec<RunResult> = files.read_or_measure(&name, results).await?;
            for ((_, of_objective), result) in task.objectives.iter_mut().zip(results) {
                of_objective.push(result);
            }
            output::print_message(&format!("{}: seed {seed} of {seeds}", task.title));
        }
        let name = format!("taught-{seed}");
        let task_files = directory.join(&name);
        let taught = teach_student(control, &task_files, seed);
        students.push(files.read_or_measure(&name, taught).await?);
        output::print_message(&format!("distillation: seed {seed} of {seeds}"));
    }
    let court = check_court(control, directory, seeds);
    let court = files.read_or_measure(&format!("court-{seeds}"), court).await?;
    Ok((measured.map(|(_, task)| task).into(), students, court))
}

/// Returns the runs in the order of [`OBJECTIVES`].
async fn run_objectives(
    control: &FleetControl,
    files: &Path,
    seed: u64,
    digits: DigitCount,
) -> anyhow::Result<Vec<RunResult>> {
    let base = train_base(control, files, seed, digits).await?;
    let mut submitted = Vec::new();
    for (name, epochs, rate) in OBJECTIVES {
        let more = format!("objective: {}", name.as_str());
        let trained = [
            ("epochs: 3", format!("epochs: {epochs}")),
            ("learning_rate: 0.002", format!("learning_rate: {rate}")),
        ];
        let wanted = (seed, &base, CYCLES);
        let id = submit_changed(control, files, wanted, &more, &trained).await?;
        submitted.push((id, Instant::now()));
    }
    let mut results = Vec::new();
    for (id, began) in submitted {
        let run = await_success(control, &id).await?;
        results.push(RunResult::from_run(&run, seed, began.elapsed()));
    }
    Ok(results)
}

async fn train_base(
    control: &FleetControl,
    files: &Path,
    seed: u64,
    digits: DigitCount,
) -> anyhow::Result<RunId> {
    BaseRunFiles { seed, digits }.write_files(files).context("write the task's files")?;
    Ok(run_to_success(control, &files.join("base.yaml")).await?.id)
}

async fn submit_raft(
    control: &FleetControl,
    files: &Path,
    (seed, base, cycles): (u64, &RunId, u32),
    extra_lines: &str,
) -> anyhow::Result<RunId> {
    submit_changed(control, files, (seed, base, cycles), extra_lines, &[]).await
}

/// Submits the spec of a RAFT run with some lines replaced.
async fn submit_changed(
    control: &FleetControl,
    files: &Path,
    (seed, base, cycles): (u64, &RunId, u32),
    extra_lines: &str,
    changes: &[(&str, String)],
) -> anyhow::Result<RunId> {
    let raft = RaftRunFiles { seed, base, cycles, selection: "{}", extra_lines };
    raft.write_spec(files).context("write the task's files")?;
    let path = files.join("raft.yaml");
    let mut text = std::fs::read_to_string(&path)?;
    for (line, changed) in changes {
        anyhow::ensure!(text.contains(line), "the spec has no {line}");
        text = text.replace(line, changed);
    }
    std::fs::write(&path, text)?;
    Ok(submit_run(control, &path).await?.run)
}

/// Trains a teacher on correct sums, and a student of the tiny base on its log-probabilities, with
/// two samples of each prompt.
async fn teach_student(control: &FleetControl, files: &Path, seed: u64) -> anyhow::Result<Student> {
    let base = train_base(control, files, seed, DigitCount::Two).await?;
    let task = BaseRunFiles { seed, digits: DigitCount::Two };
    task.write_teacher(files).context("write the teacher's files")?;
    let teacher = run_to_success(control, &files.join("teacher.yaml")).await?.id;
    let cycles = u32::try_from(REACHED_CYCLE)?;
    let raft = submit_raft(control, files, (seed, &base, cycles), "").await?;
    let more = format!(
        "objective: {{ distillation: {{ max_gap: 1 }} }}\n\
         teacher: {{ checkpoint: {teacher} }}\n\
         token_logprobs: true"
    );
    // Few samples, which are trained on more often, with smaller and smaller steps.
    let changes = [
        ("samples_per_prompt: 8", "samples_per_prompt: 2".to_owned()),
        ("epochs: 3", "epochs: 6".to_owned()),
        ("learning_rate: 0.002", "learning_rate: { linear: [0.002, 0.0001] }".to_owned()),
    ];
    let wanted = (seed, &base, STUDENT_CYCLES);
    let student = submit_changed(control, files, wanted, &more, &changes).await?;
    let probe = submit_raft(control, files, (seed, &teacher, 1), "").await?;
    let probed = await_success(control, &probe).await?;
    let rate = probed.cycles[&0].done.as_ref().and_then(|done| done.heldout);
    Ok(Student {
        teacher_rate: rate.map_or(0.0, |rate| rate.mean),
        student: rates_and_tokens(control, &student).await?,
        raft: rates_and_tokens(control, &raft).await?,
    })
}

/// Returns the pass rate and the sampled training tokens after each cycle.
async fn rates_and_tokens(control: &FleetControl, id: &RunId) -> anyhow::Result<Vec<(f64, u64)>> {
    let run = await_success(control, id).await?;
    let mut tokens = 0;
    let mut found = Vec::new();
    for (number, cycle) in &run.cycles {
        let drawn = control.count_drawn_tokens(id, *number).await?;
        tokens += drawn;
        let rate = cycle.done.as_ref().and_then(|done| done.heldout);
        found.push((rate.map_or(0.0, |rate| rate.mean), tokens));
    }
    Ok(found)
}

/// Ranks objectives by a court on the first cycle of a RAFT run, and by new runs of one cycle.
async fn check_court(
    control: &FleetControl,
    directory: &Path,
    seeds: u32,
) -> anyhow::Result<CourtAgreement> {
    let files = directory.join("court");
    let base = train_base(control, &files, 1, DigitCount::Three).await?;
    let first = submit_raft(control, &files, (1, &base, 1), "").await?;
    await_success(control, &first).await?;
    let names = &COURT;
    let objectives: Vec<Objective> = names.iter().map(|name| Objective::new(*name)).collect();
    let court = control.prepare_court(&first, Some(1), &objectives).await?;
    let mut trials = Vec::new();
    let mut fresh = Vec::new();
    for (trial, name) in court.trials.iter().zip(names) {
        let (mut of_trial, mut of_runs) = (Vec::new(), Vec::new());
        for seed in 1..=seeds {
            of_trial.push(control.submit_trial(&court, trial, seed, &[]).await?);
            let more = format!("objective: {}", name.as_str());
            let wanted = (u64::from(seed), &base, 1);
            of_runs.push(submit_raft(control, &files, wanted, &more).await?);
        }
        trials.push(of_trial);
        fresh.push(of_runs);
    }
    let mut rates = Vec::new();
    for ids in &trials {
        let mut of_trial = Vec::new();
        for id in ids {
            of_trial.push((id.to_string(), Some(last_rate(control, id).await?)));
        }
        rates.push(of_trial);
    }
    let ranking = rank_objectives(&court, rates.clone());
    let mut runs = Vec::new();
    for (ids, name) in fresh.iter().zip(names) {
        let mut sum = 0.0;
        for id in ids {
            sum += last_rate(control, id).await?;
        }
        runs.push((name.as_str().to_owned(), sum / f64::from(seeds)));
    }
    let of_court: Vec<f64> = rates
        .iter()
        .map(|rates| rates.iter().filter_map(|(_, rate)| *rate).sum::<f64>() / f64::from(seeds))
        .collect();
    let of_runs: Vec<f64> = runs.iter().map(|(_, rate)| *rate).collect();
    let kendall_tau = kendall_tau(&of_court, &of_runs);
    Ok(CourtAgreement { ranking, runs, kendall_tau })
}

async fn last_rate(control: &FleetControl, id: &RunId) -> anyhow::Result<f64> {
    let run = await_success(control, id).await?;
    let done = run.cycles.values().rev().find_map(|cycle| cycle.done.as_ref());
    match done.and_then(|done| done.heldout) {
        Some(rate) => Ok(rate.mean),
        None => bail!("run {id} has no held-out pass rate"),
    }
}

/// Returns Kendall's rank correlation (tau-a): 1 for equal orders, -1 for opposite ones.
fn kendall_tau(a: &[f64], b: &[f64]) -> f64 {
    let pairs = (0..a.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
    let signs: Vec<f64> = pairs
        .map(|(one, other)| {
            let (in_a, in_b) = (a[one] - a[other], b[one] - b[other]);
            if in_a == 0.0 || in_b == 0.0 { 0.0 } else { in_a.signum() * in_b.signum() }
        })
        .collect();
    signs.iter().sum::<f64>() / signs.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_compared_by_pairs() {
        assert_eq!(kendall_tau(&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]), 1.0);
        assert_eq!(kendall_tau(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), -1.0);
        assert!((kendall_tau(&[1.0, 2.0, 3.0], &[1.0, 3.0, 2.0]) - 1.0 / 3.0).abs() < 1e-12);
    }
}
