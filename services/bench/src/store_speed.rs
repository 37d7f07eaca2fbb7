//! Measures the store against other programs.
//!
//! * A large file into a bucket and out of it, against s5cmd.
//! * The same file into a directory and out of it, against `cp`.
//! * An adapter to eight boxes at once, over links of 1 Gb/s.
//!
//! Figures are seconds, with those of the other program in the same round. The best round of each
//! counts, because the machine may be busy.

mod fanout;
mod swarm_worker;
mod test_network;

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use cli::{output, work_directory::WorkDirectory};
use rustix::{fs as disk, process::getpid};
use store::{FileCache, Store};
use wire::v1;

use super::BenchFigure;
use crate::args::BenchArgs;

pub(super) use swarm_worker::run_swarm_node;

/// Bytes of a mebibyte.
const MIB: u64 = 1 << 20;
/// Rounds of each measurement.
const ROUNDS: u64 = 3;
/// Required speed of a write to a bucket, relative to s5cmd.
const PUT_SPEED: f64 = 1.0;
/// Required speed of a read from a bucket, relative to s5cmd.
const GET_SPEED: f64 = 0.9;
/// Required speed of a read from a directory, relative to `cp`.
const FILE_SPEED: f64 = 0.8;

pub(super) async fn measure_store(args: &BenchArgs) -> anyhow::Result<Vec<BenchFigure>> {
    let mut figures = Vec::from(measure_directory(u64::from(args.store_mib)).await?);
    match &args.s3 {
        Some(url) => figures.extend(measure_bucket(url, args).await?),
        None => output::print_message("store: no --s3 URL: what a bucket does was left out"),
    }
    figures.extend(fanout::measure_fanout().await?);
    Ok(figures)
}

/// The best times of both sides of a comparison, in seconds.
struct TimePair {
    ours: f64,
    theirs: Option<f64>,
}

impl TimePair {
    fn new() -> Self {
        Self { ours: f64::MAX, theirs: None }
    }

    fn record_ours(&mut self, taken: Duration) {
        self.ours = self.ours.min(taken.as_secs_f64());
    }

    fn record_theirs(&mut self, taken: Duration) {
        let taken = taken.as_secs_f64();
        self.theirs = Some(self.theirs.map_or(taken, |best| best.min(taken)));
    }

    fn to_figure(
        &self,
        name: &'static str,
        mib: u64,
        other: &str,
        speed: Option<f64>,
    ) -> BenchFigure {
        let Self { ours, theirs } = self;
        let rate = |seconds: f64| mib as f64 / seconds;
        let beside = theirs.map_or(String::new(), |theirs| {
            format!("; {other} {:.0}: {:.2} ×", rate(theirs), theirs / ours)
        });
        BenchFigure {
            name,
            measured: *ours,
            unit: "s",
            limit: theirs.zip(speed).map(|(theirs, speed)| theirs / speed),
            how: format!("{mib} MiB, {:.0} MiB/s{beside}", rate(*ours)),
        }
    }
}

