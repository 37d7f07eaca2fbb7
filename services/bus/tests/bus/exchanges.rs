//! Kept requests to served models expire.

use async_nats::HeaderMap;
use bus::{EXCHANGES_STREAM, ExchangePart};
use wire::RunId;

use crate::rig::{Rig, until};

#[tokio::test]
async fn a_kept_request_expires_after_its_days_and_no_other_one_does() {
    let (rig, bus) = Rig::start().await;
    bus.prepare_exchanges(1).await.unwrap();
    let stable = RunId::new("stable").unwrap();
    let write = async |days| {
        bus.write_exchange(&stable, "later", ExchangePart::Answer, "b".into(), days).await.unwrap();
    };
    write(30).await;
    write(1).await;

    let raw = rig.raw().await;
    let stream = raw.get_stream(EXCHANGES_STREAM).await.unwrap();
    let subject = "flotilla-serving.kept.stable.later.answer";
    let kept = stream.get_last_raw_message_by_subject(subject).await.unwrap();
    let lifetime = kept.headers.get("Nats-TTL").unwrap();
    assert_eq!(lifetime.as_str(), "2592000s", "30 days; written once");

    // The bus counts in days: this one has the shortest time that a server knows.
    let mut headers = HeaderMap::new();
    headers.insert("Nats-TTL", "1s");
    let subject = "flotilla-serving.kept.stable.now.answer";
    raw.publish_with_headers(subject, headers, "a".into()).await.unwrap().await.unwrap();
    let read = async |exchange: &str| {
        bus.read_exchange(&stable, exchange, ExchangePart::Answer).await.unwrap()
    };
    until("the request has expired", async || read("now").await.is_none()).await;
    assert_eq!(read("later").await.as_deref(), Some(&b"b"[..]));
    let listed = bus.list_exchanges(&stable, 0).await.unwrap();
    let listed: Vec<&str> = listed.iter().map(|message| message.exchange.as_str()).collect();
    assert_eq!(listed, ["later"]);
}
