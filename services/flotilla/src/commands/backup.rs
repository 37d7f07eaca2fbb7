//! `flotilla backup` and `flotilla restore`: a fleet's log, members and keys, as they are.
//!
//! The store is not among them: it has a backup of its own, and every file in it is compared
//! with the log when it is read.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use bus::{
    Bus, Snapshot,
    server::{ManagedServer, ServerOptions},
};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use wire::Digest;

use crate::{
    cli::{BackupArgs, RestoreArgs},
    fleet::{self, FleetArgs, FleetFile},
    keys::{self, Keys},
    output,
};

const ABOUT: &str = "backup.json";
const VERSION: u32 = 1;
/// In a directory that a backup is being restored to; gone when that is done.
const UNFINISHED: &str = "restoring";

/// What a backup holds; written last.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    version: u32,
    /// In seconds since 1970.
    made_at: u64,
    /// Where the fleet's files were.
    store: String,
    /// Whether it lets in its members alone.
    closed: bool,
    streams: Vec<Copied>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Copied {
    snapshot: Snapshot,
    file: String,
    digest: String,
}

pub(crate) async fn backup(
    fleet: &FleetArgs,
    args: &BackupArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    empty(&args.out, &[])?;
    // As private as the log is.
    std::fs::set_permissions(&args.out, std::fs::Permissions::from_mode(0o700))
        .with_context(|| format!("use {}", args.out.display()))?;
    let bus = fleet.bus("backup", "user").await?;
    let store = fleet::config(&bus).await?.store;
    let mut streams = Vec::new();
    for stream in Bus::streams() {
        streams.extend(copy(&bus, &stream, &args.out).await?);
    }
    if let Some(directory) = &fleet.dir
        && Keys::open(directory)?.is_some()
    {
        copy_keys(directory, &args.out)?;
    }
    let closed = fleet.identity()?.is_some();
    let about = About { version: VERSION, made_at: keys::now(), store, closed, streams };
    write_about(&args.out, &about)?;
    tell("copied", &about, json)?;
    output::say(&format!(
        "files are not in it: keep a copy of {} too. Whoever has its keys/ is the fleet",
        about.store
    ));
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn restore(
    fleet: &FleetArgs,
    args: &RestoreArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let about = read_about(&args.from)?;
    for copied in &about.streams {
        check(&args.from, copied).await?;
    }
    let directory =
        fleet.dir.as_ref().context("pass --dir DIR, where the fleet is to be (A103)")?;
    empty(directory, &[keys::DIRECTORY])?;
    let directory = directory.canonicalize().context("find the fleet's directory")?;
    let unfinished = directory.join(UNFINISHED);
    std::fs::write(&unfinished, "").with_context(|| format!("write {}", unfinished.display()))?;
    // Keys that are there already are those of a fleet that takes this one's place.
    if Keys::open(&directory)?.is_none() && args.from.join(keys::DIRECTORY).is_dir() {
        copy_keys(&args.from, &directory)?;
    }
    let keys = Keys::open(&directory)?;
    if about.closed && keys.is_none() {
        bail!(
            "the backup is a closed fleet's, without its keys; make new ones with `flotilla init \
             --dir DIR` in a new directory and restore into that, or copy its keys/ there (A110)"
        );
    }
    let nats = directory.join("nats");
    let options = ServerOptions {
        binary: args.nats_server.clone(),
        closed: keys.as_ref().map(|keys| keys.close(&nats)).transpose()?,
        ..ServerOptions::new(nats)
    };
    let mut server = ManagedServer::start(&options).await?;
    FleetFile {
        nats: server.url(),
        gateway: "127.0.0.1:0".into(),
        store: about.store.clone(),
        pid: 0,
        identity: keys.as_ref().map(Keys::admin),
    }
    .write(&directory)?;
    let here = FleetArgs { dir: Some(directory.clone()), ..FleetArgs::default() };
    let bus = here.bus("restore", "user").await?;
    for copied in &about.streams {
        let path = args.from.join(&copied.file);
        let file = tokio::fs::File::open(&path).await;
        let mut file = file.with_context(|| format!("read {}", path.display()))?;
        bus.restore(&copied.snapshot, &mut file).await?;
    }
    bus.close().await;
    server.stop().await;
    std::fs::remove_file(&unfinished)
        .with_context(|| format!("remove {}", unfinished.display()))?;
    tell("restored", &about, json)?;
    output::say(&format!(
        "`flotilla up --dir {} --store {}` goes on with it",
        directory.display(),
        about.store
    ));
    Ok(ExitCode::SUCCESS)
}

/// What a restore that was cut off left behind is part of a log at best.
pub(super) fn refuse_half_restored(directory: &Path) -> anyhow::Result<()> {
    if directory.join(UNFINISHED).exists() {
        bail!(
            "the restore into {} was not finished; remove that directory and restore again (A110)",
            directory.display()
        );
    }
    Ok(())
}

/// A directory of its own, lest two backups be taken for one.
fn empty(directory: &Path, but_for: &[&str]) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("use {}", directory.display()))?;
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    for entry in entries {
        let name = entry.with_context(|| format!("read {}", directory.display()))?.file_name();
        if !but_for.iter().any(|allowed| name == *allowed) {
            bail!("{} is not empty; name a new directory (A110)", directory.display());
        }
    }
    Ok(())
}

