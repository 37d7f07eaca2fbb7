//! A store behind a gateway: permissions, gateways that die, and signed URLs.

use std::{fs, time::Duration};

use futures::stream;
use store::{
    FileCache, GatewayStore, GetError, PartPosition, PutError, ReceiveError, RemoveError,
    StorageError, Store, TreePlace, TreeRemoval,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use wire::{Digest, v1};

use crate::support::{MIB, Place, about, adapter, format_error_chain, noise, place};

/// Waits until the gateway has served `count` requests that contain all these words.
async fn until(at: &Place, words: &[&str], count: usize) {
    let proxy = at.proxy.as_ref().unwrap();
    let seen = || {
        let all = |line: &&String| words.iter().all(|word| line.contains(word));
        proxy.requests().iter().filter(all).count()
    };
    let waited = async {
        while seen() < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.expect("the requests were sent");
}

fn weights(mib: usize) -> (TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    fs::write(&path, noise(1, mib * MIB)).unwrap();
    (dir, path)
}

fn model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    dir
}

/// Returns which of the objects that members write this one may write.
async fn written_by(store: &Store, seed: u64) -> [bool; 4] {
    let told_why = |error: &PutError| {
        let said = format_error_chain(error);
        assert!(said.contains("may not write"), "{said}");
        assert!(matches!(error, PutError::Storage(StorageError::Refused { .. })), "{said}");
        false
    };
    let checkpoint = adapter(seed, 10);
    let run = "raft-1".parse().unwrap();
    let step = u32::try_from(seed).unwrap();
    let put = [
        store.publish_tree(checkpoint.path(), &place(step), about()).await.map(|_| ()),
        store
            .publish_tree(checkpoint.path(), &TreePlace::for_resume_state(&run, 0, step), about())
            .await
            .map(|_| ()),
        store.put_blob(noise(seed, 100).into()).await.map(|_| ()),
        store
            .publish_tree(
                model().path(),
                &TreePlace::for_model(&format!("m{seed}")).unwrap(),
                about(),
            )
            .await
            .map(|_| ()),
    ];
    put.map(|put| put.as_ref().map_or_else(told_why, |()| true))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_member_writes_what_its_role_permits_and_gets_a_reason_otherwise() {
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let readable = at.store.put_blob(noise(99, 1000).into()).await.unwrap();
        for (n, (who, may)) in [
            ("trainer", [true, true, false, false]),
            ("watcher", [true, false, true, true]),
            ("generator", [false; 4]),
            ("verifier", [false; 4]),
            ("evaluator", [false; 4]),
            ("reader", [false; 4]),
            ("operator", [false, false, true, true]),
            ("admin", [false, false, true, true]),
        ]
        .into_iter()
        .enumerate()
        {
            let store = at.as_seen_by(&format!("box-{n}.{who}"));
            store.check_access().await.unwrap();
            assert_eq!(store.get_blob(&readable, 1000).await.unwrap(), noise(99, 1000), "{who}");
            assert_eq!(written_by(&store, 100 + n as u64).await, may, "{who}");
        }
        assert!(!at.dir.join("blobs/xx").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trainers_remove_what_their_optimizer_left_and_admins_what_a_run_made() {
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let run = "raft-1".parse().unwrap();
        let (kept, state) = (place(1), TreePlace::for_resume_state(&run, 0, 1));
        let dir = adapter(1, 10);
        let checkpoint = at.store.publish_tree(dir.path(), &kept, about()).await.unwrap();
        let resume = at.store.publish_tree(dir.path(), &state, about()).await.unwrap();
        let refused = |removed: Result<(), RemoveError>| {
            let error = removed.unwrap_err();
            assert!(
                format_error_chain(&error).contains("may not remove"),
                "{}",
                format_error_chain(&error)
            );
        };
        let trainer = at.as_seen_by("box-1.trainer");
        let removal = TreeRemoval { at: "now".into(), by: "ann".into(), rules: "best".into() };
        for who in ["box-2.evaluator", "bob.operator", "box-4.watcher", "box-5.trainer"] {
            let other = at.as_seen_by(who);
            if who != "box-5.trainer" {
                refused(other.remove_tree(&state, &resume).await);
            }
            other.mark_removed(&kept, &checkpoint, &removal).await.unwrap_err();
        }
        refused(trainer.remove_tree(&kept, &checkpoint).await);
        trainer.read_manifest(&checkpoint).await.unwrap();
        trainer.remove_tree(&state, &resume).await.unwrap();
        assert!(trainer.read_manifest(&resume).await.is_err());
        assert!(!at.dir.join(&resume.path).join("adapter_config.json").exists());
        let admin = at.as_seen_by("ann.admin");
        admin.mark_removed(&kept, &checkpoint, &removal).await.unwrap();
        admin.remove_tree(&kept, &checkpoint).await.unwrap();
        let found = trainer.read_manifest(&checkpoint).await;
        assert!(matches!(found, Err(GetError::Removed { removal: found, .. }) if found == removal));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_files_never_change_and_bytes_must_match_their_name() {
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let tree = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
        let proxy = at.proxy.as_ref().unwrap();
        let url = at.store.url().to_owned();
        let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
        let put = async |key: String, body: Vec<u8>| {
            let put = http.put(format!("{url}/{key}")).bearer_auth("box-9.trainer+operator");
            put.body(body).send().await.unwrap().status().as_u16()
        };
        let manifest = format!("{}/manifest.json", tree.path);
        assert_eq!(put(manifest.clone(), b"{}".to_vec()).await, 409);
        let json = fs::read(at.dir.join(&manifest)).unwrap();
        assert_eq!(put(manifest.clone(), json.clone()).await, 204, "the same again is fine");
        // Other bytes of the same size; the object stays.
        let weights = format!("{}/adapter_model.safetensors", tree.path);
        assert_eq!(put(weights.clone(), vec![0; 10]).await, 204);
        assert_eq!(fs::read(at.dir.join(&weights)).unwrap(), noise(1, 10));
        // Models are trees too.
        let place = TreePlace::for_model("base").unwrap();
        let model = at.store.publish_tree(adapter(1, 10).path(), &place, about()).await.unwrap();
        let weights = format!("{}/adapter_model.safetensors", model.path);
        assert_eq!(put(weights.clone(), vec![0; 10]).await, 204);
        assert_eq!(fs::read(at.dir.join(&weights)).unwrap(), noise(1, 10));
        // Another tree's manifest, and a blob, under wrong names.
        let stranger = "runs/raft-1/checkpoints/c0-s9-0123456789ab/manifest.json";
        assert_eq!(put(stranger.to_owned(), json).await, 400);
        let hex = "ab".repeat(32);
        assert_eq!(put(format!("blobs/ab/{hex}"), b"other".to_vec()).await, 400);
        assert!(!at.dir.join(format!("blobs/ab/{hex}")).exists());
        assert_eq!(put(".door/identity".to_owned(), b"mine".to_vec()).await, 403);
        assert!(proxy.requests().len() > 6);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_older_than_a_commit_changes_nothing_of_it() {
    let publish = async |at: &Place| {
        at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap().path
    };
    // A place that contains it already.
    let tree = publish(&Place::file().await).await;
    for at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
        let weights = format!("{tree}/adapter_model.safetensors");
        let url = format!("{}/{weights}", at.store.url());
        let ask = async |request: reqwest::RequestBuilder| {
            let answer = request.bearer_auth("box-1.trainer").header("flotilla-through", "1");
            let answer = answer.send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        };
        let (_, begun) = ask(http.post(format!("{url}?begin"))).await;
        let id = begun.split('"').nth(3).unwrap().to_owned();
        let put = http.put(format!("{url}?upload={id}&part=0&offset=0")).body("otherbytes");
        let (status, sent) = ask(put).await;
        assert_eq!(status, 200, "{sent}");
        let part = sent.split('"').nth(3).unwrap().to_owned();
        assert_eq!(publish(&at).await, tree);
        let parts = serde_json::json!({ "parts": [part] }).to_string();
        let complete = http.post(format!("{url}?complete=10&upload={id}")).body(parts);
        assert_eq!(ask(complete).await.0, 204, "what is there is there");
        assert_eq!(fs::read(at.dir.join(&weights)).unwrap(), noise(1, 10));
        let (status, said) =
            ask(http.post(format!("{}/{tree}/manifest.json?begin", at.store.url()))).await;
        assert_eq!(status, 400, "{said}");
        assert!(said.contains("send it in one piece"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_is_still_coming_changes_nothing_of_the_completed_object() {
    let at = Place::file().await;
    let objects = at.store.objects_by_key();
    let good = noise(1, MIB);
    let hex = Digest::hash_bytes(&good).to_hex();
    let key = format!("blobs/{}/{hex}", &hex[..2]).parse().unwrap();
    let owner = ("box-1", &key);
    let upload = objects.begin_upload("box-1", &key).await.unwrap();
    let part = PartPosition { upload: upload.clone(), index: 0, offset: 0 };
    let body = stream::iter([Ok(good.clone().into())]);
    let name = objects.put_part(owner, &part, body, MIB as u64).await.unwrap();
    // The body is polled when the part's file is open.
    let late = stream::once(async {
        objects.complete_upload(owner, &upload, vec![name], MIB as u64).await.unwrap();
        Ok(vec![b'Z'; MIB].into())
    });
    let refused = objects.put_part(owner, &part, late, MIB as u64).await.unwrap_err();
    assert!(matches!(refused, ReceiveError::NoUpload), "{refused}");
    assert_eq!(fs::read(at.dir.join(key.as_str())).unwrap(), good);
}

/// Forwards to an address, and ends each connection after some bytes of the answers.
async fn end_connections_after(bytes: u64, to: String, running: &mut JoinSet<()>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address").to_string();
    running.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let Ok(mut server) = TcpStream::connect(&to).await else { return };
            connections.spawn(async move {
                let (mut from_client, mut to_client) = client.split();
                let (from_server, mut to_server) = server.split();
                let mut answers = from_server.take(bytes);
                tokio::select! {
                    _ = copy(&mut from_client, &mut to_server) => {}
                    _ = copy(&mut answers, &mut to_client) => {}
                }
                let _ = to_client.shutdown().await;
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_break_off_again_and_again_end_in_an_error_that_may_pass() {
    let at = Place::file().await.behind_proxy();
    let blob = at.store.put_blob(noise(1, MIB).into()).await.unwrap();
    let gateway = at.proxy.as_ref().unwrap().gateway_store("x.trainer").unwrap();
    let mut running = JoinSet::new();
    let relay = end_connections_after(4 << 10, gateway.gateway.clone(), &mut running).await;
    let store = Store::open_gateway(&GatewayStore { gateway: relay, ..gateway }).unwrap();
    let fetched = store.get_blob(&blob, MIB as u64);
    let fetched = tokio::time::timeout(Duration::from_secs(60), fetched).await;
    let error = fetched.expect("it ends").unwrap_err();
    let text = format_error_chain(&error);
    assert!(text.contains("broke off") && error.is_transient(), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_bearer_is_refused_by_the_gateway() {
    let at = Place::file().await.behind_proxy();
    let blob = at.store.put_blob(noise(1, 10).into()).await.unwrap();
    let gateway = at.proxy.as_ref().unwrap().gateway_store("x.trainer").unwrap().gateway;
    let stranger = Store::open_gateway(&GatewayStore { gateway, ca: None, bearer: None }).unwrap();
    let error = stranger.get_blob(&blob, 10).await.unwrap_err();
    assert!(
        format_error_chain(&error).contains("from credentials of this fleet"),
        "{}",
        format_error_chain(&error)
    );
    assert!(!error.is_transient());
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_lengths_and_missing_objects_are_answered_as_http_requires() {
    let at = Place::file().await.behind_proxy();
    at.store.publish_tree(adapter(7, 1000).path(), &place(1), about()).await.unwrap();
    let tree = fs::read_dir(at.dir.join("runs/raft-1/checkpoints")).unwrap().next().unwrap();
    let tree = tree.unwrap().file_name().into_string().unwrap();
    let url =
        format!("{}/runs/raft-1/checkpoints/{tree}/adapter_model.safetensors", at.store.url());
    let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let get = async |range: &str| {
        let get = http.get(&url).bearer_auth("box-1.evaluator").header("range", range);
        let answer = get.send().await.unwrap();
        let heads = answer.headers().get("content-range").map(|v| v.to_str().unwrap().to_owned());
        (
            answer.status().as_u16(),
            heads.unwrap_or_default(),
            answer.bytes().await.unwrap().to_vec(),
        )
    };
    let all = noise(7, 1000);
    assert_eq!(get("bytes=10-19").await, (206, "bytes 10-19/1000".into(), all[10..20].to_vec()));
    assert_eq!(get("bytes=-5").await, (206, "bytes 995-999/1000".into(), all[995..].to_vec()));
    assert_eq!(
        get("bytes=990-5000").await,
        (206, "bytes 990-999/1000".into(), all[990..].to_vec())
    );
    let (status, heads, _) = get("bytes=1000-").await;
    assert_eq!((status, heads.as_str()), (416, "bytes */1000"));
    assert_eq!(get("lines=1-2").await, (200, String::new(), all));
    let head = http.head(&url).bearer_auth("box-1.evaluator").send().await.unwrap();
    assert_eq!(head.headers()["content-length"], "1000");
    let gone = http.get(format!("{url}x")).bearer_auth("box-1.evaluator").send().await.unwrap();
    assert_eq!(gone.status().as_u16(), 404);
    assert_eq!(gone.text().await.unwrap(), "no such object");
    // A body of unknown size, or one that is too large, is refused.
    let chunked = reqwest::Body::wrap_stream(futures::stream::iter([Ok::<_, std::io::Error>("x")]));
    let put = http.put(&url).bearer_auth("box-1.trainer").body(chunked).send().await.unwrap();
    assert_eq!(put.status().as_u16(), 411);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_when_the_gateway_is_killed_midway_and_comes_back() {
    for mut at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let (_dir, path) = weights(160);
        let (store, file) = (at.store.clone(), path.clone());
        let upload = tokio::spawn(async move { store.put_blob_file(&file).await });
        until(&at, &["part="], 4).await;
        at.proxy.as_mut().unwrap().kill();
        assert!(!upload.is_finished());
        tokio::time::sleep(Duration::from_secs(1)).await;
        at.proxy.as_mut().unwrap().restart().unwrap();
        let blob = upload.await.unwrap().unwrap();
        assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), noise(1, 160 * MIB));
        let left = fs::read_dir(at.dir.join(".door/uploads")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "nothing of it stays behind");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_goes_on_when_the_gateway_is_killed_midway_and_comes_back() {
    for mut at in [Place::file().await.behind_proxy(), Place::s3().await.behind_proxy()] {
        let blob = at.store.put_blob(noise(1, 160 * MIB).into()).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let cache = FileCache::open(dir.path(), u64::MAX).unwrap();
        let (store, wanted) = (at.store.clone(), blob.clone());
        let fetch = tokio::spawn(async move { cache.fetch_blob(&store, &wanted).await });
        until(&at, &["GET"], 3).await;
        at.proxy.as_mut().unwrap().kill();
        assert!(!fetch.is_finished());
        tokio::time::sleep(Duration::from_secs(1)).await;
        at.proxy.as_mut().unwrap().restart().unwrap();
        let held = fetch.await.unwrap().unwrap();
        assert_eq!(fs::read(held.path()).unwrap(), noise(1, 160 * MIB));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_an_s3_store_pass_the_gateway_by_and_no_bearer_goes_with_them() {
    let at = Place::s3().await.behind_proxy();
    let (_dir, path) = weights(40);
    let blob = at.store.put_blob_file(&path).await.unwrap();
    assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), noise(1, 40 * MIB));
    let proxy = at.proxy.as_ref().unwrap().requests();
    assert!(!proxy.iter().any(|line| line.starts_with("PUT")), "{proxy:?}");
    let signed = at.s3.as_ref().unwrap().requests();
    let signed: Vec<_> = signed.iter().filter(|line| line.contains("X-Amz-Signature")).collect();
    assert_eq!(signed.iter().filter(|line| line.starts_with("PUT")).count(), 3);
    assert_eq!(signed.iter().filter(|line| line.starts_with("GET")).count(), 3);
    let bearers = at.s3.as_ref().unwrap().bearers();
    assert_eq!(bearers, 0, "the store's server saw a bearer");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_that_cannot_reach_the_stores_own_server_goes_through_the_gateway() {
    let at = Place::s3().await.behind_proxy();
    let small = at.store.put_blob(noise(2, 10).into()).await.unwrap();
    at.proxy.as_ref().unwrap().shut_elsewhere();
    assert_eq!(at.store.get_blob(&small, 10).await.unwrap(), noise(2, 10));
    let (_dir, path) = weights(40);
    let blob = at.store.put_blob_file(&path).await.unwrap();
    assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), noise(1, 40 * MIB));
    let signed = at.s3.as_ref().unwrap().requests();
    assert!(!signed.iter().any(|line| line.contains("X-Amz-Signature")), "{signed:?}");
    assert!(at.proxy.as_ref().unwrap().requests().iter().any(|line| line.starts_with("PUT")));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_members_upload_is_out_of_reach() {
    let at = Place::file().await.behind_proxy();
    let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("{}/runs/raft-1/checkpoints/c0-s1-0123456789ab/w", at.store.url());
    let begin = http.post(format!("{url}?begin")).bearer_auth("box-1.trainer");
    let begun = begin.send().await.unwrap().text().await.unwrap();
    let id = begun.split('"').nth(3).unwrap().to_owned();
    let send = async |who: &str, url: &str| {
        let put = http.put(format!("{url}?upload={id}&part=0&offset=0")).bearer_auth(who);
        put.body("bytes").send().await.unwrap().status().as_u16()
    };
    assert_eq!(send("box-2.trainer", &url).await, 409);
    assert_eq!(send("box-1.trainer", &format!("{url}2")).await, 409);
    assert_eq!(send("box-1.trainer", &url).await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_transfers_than_there_is_room_for_wait_and_all_come_to_their_end() {
    let at = Place::file().await.behind_proxy();
    let blob = at.store.put_blob(noise(3, 4 * MIB).into()).await.unwrap();
    let fetches = (0..100).map(|_| {
        let (store, blob): (Store, v1::Blob) = (at.store.clone(), blob.clone());
        tokio::spawn(async move { store.get_blob(&blob, u64::MAX).await.unwrap().len() })
    });
    for fetch in fetches.collect::<Vec<_>>() {
        assert_eq!(fetch.await.unwrap(), 4 * MIB);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_error_and_no_debug_output_shows_a_bearer_or_a_signed_address() {
    let mut at = Place::s3().await.behind_proxy();
    let blob = at.store.put_blob(noise(3, 1000).into()).await.unwrap();
    let bearer = "box-1.trainer+operator";
    at.s3.as_mut().unwrap().kill();
    let fetch = at.store.get_blob(&blob, 1000);
    let waited = tokio::time::timeout(Duration::from_secs(3), fetch).await;
    assert!(waited.is_err(), "it waits for the store");
    at.s3.as_mut().unwrap().restart().unwrap();
    fs::remove_dir_all(at.dir.join("blobs")).unwrap();
    let error = at.store.get_blob(&blob, 1000).await.unwrap_err();
    let refused = at.as_seen_by("box-7.generator").put_blob(noise(4, 10).into()).await.unwrap_err();
    for said in [
        format_error_chain(&error),
        format!("{error:?}"),
        format!("{refused:?}"),
        format!("{:?}", at.store),
    ] {
        for secret in [bearer, "X-Amz", "test-secret-key"] {
            assert!(!said.contains(secret), "{said}");
        }
    }
}
