//! Leftovers of uploads that are refused, break off or are killed: none at once where their process
//! lives, and none after a sweep elsewhere.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, SystemTime},
};

use futures::StreamExt;
use reqwest::{Body, Client, Response};
use store::{LEFTOVER_AGE, Store};
use store_proxy_server::StoreProxyServer;
use tokio::time::{Instant, sleep};

use crate::support::{MIB, Place, about, adapter, noise, place};

/// Environment of a publisher that is killed: its store, and its member name behind a gateway.
const STORE: &str = "TEST_KILLED_STORE";
const GATEWAY: &str = "TEST_KILLED_GATEWAY";
const PATIENCE: Duration = Duration::from_secs(60);

/// Lists the files below a directory with staging names, and those of uploads.
fn list_staging(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().into_string().unwrap();
            if path.is_dir() {
                directories.push(path);
            } else if name.contains('#') || path.parent().unwrap().ends_with(".door/uploads") {
                found.push(path);
            }
        }
    }
    found
}

async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        sleep(Duration::from_millis(1)).await;
    }
}

fn client() -> Client {
    Client::builder().http2_prior_knowledge().build().unwrap()
}

/// Reads the upload's name in the answer to `?begin`.
async fn upload_of(begun: Response) -> String {
    assert_eq!(begun.status(), 200);
    begun.text().await.unwrap().split('"').nth(3).unwrap().to_owned()
}