fn write_noise(path: &Path, round: u64, mib: u64) -> anyhow::Result<()> {
    let mut file = File::create(path).with_context(|| format!("write {}", path.display()))?;
    let seed = format!("{} {round} {:?}", getpid().as_raw_nonzero(), Instant::now());
    let mut noise = blake3::Hasher::new().update(seed.as_bytes()).finalize_xof();
    let mut piece = vec![0; usize::try_from(MIB)?];
    for _ in 0..mib {
        noise.fill(&mut piece);
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Brings the machine into the same state before each measurement.
///
/// Earlier writes are flushed to disk, and as much memory as a measurement needs has just been
/// freed. A virtual machine may otherwise have to obtain memory first, which costs more than
/// copying into it.
fn settle_machine(mib: u64) -> anyhow::Result<()> {
    let path = std::env::temp_dir().join(format!("flotilla-bench-settle-{}", std::process::id()));
    let mut file = File::create(&path)?;
    let piece = vec![1; usize::try_from(MIB)?];
    let written = (0..mib).try_for_each(|_| file.write_all(&piece));
    disk::sync();
    fs::remove_file(&path)?;
    Ok(written?)
}

async fn time_work<T>(
    mib: u64,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(T, Duration)> {
    settle_machine(mib)?;
    let began = Instant::now();
    let done = work.await?;
    Ok((done, began.elapsed()))
}

fn time_command(mib: u64, command: &mut Command) -> anyhow::Result<Duration> {
    settle_machine(mib)?;
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(began.elapsed())
}

async fn fetch_into_cache(store: &Store, blob: &v1::Blob, into: &Path) -> anyhow::Result<()> {
    let cache = FileCache::open(into, 1 << 40)?;
    cache.fetch_blob(store, blob).await?;
    Ok(())
}

async fn measure_directory(mib: u64) -> anyhow::Result<[BenchFigure; 2]> {
    output::print_message(&format!(
        "store: {mib} MiB into a directory and out of it, {ROUNDS} times …"
    ));
    let scratch = WorkDirectory::open_or_create(None, "bench-store")?;
    let at = |name: &str| scratch.as_path().join(name);
    let (mut put, mut get) = (TimePair::new(), TimePair::new());
    for round in 0..ROUNDS {
        let (source, copy) = (at("source"), at("copy"));
        write_noise(&source, round, mib)?;
        let store = Store::open(&format!("file://{}", at("store").display())).await?;
        put.record_theirs(time_command(
            mib,
            Command::new("sh")
                .arg("-c")
                .arg("cp -- \"$0\" \"$1\" && sync -- \"$1\"")
                .args([&source, &copy]),
        )?);
        fs::remove_file(&copy)?;
        let (blob, taken) =
            time_work(mib, async { Ok(store.put_blob_file(&source).await?) }).await?;
        put.record_ours(taken);
        get.record_theirs(time_command(mib, Command::new("cp").arg("--").args([&source, &copy]))?);
        fs::remove_file(&copy)?;
        get.record_ours(time_work(mib, fetch_into_cache(&store, &blob, &at("cache"))).await?.1);
        for gone in ["store", "cache"] {
            fs::remove_dir_all(at(gone))?;
        }
    }
    Ok([
        put.to_figure("store: put, file://", mib, "cp and sync", None),
        get.to_figure("store: get, file://", mib, "cp", Some(FILE_SPEED)),
    ])
}

async fn measure_bucket(url: &str, args: &BenchArgs) -> anyhow::Result<[BenchFigure; 2]> {
    let mib = u64::from(args.store_mib);
    output::print_message(&format!("store: {mib} MiB to {url} and back, {ROUNDS} times …"));
    let s5cmd = find_s5cmd(args);
    if s5cmd.is_none() {
        output::print_message("store: there is no s5cmd on PATH and no --s5cmd: it was left out");
    }
    let store = Store::open(url).await?;
    store.check_access().await?;
    let scratch = WorkDirectory::open_or_create(None, "bench-store")?;
    let at = |name: &str| scratch.as_path().join(name);
    let (mut put, mut get) = (TimePair::new(), TimePair::new());
    for round in 0..ROUNDS {
        let (source, copy) = (at("source"), at("copy"));
        write_noise(&source, round, mib)?;
        let there = format!("{}/bench-{}-{round}", store.url(), std::process::id());
        let cp = |from: &str, to: &str| {
            let mut command = Command::new(s5cmd.as_deref().unwrap_or(Path::new("s5cmd")));
            if let Ok(endpoint) = std::env::var("AWS_ENDPOINT") {
                command.args(["--endpoint-url", &endpoint]);
            }
            command.args(["cp", from, to]);
            command
        };
        let (local, back) = (source.display().to_string(), copy.display().to_string());
        // Alternate the order, because a disk may slow down under load.
        for ours in [round % 2 == 0, round % 2 != 0] {
            if ours {
                let (blob, taken) =
                    time_work(mib, async { Ok(store.put_blob_file(&source).await?) }).await?;
                put.record_ours(taken);
                get.record_ours(
                    time_work(mib, fetch_into_cache(&store, &blob, &at("cache"))).await?.1,
                );
                fs::remove_dir_all(at("cache"))?;
            } else if let Some(s5cmd) = &s5cmd {
                put.record_theirs(time_command(mib, &mut cp(&local, &there))?);
                get.record_theirs(time_command(mib, &mut cp(&there, &back))?);
                let same = fs::metadata(&copy)?.len() == mib * MIB;
                anyhow::ensure!(same, "{} gave back another size", s5cmd.display());
                fs::remove_file(&copy)?;
            }
        }
    }
    let peer = s5cmd.as_deref().map_or_else(|| Ok("s5cmd".into()), describe_s5cmd)?;
    Ok([
        put.to_figure("store: put, S3", mib, &peer, Some(PUT_SPEED)),
        get.to_figure("store: get, S3", mib, &peer, Some(GET_SPEED)),
    ])
}

/// Returns its name and version, as in `s5cmd v2.3.0-991c9fb`.
fn describe_s5cmd(program: &Path) -> anyhow::Result<String> {
    let output = Command::new(program).arg("version").output()?;
    Ok(format!("s5cmd {}", String::from_utf8_lossy(&output.stdout).trim()))
}

fn find_s5cmd(args: &BenchArgs) -> Option<PathBuf> {
    let on_path = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|dir| dir.join("s5cmd")).find(|file| file.is_file())
    };
    args.s5cmd.clone().or_else(on_path)
}
