//! `flotilla backup` and `flotilla restore`: copies of a fleet's log, members and keys.
//!
//! The object store is not included: it needs a backup of its own, and every file in it is compared
//! with the log when it is read.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use bus::{
    Bus, StreamSnapshot,
    server::{ManagedServer, ServerOptions},
};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use wire::Digest;

use crate::{
    args::{BackupArgs, GlobalArgs, RestoreArgs},
    fleet::{self, FleetArgs, FleetFile},
    fleet_keys::FleetKeys,
    output,
};

const MANIFEST_FILE: &str = "backup.json";
const MANIFEST_VERSION: u32 = 1;
/// Name of a marker file in the directory of a restore, removed when the restore is complete.
const UNFINISHED_MARKER: &str = "restoring";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BackupManifest {
    version: u32,
    /// Seconds since 1970.
    made_at: u64,
    store: String,
    closed: bool,
    streams: Vec<StreamBackup>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamBackup {
    snapshot: StreamSnapshot,
    file: String,
    digest: String,
}

pub(crate) async fn back_up_fleet(flags: &GlobalArgs, args: &BackupArgs) -> anyhow::Result<()> {
    ensure_empty(&args.out, &[])?;
    // The backup is as private as the log.
    std::fs::set_permissions(&args.out, std::fs::Permissions::from_mode(0o700))
        .with_context(|| format!("use {}", args.out.display()))?;
    let bus = flags.fleet.connect_bus("backup", "user").await?;
    let store = fleet::read_fleet_config(&bus).await?.store;
    let mut streams = Vec::new();
    for stream in Bus::stream_names() {
        streams.extend(copy_stream(&bus, &stream, &args.out).await?);
    }
    if let Some(directory) = &flags.fleet.dir
        && FleetKeys::open(directory)?.is_some()
    {
        copy_keys(directory, &args.out)?;
    }
    let closed = flags.fleet.read_member()?.is_some();
    let about = BackupManifest {
        version: MANIFEST_VERSION,
        made_at: wire::clock::unix_seconds(),
        store,
        closed,
        streams,
    };
    let path = args.out.join(MANIFEST_FILE);
    std::fs::write(&path, serde_json::to_vec_pretty(&about)?)
        .with_context(|| format!("write {}", path.display()))?;
    print_streams("copied", &about, flags.json)?;
    output::print_message(&format!(
        "files are not in it: keep a copy of {} too. Anyone with its keys/ controls the fleet",
        about.store
    ));
    Ok(())
}

pub(crate) async fn restore_fleet(flags: &GlobalArgs, args: &RestoreArgs) -> anyhow::Result<()> {
    let about = read_manifest(&args.from)?;
    for copied in &about.streams {
        check_stream_file(&args.from, copied).await?;
    }
    let directory = flags
        .fleet
        .dir
        .as_ref()
        .context("pass --dir DIR, the directory to restore the fleet to (A103)")?;
    ensure_empty(directory, &[fleet::KEYS_DIRECTORY])?;
    let directory = directory.canonicalize().context("find the fleet's directory")?;
    let unfinished = directory.join(UNFINISHED_MARKER);
    std::fs::write(&unfinished, "").with_context(|| format!("write {}", unfinished.display()))?;
    // Existing keys are those of a new fleet that replaces the one in the backup.
    if FleetKeys::open(&directory)?.is_none() && args.from.join(fleet::KEYS_DIRECTORY).is_dir() {
        copy_keys(&args.from, &directory)?;
    }
    let keys = FleetKeys::open(&directory)?;
    if about.closed && keys.is_none() {
        bail!(
            "the backup is a closed fleet's, without its keys; make new ones with `flotilla init \
             --dir DIR` in a new directory and restore into that, or copy its keys/ there (A110)"
        );
    }
    let nats = directory.join("nats");
    let options = ServerOptions {
        binary: args.nats_server.clone(),
        closed_fleet: keys.as_ref().map(|keys| keys.nats_server_config(&nats)).transpose()?,
        ..ServerOptions::new(nats)
    };
    let mut server = ManagedServer::start(&options).await?;
    FleetFile {
        nats: server.client_url(),
        gateway: "127.0.0.1:0".into(),
        store: about.store.clone(),
        pid: 0,
        agents: Vec::new(),
        identity: keys.as_ref().map(FleetKeys::admin_identity),
    }
    .write(&directory)?;
    let here = FleetArgs::in_directory(&directory);
    let bus = here.connect_bus("restore", "user").await?;
    for copied in &about.streams {
        let path = args.from.join(&copied.file);
        let file = tokio::fs::File::open(&path).await;
        let mut file = file.with_context(|| format!("read {}", path.display()))?;
        bus.restore_stream(&copied.snapshot, &mut file).await?;
    }
    bus.close().await;
    server.stop().await;
    std::fs::remove_file(&unfinished)
        .with_context(|| format!("remove {}", unfinished.display()))?;
    print_streams("restored", &about, flags.json)?;
    output::print_message(&format!(
        "start it with `flotilla up --dir {} --store {}`",
        directory.display(),
        about.store
    ));
    Ok(())
}

/// An interrupted restore would have only part of the log.
pub(super) fn refuse_unfinished_restore(directory: &Path) -> anyhow::Result<()> {
    if directory.join(UNFINISHED_MARKER).exists() {
        bail!(
            "the restore into {} was not finished; remove that directory and restore again (A110)",
            directory.display()
        );
    }
    Ok(())
}

/// Two backups are never mixed.
fn ensure_empty(directory: &Path, but_for: &[&str]) -> anyhow::Result<()> {
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

/// `None` if the stream does not exist.
async fn copy_stream(bus: &Bus, stream: &str, out: &Path) -> anyhow::Result<Option<StreamBackup>> {
    let file = format!("{stream}.snapshot");
    let path = out.join(&file);
    let created = tokio::fs::File::create(&path).await;
    let created = created.with_context(|| format!("write {}", path.display()))?;
    let mut writer = tokio::io::BufWriter::new(created);
    let Some(snapshot) = bus.snapshot_stream(stream, &mut writer).await? else {
        tokio::fs::remove_file(&path)
            .await
            .with_context(|| format!("remove {}", path.display()))?;
        return Ok(None);
    };
    writer.shutdown().await.context("write the snapshot")?;
    writer.into_inner().sync_all().await.context("write the snapshot")?;
    let digest = hash_file(&path).await?.to_string();
    Ok(Some(StreamBackup { snapshot, file, digest }))
}

async fn check_stream_file(from: &Path, copied: &StreamBackup) -> anyhow::Result<()> {
    let path = from.join(&copied.file);
    if Path::new(&copied.file).components().count() != 1 {
        bail!(
            "{}: {:?} is not a file of a backup; restore from a complete backup (A110)",
            from.join(MANIFEST_FILE).display(),
            copied.file
        );
    }
    let found = hash_file(&path).await?.to_string();
    if found != copied.digest {
        bail!("{} is damaged: its digest is {found}, not {} (A110)", path.display(), copied.digest);
    }
    Ok(())
}

async fn hash_file(path: &Path) -> anyhow::Result<Digest> {
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

/// With its permissions, because keys must stay private.
fn copy_keys(from: &Path, to: &Path) -> anyhow::Result<()> {
    let from = from.join(fleet::KEYS_DIRECTORY);
    let mut left: Vec<PathBuf> = vec![from.clone()];
    while let Some(directory) = left.pop() {
        let at = to.join(fleet::KEYS_DIRECTORY).join(directory.strip_prefix(&from)?);
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

fn read_manifest(from: &Path) -> anyhow::Result<BackupManifest> {
    let path = from.join(MANIFEST_FILE);
    let text = std::fs::read(&path)
        .with_context(|| format!("read {}: not a backup, or an unfinished one", path.display()))?;
    let about: BackupManifest = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not a valid backup manifest", path.display()))?;
    if about.version != MANIFEST_VERSION {
        bail!(
            "{} has version {}, this program supports {MANIFEST_VERSION}: upgrade flotilla (A110)",
            path.display(),
            about.version
        );
    }
    Ok(about)
}

fn print_streams(what: &str, about: &BackupManifest, json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(about);
    }
    for StreamBackup { snapshot, .. } in &about.streams {
        output::print_line(&format!(
            "{what} {}: {} entries, up to {}",
            snapshot.stream,
            snapshot.entry_count(),
            snapshot.last_sequence()
        ));
    }
    Ok(())
}
