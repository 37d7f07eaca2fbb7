//! Measures `flotilla-bench across`: how well and how fast an adapter learns if several boxes train
//! it, beside the goals.
//!
//! The trainings are real: the demo's base learns more correct sums, and the planner splits the
//! steps. Boxes take their turns in one process, so times are virtual: those of a 7B model whose
//! weights cross a network of 1 Gb/s. Likelihoods depend only on the seeds. Each seed takes minutes,
//! so its result is a file of `--results`: what is there is read instead of measured again.

mod case_result;
mod cases;
mod fleet_figures;
mod goals;
mod large_adapter;
mod markdown;
mod seed_training;
mod shared_training;
mod virtual_fleet;

use std::{
    collections::{BTreeMap, VecDeque},
    num::NonZero,
    path::Path,
    process::ExitCode,
    sync::Mutex,
};

use anyhow::{anyhow, ensure};
use cli::{output, work_directory::WorkDirectory};
use engine::MergeRule;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use self::{
    case_result::{CaseResult, TimedTrainings},
    cases::{GOAL_CASES, ONE_BOX, SharingCase, method_cases},
    fleet_figures::{FleetShare, LOCAL_LINK, SentFiles, SlowShare, StepCounts},
    goals::GoalResult,
    large_adapter::LargeAdapter,
    seed_training::SeedResult,
    shared_training::TrainedShare,
};
use crate::{
    args::BenchArgs,
    conditions::ConditionsMeter,
    raft_effect::run_result::MeanEstimate,
    result_files::{ResultFiles, ResultOrigin},
};

/// The first seeds, with which methods are compared too. That takes twice as long as the goals.
const COMPARED_SEEDS: u64 = 3;

#[derive(Debug, Serialize)]
struct AcrossReport {
    /// The command that wrote the report.
    command: String,
    /// The origin of each file of results, by its name.
    origins: BTreeMap<String, ResultOrigin>,
    goals: Vec<GoalResult>,
    /// Virtual seconds of one box.
    one_box_s: f64,
    /// Equal boxes, with all seeds, in the order of [`GOAL_CASES`].
    shared: Vec<CaseResult>,
    /// Other methods and boxes, with the first seeds.
    compared: Vec<CaseResult>,
    fleets: Vec<FleetShare>,
    slow: Vec<SlowShare>,
    steps: StepCounts,
    adapter: LargeAdapter,
    seeds: Vec<SeedResult>,
}

/// A measurement whose result is one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AcrossMeasurement {
    /// A [`LargeAdapter`].
    Adapter,
    /// A [`SeedResult`].
    Seed(u64),
}

pub(super) fn bench_across(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let directory = WorkDirectory::open_or_create(args.dir.as_deref(), "bench-across")?;
    let at = directory.as_path();
    let mut files = ResultFiles::open_or_create(args.results.as_deref().unwrap_or(at))?;
    let mut missing = Vec::new();
    for measurement in AcrossMeasurement::list_all(args.seeds) {
        if files.contains(&measurement.file_name()) {
            // Before minutes of training.
            measurement.check_result(&mut files)?;
        } else {
            missing.push(measurement);
        }
    }
    measure_missing(at, &files, missing)?;
    let report =
        read_report(files, format_command(args.seeds, args.results.as_deref()), args.seeds)?;
    if args.json {
        output::print_json(&json!(report))?;
    } else {
        output::print_text(&markdown::write_markdown(&report));
    }
    Ok(ExitCode::SUCCESS)
}

fn format_command(seeds: u32, results: Option<&Path>) -> String {
    let results = results.map(|path| format!(" --results {}", path.display())).unwrap_or_default();
    format!("flotilla-bench across --seeds {seeds}{results}")
}

/// Measures results and writes their files: times first, then seeds side by side, as many as there
/// are cores.
fn measure_missing(
    directory: &Path,
    files: &ResultFiles,
    missing: Vec<AcrossMeasurement>,
) -> anyhow::Result<()> {
    let (timed, seeds): (Vec<_>, Vec<_>) =
        missing.into_iter().partition(|it| *it == AcrossMeasurement::Adapter);
    timed.into_iter().try_for_each(|it| it.measure_result(directory, files))?;
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.min(seeds.len());
    let queue = Mutex::new(VecDeque::from(seeds));
    let measure_queued = || {
        let take = || queue.lock().ok().and_then(|mut queue| queue.pop_front());
        while let Some(next) = take() {
            next.measure_result(directory, files)?;
        }
        anyhow::Ok(())
    };
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(measure_queued)).collect();
        started.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| anyhow!("the training of a seed panicked"))?
        })
    })
}

