//! Measures `flotilla-bench objectives`: how runs learn with other objectives than RAFT, from a
//! teacher, and whether `flotilla court` ranks objectives as new runs do.
//!
//! It runs the built-in tasks on a real fleet of this machine. Rates depend only on the seeds, and
//! one seed takes half an hour, so each result is a file of `--results`: what is there is read instead
//! of measured again, if it was measured with the settings of this build.

mod markdown;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, bail};
use cli::{
    await_success,
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::FleetProcessOptions,
    output, run_to_success, submit_run,
    work_directory::WorkDirectory,
};
use control::{CourtRanking, FleetControl, rank_objectives};
use objective::{Objective, ObjectiveName};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use wire::RunId;

use crate::{
    args::BenchArgs,
    conditions::ConditionsMeter,
    raft_effect::{run_result::RunResult, with_fleet},
    result_files::{ResultFiles, ResultOrigin},
};

/// The compared settings of a run's spec. Files of results have them too.
#[derive(Debug, Clone, Copy, Serialize)]
struct SpecSettings {
    cycles: u32,
    samples_per_prompt: u32,
    epochs: u32,
    /// A number or a schedule, as YAML.
    learning_rate: &'static str,
}

/// The settings of the built-in task's RAFT spec.
const RAFT: SpecSettings =
    SpecSettings { cycles: 6, samples_per_prompt: 8, epochs: 3, learning_rate: "0.002" };

const ONE_CYCLE: SpecSettings = SpecSettings { cycles: 1, ..RAFT };

/// The compared objectives with the settings of their runs; the first is the one that others are
/// compared with. Failures count for most of them, and with as many steps as RAFT, they drive the
/// tiny model away.
const OBJECTIVES: [(ObjectiveName, SpecSettings); 8] = [
    (ObjectiveName::Raft, RAFT),
    (ObjectiveName::RaftPlusPlus, RAFT),
    (ObjectiveName::Rloo, one_epoch("0.0003")),
    (ObjectiveName::DrGrpo, one_epoch("0.001")),
    (ObjectiveName::Dapo, one_epoch("0.001")),
    (ObjectiveName::Cispo, one_epoch("0.001")),
    (ObjectiveName::Dpo, one_epoch("0.001")),
    (ObjectiveName::Kto, one_epoch("0.0003")),
];

const fn one_epoch(learning_rate: &'static str) -> SpecSettings {
    SpecSettings { epochs: 1, learning_rate, ..RAFT }
}

/// The objectives that a court ranks, by the training settings of RAFT.
const COURT: [ObjectiveName; 6] = [
    ObjectiveName::Raft,
    ObjectiveName::RaftPlusPlus,
    ObjectiveName::Rloo,
    ObjectiveName::DrGrpo,
    ObjectiveName::Dapo,
    ObjectiveName::Dpo,
];

/// The cycle of RAFT whose pass rate a student must reach.
const REACHED_CYCLE: u32 = 4;

/// The settings of the RAFT run beside a student.
const RAFT_BESIDE: SpecSettings = SpecSettings { cycles: REACHED_CYCLE, ..RAFT };

/// With a quarter of RAFT's samples a cycle, a student draws less than a third of its tokens. It
/// trains on them more often, with smaller and smaller steps.
const STUDENT: SpecSettings = SpecSettings {
    cycles: 5,
    samples_per_prompt: 2,
    epochs: 6,
    learning_rate: "{ linear: [0.002, 0.0001] }",
};

const DISTILLATION: &str = "{ distillation: { max_gap: 1 } }";

const TASKS: [(&str, DigitCount); 2] =
    [("Two-digit sums", DigitCount::Two), ("Three-digit sums", DigitCount::Three)];

const AGENTS: &str = "trainer,generator=2,verifier,scorer,evaluator";
const AGENT_COUNT: usize = 6;