async fn copy(bus: &Bus, stream: &str, out: &Path) -> anyhow::Result<Option<Copied>> {
    let file = format!("{stream}.snapshot");
    let path = out.join(&file);
    let created = tokio::fs::File::create(&path).await;
    let created = created.with_context(|| format!("write {}", path.display()))?;
    let mut writer = tokio::io::BufWriter::new(created);
    let Some(snapshot) = bus.snapshot(stream, &mut writer).await? else {
        tokio::fs::remove_file(&path)
            .await
            .with_context(|| format!("remove {}", path.display()))?;
        return Ok(None);
    };
    writer.shutdown().await.context("write the snapshot")?;
    writer.into_inner().sync_all().await.context("write the snapshot")?;
    let digest = digest(&path).await?.to_string();
    Ok(Some(Copied { snapshot, file, digest }))
}

async fn check(from: &Path, copied: &Copied) -> anyhow::Result<()> {
    let path = from.join(&copied.file);
    if Path::new(&copied.file).components().count() != 1 {
        bail!("{}: {:?} is no file of a backup (A110)", from.join(ABOUT).display(), copied.file);
    }
    let found = digest(&path).await?.to_string();
    if found != copied.digest {
        bail!("{} is damaged: its digest is {found}, not {} (A110)", path.display(), copied.digest);
    }
    Ok(())
}

async fn digest(path: &Path) -> anyhow::Result<Digest> {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || {
        let hashed = || {
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(std::fs::File::open(&path)?)?;
            std::io::Result::Ok(Digest::from(hasher.finalize()))
        };
        hashed().with_context(|| format!("read {}", path.display()))
    })
    .await?
}

/// With their modes: a directory that others may read is no place for keys.
fn copy_keys(from: &Path, to: &Path) -> anyhow::Result<()> {
    let from = from.join(keys::DIRECTORY);
    let mut left: Vec<PathBuf> = vec![from.clone()];
    while let Some(directory) = left.pop() {
        let at = to.join(keys::DIRECTORY).join(directory.strip_prefix(&from)?);
        let mut copied = || -> std::io::Result<()> {
            std::fs::create_dir_all(&at)?;
            std::fs::set_permissions(&at, std::fs::metadata(&directory)?.permissions())?;
            for entry in std::fs::read_dir(&directory)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    left.push(entry.path());
                } else {
                    std::fs::copy(entry.path(), at.join(entry.file_name()))?;
                }
            }
            Ok(())
        };
        copied().with_context(|| format!("copy {}", directory.display()))?;
    }
    Ok(())
}

fn write_about(out: &Path, about: &About) -> anyhow::Result<()> {
    let path = out.join(ABOUT);
    std::fs::write(&path, serde_json::to_vec_pretty(about)?)
        .with_context(|| format!("write {}", path.display()))
}

fn read_about(from: &Path) -> anyhow::Result<About> {
    let path = from.join(ABOUT);
    let text = std::fs::read(&path).with_context(|| {
        format!("read {}: is that a backup, and was it finished?", path.display())
    })?;
    let about: About = serde_json::from_slice(&text)
        .with_context(|| format!("{} does not describe a backup", path.display()))?;
    if about.version != VERSION {
        bail!(
            "{} is of version {}; this program knows {VERSION}: upgrade it (A110)",
            path.display(),
            about.version
        );
    }
    Ok(about)
}

fn tell(what: &str, about: &About, json: bool) -> anyhow::Result<()> {
    if json {
        output::print(&serde_json::to_string(about)?);
        return Ok(());
    }
    for Copied { snapshot, .. } in &about.streams {
        output::print(&format!(
            "{what} {}: {} entries, up to {}",
            snapshot.stream,
            snapshot.entries(),
            snapshot.last_sequence()
        ));
    }
    Ok(())
}
