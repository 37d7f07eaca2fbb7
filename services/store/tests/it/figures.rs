//! Measures the gateway's store beside the store itself. Not a test: figures for `docs/STORE.md`,
//! by `cargo nextest run --run-ignored only -E 'test(=figures::cpu_time_of_transfers)'`.

use std::{collections::BTreeMap, fs, time::Instant};

use crate::support::{MIB, Place, noise};

const FILE_MIB: usize = 512;

/// Returns the CPU seconds so far of this process's threads: the servers', and the others.
fn cpu_s() -> BTreeMap<&'static str, f64> {
    let mut seconds = BTreeMap::from([("server", 0.0), ("client", 0.0)]);
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = fs::read_to_string(task.path().join("stat")) else { continue };
        let (name, rest) = stat.split_once('(').unwrap().1.rsplit_once(") ").unwrap();
        let fields: Vec<&str> = rest.split(' ').collect();
        let ticks: f64 = fields[11..13].iter().map(|field| field.parse::<f64>().unwrap()).sum();
        let is_server = ["store-proxy", "s3-server"].iter().any(|server| name.starts_with(server));
        let who = if is_server { "server" } else { "client" };
        *seconds.get_mut(who).unwrap() += ticks / 100.0;
    }
    seconds
}

async fn measured(what: &str, work: impl Future<Output = ()>) {
    let (began, before) = (Instant::now(), cpu_s());
    work.await;
    let (wall, after) = (began.elapsed().as_secs_f64(), cpu_s());
    let gib = FILE_MIB as f64 / 1024.0;
    let spent = |who: &str| (after[who] - before[who]) / gib;
    println!(
        "| {what} | {:.0} | {:.2} | {:.2} |",
        FILE_MIB as f64 / wall,
        spent("client"),
        spent("server")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "figures, not a test"]
async fn cpu_time_of_transfers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    println!("| | MiB/s | client CPU s/GiB | server CPU s/GiB |\n|---|---|---|---|");
    for round in 0..2 {
        let names = ["directory", "S3", "directory by the gateway", "S3 by signed addresses"];
        for (name, at) in names.iter().zip(Place::all().await) {
            fs::write(&path, noise(round, FILE_MIB * MIB)).unwrap();
            let mut blob = None;
            measured(&format!("put, {name}"), async {
                blob = Some(at.store.put_blob_file(&path).await.unwrap());
            })
            .await;
            let blob = blob.unwrap();
            measured(&format!("get, {name}"), async {
                assert_eq!(at.store.hash_blob(&blob, &|_| ()).await.unwrap(), None);
            })
            .await;
        }
    }
}