#[derive(Debug, Serialize)]
struct ObjectivesReport {
    /// The command that wrote the report.
    command: String,
    seeds: u32,
    /// The origin of each file of results, by its name.
    origins: BTreeMap<String, ResultOrigin>,
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

/// A measurement whose result is one file.
#[derive(Debug, Clone, Copy)]
enum ObjectiveMeasurement {
    /// The runs of all objectives on a base with a seed, by the objective's name.
    Task(DigitCount, u64),
    /// A [`Student`] with a seed.
    Taught(u64),
    /// A [`CourtAgreement`] over a number of seeds.
    Court(u32),
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
    let at = directory.as_path();
    let mut files = ResultFiles::open_or_create(args.results.as_deref().unwrap_or(at))?;
    let mut missing = Vec::new();
    for measurement in ObjectiveMeasurement::list_all(args.seeds) {
        if files.contains(&measurement.file_name()) {
            // Before hours of measuring.
            measurement.check_result(&mut files)?;
        } else {
            missing.push(measurement);
        }
    }
    let command = format_command(args.seeds, args.results.as_deref());
    let measured = measure_missing(at, &files, &missing).await;
    let report = match measured.and_then(|()| read_report(files, command, args.seeds)) {
        Ok(report) => report,
        Err(error) => {
            let kept = directory.keep_files();
            return Err(error.context(format!("its logs are in {}", kept.display())));
        }
    };
    if args.json {
        output::print_json(&json!(report))?;
    } else {
        output::print_text(&markdown::write_markdown(&report));
    }
    Ok(ExitCode::SUCCESS)
}

fn format_command(seeds: u32, results: Option<&Path>) -> String {
    let results = results.map(|path| format!(" --results {}", path.display())).unwrap_or_default();
    format!("flotilla-bench objectives --seeds {seeds}{results}")
}

/// Measures results on a new fleet and writes their files.
async fn measure_missing(
    directory: &Path,
    files: &ResultFiles,
    missing: &[ObjectiveMeasurement],
) -> anyhow::Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = FleetProcessOptions { agents: AGENTS.into(), threads: None, detached: false };
    let fleet = new_fleet_directory(directory);
    with_fleet(&fleet, &wanted, AGENT_COUNT, async |control| {
        for (number, measurement) in (1..).zip(missing) {
            let meter = ConditionsMeter::start();
            let result = measurement.measure(control, directory).await?;
            let name = measurement.file_name();
            files.write(&name, measurement.settings(), meter.finish(), result)?;
            output::print_message(&format!("{name}: measured, {number} of {}", missing.len()));
        }
        Ok(())
    })
    .await
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

/// Builds the report from the files of results.
fn read_report(
    mut files: ResultFiles,
    command: String,
    seeds: u32,
) -> anyhow::Result<ObjectivesReport> {
    let mut tasks = Vec::new();
    for (title, digits) in TASKS {
        let mut objectives = OBJECTIVES.map(|(name, _)| (name.as_str(), Vec::new()));
        for seed in 1..=u64::from(seeds) {
            let mut runs = ObjectiveMeasurement::Task(digits, seed).read_runs(&mut files)?;
            for (name, of_objective) in &mut objectives {
                of_objective.extend(runs.remove(*name));
            }
        }
        tasks.push(TaskRuns { title, objectives: objectives.into() });
    }
    let mut students = Vec::new();
    for seed in 1..=u64::from(seeds) {
        students.push(ObjectiveMeasurement::Taught(seed).read_result(&mut files)?);
    }
    let court = ObjectiveMeasurement::Court(seeds).read_result(&mut files)?;
    Ok(ObjectivesReport { command, seeds, origins: files.into_origins(), tasks, students, court })
}

impl ObjectiveMeasurement {
    /// Lists one seed after the other, so that those which are complete are comparable.
    fn list_all(seeds: u32) -> Vec<Self> {
        let of_seed = |seed| {
            [
                Self::Task(DigitCount::Two, seed),
                Self::Task(DigitCount::Three, seed),
                Self::Taught(seed),
            ]
        };
        (1..=u64::from(seeds)).flat_map(of_seed).chain([Self::Court(seeds)]).collect()
    }

    fn file_name(self) -> String {
        match self {
            Self::Task(digits, seed) => format!("{digits:?}-{seed}.json").to_lowercase(),
            Self::Taught(seed) => format!("taught-{seed}.json"),
            Self::Court(seeds) => format!("court-{seeds}.json"),
        }
    }

    /// Returns the settings that are compared. The result depends on the rest of the built-in task,
    /// too.
    fn settings(self) -> Value {
        match self {
            Self::Task(digits, seed) => {
                let objectives: BTreeMap<&str, SpecSettings> =
                    OBJECTIVES.map(|(name, settings)| (name.as_str(), settings)).into();
                json!({ "digits": format!("{digits:?}"), "seed": seed, "objectives": objectives })
            }
            Self::Taught(seed) => json!({
                "seed": seed,
                "raft": RAFT_BESIDE,
                "student": STUDENT,
                "objective": DISTILLATION,
            }),
            Self::Court(seeds) => {
                let objectives = COURT.map(ObjectiveName::as_str);
                json!({ "seeds": seeds, "objectives": objectives, "raft": ONE_CYCLE })
            }
        }
    }

    fn read_result<T: DeserializeOwned>(self, files: &mut ResultFiles) -> anyhow::Result<T> {
        files.read(&self.file_name(), &self.settings())
    }

    /// Reads the runs of a task, one of each objective.
    fn read_runs(self, files: &mut ResultFiles) -> anyhow::Result<BTreeMap<String, RunResult>> {
        let runs: BTreeMap<String, RunResult> = self.read_result(files)?;
        let missing = OBJECTIVES.iter().find(|(name, _)| !runs.contains_key(name.as_str()));
        if let Some((name, _)) = missing {
            bail!("{} has no run of {}; delete the file", self.file_name(), name.as_str());
        }
        Ok(runs)
    }

    fn check_result(self, files: &mut ResultFiles) -> anyhow::Result<()> {
        match self {
            Self::Task(..) => self.read_runs(files).map(drop),
            Self::Taught(_) => self.read_result::<Student>(files).map(drop),
            Self::Court(_) => self.read_result::<CourtAgreement>(files).map(drop),
        }
    }