/// Builds the report from the files of results.
fn read_report(
    mut files: ResultFiles,
    command: String,
    seeds: u32,
) -> anyhow::Result<AcrossReport> {
    let adapter: LargeAdapter = AcrossMeasurement::Adapter.read_result(&mut files)?;
    let mut results = Vec::new();
    for seed in 1..=u64::from(seeds) {
        results.push(AcrossMeasurement::Seed(seed).read_seed(&mut files)?);
    }
    let one_box = ONE_BOX.virtual_training(0.0).split_steps()?;
    let compare = |case: SharingCase, pick: &dyn Fn(&SeedResult) -> Option<&TrainedShare>| {
        let exchange_s = LOCAL_LINK.exchange_weights_s(adapter.weight_bytes as f64);
        let merge_s = match case.method.rule {
            MergeRule::Stack => adapter.stack_s,
            MergeRule::Step(_) => adapter.merge_s,
        };
        let schedule = case.virtual_training(exchange_s + merge_s).split_steps()?;
        let pairs = results.iter().filter_map(|seed| Some((&seed.one_box, pick(seed)?)));
        let (alone, trained): (Vec<_>, Vec<_>) = pairs.unzip();
        let alone = TimedTrainings { schedule: &one_box, trained: &alone };
        let shared = TimedTrainings { schedule: &schedule, trained: &trained };
        anyhow::Ok(CaseResult::compare_trainings(case, alone, shared))
    };
    let (mut shared, mut compared) = (Vec::new(), Vec::new());
    for (number, case) in GOAL_CASES.into_iter().enumerate() {
        shared.push(compare(case, &|seed| seed.shared.get(number))?);
    }
    for (number, case) in method_cases().into_iter().enumerate() {
        compared.push(compare(case, &|seed| seed.compared.get(number))?);
    }
    let sent = SentFiles {
        weight_bytes: adapter.weight_bytes as f64,
        change_bytes: adapter.change_bytes as f64,
        merge_s: adapter.merge_s,
    };
    let mut report = AcrossReport {
        command,
        origins: files.into_origins(),
        goals: Vec::new(),
        one_box_s: one_box.end_s,
        shared,
        compared,
        fleets: fleet_figures::measure_fleets(sent)?,
        slow: fleet_figures::measure_slow_fleets(sent)?,
        steps: fleet_figures::count_steps()?,
        adapter,
        seeds: results,
    };
    report.goals = goals::list_goals(&report);
    Ok(report)
}

impl AcrossReport {
    /// Returns the mean of the last negative log-likelihoods of one box.
    fn one_box_nll(&self) -> MeanEstimate {
        let nlls: Vec<f64> = self.seeds.iter().map(|seed| seed.one_box.final_nll()).collect();
        MeanEstimate::from_values(&nlls)
    }
}

impl AcrossMeasurement {
    fn list_all(seeds: u32) -> Vec<Self> {
        [Self::Adapter].into_iter().chain((1..=u64::from(seeds)).map(Self::Seed)).collect()
    }

    fn file_name(self) -> String {
        match self {
            Self::Adapter => "adapter.json".to_owned(),
            Self::Seed(seed) => format!("seed-{seed}.json"),
        }
    }

    /// Returns the settings of the measurement. Its result depends on the rest of the built-in task,
    /// too.
    fn settings(self) -> Value {
        match self {
            Self::Adapter => LargeAdapter::settings(),
            Self::Seed(seed) => seed_training::list_settings(seed, seed <= COMPARED_SEEDS),
        }
    }

    fn read_result<T: DeserializeOwned>(self, files: &mut ResultFiles) -> anyhow::Result<T> {
        files.read(&self.file_name(), &self.settings())
    }

    /// Reads the trainings of a seed.
    fn read_seed(self, files: &mut ResultFiles) -> anyhow::Result<SeedResult> {
        let result: SeedResult = self.read_result(files)?;
        let compares = matches!(self, Self::Seed(seed) if seed <= COMPARED_SEEDS);
        ensure!(
            result.is_complete(compares),
            "{} lacks trainings; delete the file",
            self.file_name()
        );
        Ok(result)
    }

    fn check_result(self, files: &mut ResultFiles) -> anyhow::Result<()> {
        match self {
            Self::Adapter => self.read_result::<LargeAdapter>(files).map(drop),
            Self::Seed(_) => self.read_seed(files).map(drop),
        }
    }

    /// Measures the result below a directory and writes its file.
    fn measure_result(self, directory: &Path, files: &ResultFiles) -> anyhow::Result<()> {
        let name = self.file_name();
        let scratch = directory.join(&name).with_extension("");
        if scratch.exists() {
            // An earlier measurement was interrupted.
            std::fs::remove_dir_all(&scratch)?;
        }
        let meter = ConditionsMeter::start();
        let result = match self {
            Self::Adapter => serde_json::to_value(LargeAdapter::measure_files(&scratch)?)?,
            Self::Seed(seed) => {
                let compares = seed <= COMPARED_SEEDS;
                serde_json::to_value(seed_training::train_seed(&scratch, seed, compares)?)?
            }
        };
        std::fs::remove_dir_all(&scratch)?;
        files.write(&name, self.settings(), meter.finish(), result)?;
        output::print_message(&format!("{name}: measured"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_the_stored_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let results = "docs/benchmarks/across";
        let files = ResultFiles::open_or_create(&root.join(results)).unwrap();
        let report = read_report(files, format_command(10, Some(Path::new(results))), 10).unwrap();
        let section = markdown::write_markdown(&report);
        let page = std::fs::read_to_string(root.join("docs/RAFT-FIGURES.md")).unwrap();
        assert!(page.contains(&section), "{section}");
    }
}
