//! The store: a file of a gibibyte into a bucket and out of it beside s5cmd, out of a directory
//! beside `cp`, and an adapter to eight boxes at once over links of 1 Gb/s.
//!
//! Speeds are told as seconds, each beside what the other program took in the same round of the
//! same run; the best round of each counts, for the machine may be busy.

mod fanout;
mod network;
mod peer;

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::{fs as disk, process::getpid};
use store::{Cache, Store};
use wire::v1;

use super::Figure;
use crate::{cli::BenchArgs, directory::Directory, output};

pub(crate) use peer::work as peer_task;

const MIB: u64 = 1 << 20;
const ROUNDS: u64 = 3;
/// Of what the other program does, at least.
const PUT_SPEED: f64 = 1.0;
const GET_SPEED: f64 = 0.9;
const FILE_SPEED: f64 = 0.8;

pub(super) async fn measure(args: &BenchArgs) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::from(directory(u64::from(args.store_mib)).await?);
    match &args.s3 {
        Some(url) => figures.extend(bucket(url, args).await?),
        None => output::say("store: no --s3 URL: what a bucket does was left out"),
    }
    figures.extend(fanout::measure().await?);
    Ok(figures)
}

/// What both sides of a comparison took, in seconds.
struct Pair {
    ours: f64,
    theirs: Option<f64>,
}

impl Pair {
    fn new() -> Self {
        Self { ours: f64::MAX, theirs: None }
    }

    fn ours(&mut self, taken: Duration) {
        self.ours = self.ours.min(taken.as_secs_f64());
    }

    fn theirs(&mut self, taken: Duration) {
        let taken = taken.as_secs_f64();
        self.theirs = Some(self.theirs.map_or(taken, |best| best.min(taken)));
    }

    /// At least that part of the other's speed.
    fn figure(&self, name: &'static str, mib: u64, other: &str, speed: Option<f64>) -> Figure {
        let Self { ours, theirs } = self;
        let rate = |seconds: f64| mib as f64 / seconds;
        let beside = theirs.map_or(String::new(), |theirs| {
            format!("; {other} {:.0}: ours has {:.2} of its speed", rate(theirs), theirs / ours)
        });
        Figure {
            name,
            measured: *ours,
            unit: "s",
            limit: theirs.zip(speed).map(|(theirs, speed)| theirs / speed),
            how: format!("{mib} MiB, {:.0} MiB/s{beside}", rate(*ours)),
        }
    }
}

/// Which no two rounds have in common.
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

/// The same for both sides of a comparison: what was written before is on the disk, and memory for
/// as much again was just let go. A virtual machine may have to be given memory first, which costs
/// more than copying into it.
fn settle(mib: u64) -> anyhow::Result<()> {
    let path = std::env::temp_dir().join(format!("flotilla-bench-settle-{}", std::process::id()));
    let mut file = File::create(&path)?;
    let piece = vec![1; usize::try_from(MIB)?];
    let written = (0..mib).try_for_each(|_| file.write_all(&piece));
    disk::sync();
    fs::remove_file(&path)?;
    Ok(written?)
}

async fn timed<T>(
    mib: u64,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(T, Duration)> {
    settle(mib)?;
    let began = Instant::now();
    let done = work.await?;
    Ok((done, began.elapsed()))
}

fn run(mib: u64, command: &mut Command) -> anyhow::Result<Duration> {
    settle(mib)?;
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(began.elapsed())
}

async fn fetched(store: &Store, blob: &v1::Blob, into: &Path) -> anyhow::Result<()> {
    let cache = Cache::open(into, 1 << 40)?;
    cache.blob(store, blob).await?;
    Ok(())
}

async fn directory(mib: u64) -> anyhow::Result<[Figure; 2]> {
    output::say(&format!("store: {mib} MiB into a directory and out of it, {ROUNDS} times …"));
    let scratch = Directory::choose(None, "bench-store")?;
    let at = |name: &str| scratch.path().join(name);
    let (mut put, mut get) = (Pair::new(), Pair::new());
    for round in 0..ROUNDS {
        let (source, copy) = (at("source"), at("copy"));
        write_noise(&source, round, mib)?;
        let store = Store::open(&format!("file://{}", at("store").display())).await?;
        put.theirs(run(
            mib,
            Command::new("sh")
                .arg("-c")
                .arg("cp -- \"$0\" \"$1\" && sync -- \"$1\"")
                .args([&source, &copy]),
        )?);
        fs::remove_file(&copy)?;
        let (blob, taken) = timed(mib, async { Ok(store.put_blob_file(&source).await?) }).await?;
        put.ours(taken);
        get.theirs(run(mib, Command::new("cp").arg("--").args([&source, &copy]))?);
        fs::remove_file(&copy)?;
        get.ours(timed(mib, fetched(&store, &blob, &at("cache"))).await?.1);
        for gone in ["store", "cache"] {
            fs::remove_dir_all(at(gone))?;
        }
    }
    Ok([
        put.figure("store: put, file://", mib, "cp and sync", None),
        get.figure("store: get, file://", mib, "cp", Some(FILE_SPEED)),
    ])
}

async fn bucket(url: &str, args: &BenchArgs) -> anyhow::Result<[Figure; 2]> {
    let mib = u64::from(args.store_mib);
    output::say(&format!("store: {mib} MiB to {url} and back, {ROUNDS} times …"));
    let s5cmd = s5cmd(args);
    if s5cmd.is_none() {
        output::say("store: there is no s5cmd on PATH and no --s5cmd: it was left out");
    }
    let store = Store::open(url).await?;
    store.check().await?;
    let scratch = Directory::choose(None, "bench-store")?;
    let at = |name: &str| scratch.path().join(name);
    let (mut put, mut get) = (Pair::new(), Pair::new());
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
        // In turns, for a disk may tire.
        for ours in [round % 2 == 0, round % 2 != 0] {
            if ours {
                let (blob, taken) =
                    timed(mib, async { Ok(store.put_blob_file(&source).await?) }).await?;
                put.ours(taken);
                get.ours(timed(mib, fetched(&store, &blob, &at("cache"))).await?.1);
                fs::remove_dir_all(at("cache"))?;
            } else if let Some(s5cmd) = &s5cmd {
                put.theirs(run(mib, &mut cp(&local, &there))?);
                get.theirs(run(mib, &mut cp(&there, &back))?);
                let same = fs::metadata(&copy)?.len() == mib * MIB;
                anyhow::ensure!(same, "{} gave back another size", s5cmd.display());
                fs::remove_file(&copy)?;
            }
        }
    }
    Ok([
        put.figure("store: put, S3", mib, "s5cmd", Some(PUT_SPEED)),
        get.figure("store: get, S3", mib, "s5cmd", Some(GET_SPEED)),
    ])
}

fn s5cmd(args: &BenchArgs) -> Option<PathBuf> {
    let on_path = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|dir| dir.join("s5cmd")).find(|file| file.is_file())
    };
    args.s5cmd.clone().or_else(on_path)
}