    /// Measures the result, with the files of its runs below a directory.
    async fn measure(self, control: &FleetControl, directory: &Path) -> anyhow::Result<Value> {
        let files = directory.join(self.file_name()).with_extension("");
        let result = match self {
            Self::Task(digits, seed) => {
                serde_json::to_value(run_objectives(control, &files, seed, digits).await?)
            }
            Self::Taught(seed) => serde_json::to_value(teach_student(control, &files, seed).await?),
            Self::Court(seeds) => serde_json::to_value(check_court(control, &files, seeds).await?),
        };
        Ok(result?)
    }
}

impl SpecSettings {
    /// Returns the lines of the spec, without that of the cycles.
    fn spec_lines(&self) -> [String; 3] {
        [
            format!("samples_per_prompt: {}", self.samples_per_prompt),
            format!("epochs: {}", self.epochs),
            format!("learning_rate: {}", self.learning_rate),
        ]
    }
}

/// Returns the run of each objective by its name.
async fn run_objectives(
    control: &FleetControl,
    files: &Path,
    seed: u64,
    digits: DigitCount,
) -> anyhow::Result<BTreeMap<String, RunResult>> {
    let base = train_base(control, files, seed, digits).await?;
    let mut submitted = Vec::new();
    for (name, settings) in OBJECTIVES {
        let more = format!("objective: {}", name.as_str());
        let id = submit_raft(control, files, (seed, &base), &settings, &more).await?;
        submitted.push((name, id, Instant::now()));
    }
    let mut results = BTreeMap::new();
    for (name, id, began) in submitted {
        let run = await_success(control, &id).await?;
        results.insert(name.as_str().to_owned(), RunResult::from_run(&run, seed, began.elapsed()));
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

/// Submits the built-in task's RAFT spec with other settings and further lines.
async fn submit_raft(
    control: &FleetControl,
    files: &Path,
    (seed, base): (u64, &RunId),
    settings: &SpecSettings,
    extra_lines: &str,
) -> anyhow::Result<RunId> {
    let cycles = settings.cycles;
    let raft = RaftRunFiles { seed, base, cycles, selection: "{}", extra_lines };
    raft.write_spec(files).context("write the task's files")?;
    let path = files.join("raft.yaml");
    let mut text = fs::read_to_string(&path)?;
    for (line, changed) in RAFT.spec_lines().iter().zip(settings.spec_lines()) {
        anyhow::ensure!(text.contains(line.as_str()), "the spec has no {line}");
        text = text.replace(line.as_str(), &changed);
    }
    fs::write(&path, text)?;
    Ok(submit_run(control, &path).await?.run)
}

/// Trains a teacher on correct sums, and a student of the tiny base on its log-probabilities, with
/// two samples of each prompt.
async fn teach_student(control: &FleetControl, files: &Path, seed: u64) -> anyhow::Result<Student> {
    let base = train_base(control, files, seed, DigitCount::Two).await?;
    let task = BaseRunFiles { seed, digits: DigitCount::Two };
    task.write_teacher(files).context("write the teacher's files")?;
    let teacher = run_to_success(control, &files.join("teacher.yaml")).await?.id;
    let raft = submit_raft(control, files, (seed, &base), &RAFT_BESIDE, "").await?;
    let more = format!(
        "objective: {DISTILLATION}\n\
         teacher: {{ checkpoint: {teacher} }}\n\
         token_logprobs: true"
    );
    let student = submit_raft(control, files, (seed, &base), &STUDENT, &more).await?;
    let probe = submit_raft(control, files, (seed, &teacher), &ONE_CYCLE, "").await?;
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
    files: &Path,
    seeds: u32,
) -> anyhow::Result<CourtAgreement> {
    let base = train_base(control, files, 1, DigitCount::Three).await?;
    let first = submit_raft(control, files, (1, &base), &ONE_CYCLE, "").await?;
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
            let spec = (u64::from(seed), &base);
            of_runs.push(submit_raft(control, files, spec, &ONE_CYCLE, &more).await?);
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

    #[test]
    fn the_page_shows_the_stored_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let results = "docs/benchmarks/objectives";
        let files = ResultFiles::open_or_create(&root.join(results)).unwrap();
        let report = read_report(files, format_command(3, Some(Path::new(results))), 3).unwrap();
        let section = markdown::write_markdown(&report);
        let page = fs::read_to_string(root.join("docs/RAFT-FIGURES.md")).unwrap();
        assert!(page.contains(&section), "{section}");
    }

    #[test]
    fn results_of_other_settings_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = ResultFiles::open_or_create(directory.path()).unwrap();
        let measurement = ObjectiveMeasurement::Task(DigitCount::Two, 1);
        let mut settings = measurement.settings();
        settings["objectives"]["rloo"]["epochs"] = json!(2);
        let conditions = ConditionsMeter::start().finish();
        files.write(&measurement.file_name(), settings, conditions, json!({})).unwrap();
        let error = measurement.read_result::<Value>(&mut files).unwrap_err().to_string();
        let expected = "two-1.json: settings.objectives.rloo.epochs is 2 in the file and 1 in this \
                        build; delete the file";
        assert!(error.contains(expected), "{error}");
    }
}
