//! Unsuitable servers, run without the managed child.

use std::{net::TcpListener, process::Stdio, time::Duration};

use bus::{
    AckDurability, Bus, ConnectError, ConnectOptions, PrepareError, PublishError, RequestError,
    server::find_binary,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};

use crate::rig::{control, until};

struct Plain {
    _child: Child,
    _dir: TempDir,
    options: ConnectOptions,
}

/// Starts a nats-server with this configuration.
async fn plain(config: &str) -> Plain {
    let dir = TempDir::new().unwrap();
    let port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (client, monitor) = (port(), port());
    let store = dir.path().display();
    let config = config.replace("STORE", &format!("store_dir: \"{store}\""));
    let path = dir.path().join("conf");
    std::fs::write(
        &path,
        format!("listen: \"127.0.0.1:{client}\"\nhttp: \"127.0.0.1:{monitor}\"\n{config}"),
    )
    .unwrap();
    let child = Command::new(find_binary(None).await.expect("run deploy/fetch-nats-server.sh"))
        .arg("--config")
        .arg(path)
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    until("it listens", async || {
        tokio::net::TcpStream::connect(("127.0.0.1", client)).await.is_ok()
    })
    .await;
    let options = ConnectOptions {
        urls: vec![format!("nats://127.0.0.1:{client}")],
        monitor_urls: vec![format!("http://127.0.0.1:{monitor}")],
        ..Default::default()
    };
    Plain { _child: child, _dir: dir, options }
}

#[tokio::test]
async fn a_server_without_jetstream_is_refused() {
    let server = plain("").await;
    let error = Bus::connect(&server.options).await.unwrap_err();
    assert!(matches!(error, ConnectError::NoJetStream { .. }), "{error:?}");
    assert!(error.to_string().contains("-js"), "{error}");
}

#[tokio::test]
async fn a_server_that_flushes_late_is_told_apart() {
    let mut server = plain("jetstream { STORE }").await;
    let bus = Bus::connect(&server.options).await.unwrap();
    assert_eq!(bus.prepare_log(1).await.unwrap().durability, AckDurability::Lazy);
    server.options.monitor_urls.clear();
    let bus = Bus::connect(&server.options).await.unwrap();
    assert_eq!(bus.check_durability().await, AckDurability::Unknown);
}

/// Pretends to be a nats-server of this version that closes its first connection after a delay.
async fn pretended(version: &'static str, leaves_first_after: Duration) -> ConnectOptions {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut stays = leaves_first_after;
        while let Ok((mut stream, _)) = listener.accept().await {
            let served = async move {
                let info = format!(
                    r#"{{"server_id":"X","version":"{version}","headers":true,"proto":1,"max_payload":1048576}}"#
                );
                stream.write_all(format!("INFO {info}\r\n").as_bytes()).await.unwrap();
                let mut seen = [0; 4096];
                while stream.read(&mut seen).await.is_ok_and(|read| read > 0) {
                    stream.write_all(b"PONG\r\n").await.unwrap();
                }
            };
            tokio::spawn(tokio::time::timeout(stays, served));
            stays = Duration::MAX;
        }
    });
    ConnectOptions { urls: vec![format!("nats://{address}")], ..Default::default() }
}

#[test]
fn a_server_that_is_lost_before_it_was_looked_at_holds_nobody_up() {
    let (told, heard) = std::sync::mpsc::channel();
    // The thread is leaked if it hangs.
    std::thread::spawn(move || {
        let one = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let connected = one.block_on(async {
            let options = pretended("2.12.0", Duration::from_millis(500)).await;
            Bus::connect(&options).await.map(|_| ())
        });
        told.send(connected)
    });
    let error = heard.recv_timeout(Duration::from_secs(20)).expect("an answer").unwrap_err();
    assert!(matches!(error, ConnectError::Account { .. }), "{error:?}");
}

#[tokio::test]
async fn a_server_of_an_older_version_is_refused() {
    let options = pretended("2.10.9", Duration::MAX).await;
    let error = Bus::connect(&options).await.unwrap_err();
    assert!(matches!(&error, ConnectError::TooOld { found, .. } if found == "2.10.9"), "{error:?}");
}

#[tokio::test]
async fn nobody_there_is_said_at_once() {
    let options = ConnectOptions { urls: vec!["nats://127.0.0.1:1".into()], ..Default::default() };
    let error = Bus::connect(&options).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
    let error = Bus::connect(&ConnectOptions::default()).await.unwrap_err();
    assert!(matches!(error, ConnectError::NoUrl), "{error:?}");
}

#[tokio::test]
async fn a_denied_permission_is_named_and_not_a_timeout() {
    let server = plain(
        r#"jetstream { STORE }
           authorization { users: [{ user: u, password: p, permissions: {
             publish: { deny: ["flotilla.>", "$JS.API.STREAM.CREATE.KV_FLOTILLA_FLEET"] } } }] }"#,
    )
    .await;
    let wrong = Bus::connect(&server.options).await.unwrap_err();
    assert!(matches!(wrong, ConnectError::Refused { .. }), "{wrong:?}");
    let mut options = server.options.clone();
    options.urls[0] = server.options.urls[0].replace("nats://", "nats://u:wrong@");
    let wrong = Bus::connect(&options).await.unwrap_err().to_string();
    assert!(wrong.contains("refused these credentials") && !wrong.contains("wrong"), "{wrong}");
    options.urls[0] = server.options.urls[0].replace("nats://", "nats://u:p@");
    let bus = Bus::connect(&options).await.unwrap();
    let error = bus.prepare_log(1).await.unwrap_err();
    let PrepareError::Request { stream, source } = error else { panic!("{error:?}") };
    assert_eq!(stream, "KV_FLOTILLA_FLEET");
    assert!(matches!(source, RequestError::Denied { .. }), "{source:?}");
    let error = bus.publish_fact(&control(1, "x")).await.unwrap_err();
    let PublishError::Refused { source, .. } = error else { panic!("{error:?}") };
    assert!(source.to_string().contains("flotilla.r1.control.1"), "{source}");
}

#[tokio::test]
async fn a_stream_that_somebody_else_made_is_not_taken_over() {
    let server = plain("jetstream { STORE }").await;
    let raw = async_nats::connect(&server.options.urls[0]).await.unwrap();
    async_nats::jetstream::new(raw)
        .create_stream(async_nats::jetstream::stream::Config {
            name: bus::LOG_STREAM.into(),
            subjects: vec!["flotilla.>".into()],
            storage: async_nats::jetstream::stream::StorageType::Memory,
            ..Default::default()
        })
        .await
        .unwrap();
    let error = Bus::connect(&server.options).await.unwrap().prepare_log(1).await.unwrap_err();
    assert!(
        matches!(error, PrepareError::IncompatibleSetting { field: "storage", .. }),
        "{error:?}"
    );
}