fn blob_key(fill: &str) -> String {
    format!("blobs/{fill}/{}", fill.repeat(32))
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_uploads_leave_nothing_behind() {
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let tree = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
        let (http, url) = (client(), at.store.url().to_owned());
        let send = async |method: &str, key: &str, who: &str, body: Vec<u8>| {
            let method = method.parse().unwrap();
            let asked = http.request(method, format!("{url}/{key}")).bearer_auth(who);
            asked.body(body).send().await.unwrap()
        };
        let member = "box-1.trainer+operator";
        // A wrong digest, in one piece and in parts.
        let blob = blob_key("ab");
        assert_eq!(send("PUT", &blob, member, noise(1, 1000)).await.status(), 400);
        let begun = send("POST", &format!("{blob}?begin"), member, Vec::new()).await;
        let id = upload_of(begun).await;
        let part = format!("{blob}?upload={id}&part=0&offset=0");
        assert_eq!(send("PUT", &part, member, noise(1, 1000)).await.status(), 200);
        if at.s3.is_none() {
            let complete = format!("{blob}?complete=1000&upload={id}");
            let completed = send("POST", &complete, member, br#"{"parts":["0-1000"]}"#.to_vec());
            assert_eq!(completed.await.status(), 400);
        } else {
            let abort = format!("{blob}?upload={id}");
            assert_eq!(send("DELETE", &abort, member, Vec::new()).await.status(), 204);
        }
        // A member without rights.
        for (method, query) in [("PUT", ""), ("POST", "?begin")] {
            let key = format!("{blob}{query}");
            let refused = send(method, &key, "box-2.generator", vec![0; 10]).await;
            assert_eq!(refused.status(), 403);
        }
        // Copies onto objects that are committed, or named by their digest.
        let (config, manifest) =
            (format!("{}/adapter_config.json", tree.path), format!("{}/manifest.json", tree.path));
        for key in [&manifest, &blob] {
            let copy = format!("{key}?copy={config}");
            let answer = send("POST", &copy, member, Vec::new()).await;
            assert_eq!(answer.status(), 400, "{key}");
            assert!(answer.text().await.unwrap().contains("(G110)"));
        }
        at.store.read_manifest(&tree).await.unwrap();
        // Two equal copies get one name.
        let other = "runs/raft-1/checkpoints/c0-s2-0123456789ab/x";
        for _ in 0..3 {
            let copy = format!("{other}?copy={config}");
            assert_eq!(send("POST", &copy, member, Vec::new()).await.status(), 204);
        }
        assert_eq!(fs::read(at.dir.join(other)).unwrap(), br#"{"r": 8}"#);
        assert_eq!(list_staging(&at.dir), Vec::<PathBuf>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_closed_midway_leaves_nothing_behind() {
    let at = Place::file().await.behind_proxy();
    let url = format!("{}/{}", at.store.url(), blob_key("ab"));
    // Half of the body arrives, then nothing more.
    let half = futures::stream::iter([Ok::<_, std::io::Error>(noise(1, MIB))]);
    let body = Body::wrap_stream(half.chain(futures::stream::pending()));
    let put = client().put(url).bearer_auth("box-1.operator").header("content-length", 2 * MIB);
    let sending = tokio::spawn(put.body(body).send());
    wait_until("the upload is staged", || !list_staging(&at.dir).is_empty()).await;
    sending.abort();
    let _ = sending.await;
    wait_until("it is removed", || list_staging(&at.dir).is_empty()).await;
}

/// Starts a process that publishes until it is killed.
fn spawn_publisher(variable: &str, value: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--exact", "leftovers::publisher_that_is_killed"])
        .env(variable, value)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
#[ignore = "started and killed by other tests"]
async fn publisher_that_is_killed() {
    let store = match (env::var(STORE), env::var(GATEWAY)) {
        (Ok(url), _) => Store::open(&url).await.unwrap(),
        (_, Ok(gateway)) => {
            let dir = tempfile::tempdir().unwrap();
            let bearer = dir.keep().join("bearer");
            fs::write(&bearer, "box-1.operator").unwrap();
            Store::open_gateway(&store::GatewayStore { gateway, ca: None, bearer: Some(bearer) })
                .unwrap()
        }
        _ => return,
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    let file = fs::File::create(&path).unwrap();
    for count in 0.. {
        file.set_len((256 * MIB) as u64 + count).unwrap();
        store.put_blob_file(&path).await.unwrap();
    }
}

/// Kills the gateway too, and first: one that lives removes what a broken connection left.
async fn kill_midway(mut publisher: Child, dir: &Path, gateway: Option<&mut StoreProxyServer>) {
    let is_midway = || {
        assert_eq!(publisher.try_wait().unwrap(), None, "it ended by itself");
        !list_staging(dir).is_empty()
    };
    wait_until("it uploads", is_midway).await;
    if let Some(gateway) = gateway {
        gateway.kill();
    }
    // SIGKILL.
    publisher.kill().unwrap();
    publisher.wait().unwrap();
}

fn make_old(files: &[PathBuf]) {
    for path in files {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - 2 * LEFTOVER_AGE).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_publisher_leaves_is_counted_and_removed_when_it_is_old() {
    // Into a directory, and through a gateway, which is killed as well.
    for is_through in [false, true] {
        let mut at = Place::file().await;
        let root = at.store.clone();
        let left = loop {
            let publisher = if is_through {
                at = if at.proxy.is_none() { at.behind_proxy() } else { at };
                let gateway =
                    at.proxy.as_ref().unwrap().gateway_store("x.operator").unwrap().gateway;
                spawn_publisher(GATEWAY, &gateway)
            } else {
                spawn_publisher(STORE, root.url())
            };
            kill_midway(publisher, &at.dir, at.proxy.as_mut()).await;
            // The file may just be complete.
            let left = list_staging(&at.dir);
            if let Some(proxy) = &mut at.proxy {
                proxy.restart().unwrap();
            }
            if !left.is_empty() {
                break left;
            }
        };
        assert!(root.remove_leftovers(LEFTOVER_AGE).await.unwrap().is_empty(), "it is young");
        assert_eq!(list_staging(&at.dir), left);
        make_old(&left);
        let found = root.find_leftovers(LEFTOVER_AGE).await.unwrap();
        assert_eq!(found.count, left.len() as u64);
        assert_eq!(root.remove_leftovers(LEFTOVER_AGE).await.unwrap(), found);
        assert_eq!(list_staging(&at.dir), Vec::<PathBuf>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_upload_into_a_bucket_is_aborted() {
    let place = Place::s3().await;
    let bucket = place.store.clone();
    let mut at = place.behind_proxy();
    let key = "runs/raft-1/checkpoints/c0-s1-0123456789ab/w";
    let (http, url) = (client(), format!("{}/{key}", at.store.url()));
    let begin = async || {
        let begun = http.post(format!("{url}?begin")).bearer_auth("box-1.trainer").send().await;
        upload_of(begun.unwrap()).await
    };
    let (ended, left) = (begin().await, begin().await);
    let abort = http.delete(format!("{url}?upload={ended}")).bearer_auth("box-1.trainer");
    assert_eq!(abort.send().await.unwrap().status(), 204);
    // No state is kept in memory.
    at.proxy.as_mut().unwrap().kill();
    at.proxy.as_mut().unwrap().restart().unwrap();
    assert!(bucket.remove_leftovers(LEFTOVER_AGE).await.unwrap().is_empty(), "it is young");
    assert_eq!(bucket.find_leftovers(Duration::ZERO).await.unwrap().count, 1);
    assert_eq!(bucket.remove_leftovers(Duration::ZERO).await.unwrap().count, 1);
    assert!(at.count(&["DELETE", &left]) == 1, "{:?}", at.s3.as_ref().unwrap().requests());
    assert!(bucket.remove_leftovers(Duration::ZERO).await.unwrap().is_empty());
    assert_eq!(list_staging(&at.dir), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_this_user_abandoned_is_aborted_by_the_next() {
    let at = Place::s3().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("weights");
    fs::write(&file, noise(2, 40 * MIB)).unwrap();
    let mut env = at.s3.as_ref().unwrap().env();
    env.insert("XDG_CACHE_HOME".into(), home.path().join("cache").display().to_string());
    let store = Store::open_with_env(at.store.url(), env).await.unwrap();
    let (killed, path) = (store.clone(), file.clone());
    let killed = tokio::spawn(async move { killed.put_blob_file(&path).await });
    wait_until("it uploads", || at.count(&["PUT", "partNumber"]) > 0).await;
    killed.abort();
    let _ = killed.await;
    let journals = home.path().join("cache/flotilla/uploads");
    let journals: Vec<PathBuf> =
        fs::read_dir(journals).unwrap().map(|entry| entry.unwrap().path()).collect();
    make_old(&journals);
    fs::write(&file, noise(3, 40 * MIB)).unwrap();
    store.put_blob_file(&file).await.unwrap();
    assert_eq!(at.count(&["DELETE", "uploadId"]), 1);
    assert!(!journals[0].exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_begins_so_many_uploads_and_no_more_until_one_is_over() {
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let (http, url) = (client(), at.store.url().to_owned());
        let key =
            |count: usize| format!("{url}/runs/raft-1/checkpoints/c0-s1-0123456789ab/{count}");
        let begin = async |who: &str, count: usize| {
            http.post(format!("{}?begin", key(count))).bearer_auth(who).send().await.unwrap()
        };
        let first = upload_of(begin("box-1.trainer", 0).await).await;
        for count in 1..32 {
            upload_of(begin("box-1.trainer", count).await).await;
        }
        let refused = begin("box-1.trainer", 32).await;
        assert_eq!(refused.status(), 429);
        let said = refused.text().await.unwrap();
        assert!(said.contains("abort them") && said.contains("(G104)"), "{said}");
        // Other members have their own limit, and a single piece does not count.
        upload_of(begin("box-2.trainer", 0).await).await;
        let put = http.put(key(50)).bearer_auth("box-1.trainer").body("bytes").send().await;
        assert_eq!(put.unwrap().status(), 204);
        let abort = http.delete(format!("{}?upload={first}", key(0))).bearer_auth("box-1.trainer");
        assert_eq!(abort.send().await.unwrap().status(), 204);
        upload_of(begin("box-1.trainer", 33).await).await;
    }
}
