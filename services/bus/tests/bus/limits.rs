//! Removal of archived facts, and a full log.

use bus::{LogLimit, PublishError, PublishOutcome};
use wire::{FactKey, RunId};

use crate::rig::{Rig, control, order};

#[tokio::test]
async fn only_the_bulky_facts_of_one_cycle_are_let_go_up_to_a_position() {
    let (rig, bus) = Rig::start().await;
    bus.publish_fact(&control(1, "stays")).await.unwrap();
    let mut last = 0;
    for job in 1..=3 {
        last = bus.publish_fact(&order(job)).await.unwrap().log_sequence();
    }
    let late = bus.publish_fact(&order(4)).await.unwrap().log_sequence();
    let mut other = order(5);
    other.subject = "flotilla.r1.order.generate.default.2.j5.1".parse().unwrap();
    bus.publish_fact(&other).await.unwrap();
    let run = RunId::new("r1").unwrap();
    assert_eq!(bus.purge_cycle(&run, 1, last).await.unwrap(), 3);
    assert_eq!(bus.purge_cycle(&run, 1, last).await.unwrap(), 0, "repeating it is harmless");
    let there = async |subject: &str| bus.get_fact(subject).await.unwrap().map(|r| r.sequence);
    assert_eq!(there("flotilla.r1.order.generate.default.1.*.*").await, Some(late));
    assert!(there("flotilla.r1.control.1").await.is_some());
    assert!(there(&FactKey::bulky_filters(&run, 2)[0]).await.is_some());
    let lost = bus.find_lost_entries().await.unwrap();
    assert_eq!((lost.count, lost.sequences), (3, vec![2, 3, 4]));
    drop(rig);
}

#[tokio::test]
async fn a_full_log_refuses_new_facts_loses_none_and_goes_on_when_it_may_take_more() {
    let rig = Rig::bare().await;
    let bus = rig.bus("test").await;
    let limit = |bytes| LogLimit { update_to: Some(bytes), at_creation: Some(1 << 40) };
    bus.prepare_log_within(1, limit(64 << 10)).await.unwrap();
    assert_eq!(bus.log_usage().await.unwrap().limit, Some(64 << 10));
    let text = "x".repeat(4096);
    let mut written = 0;
    let error = loop {
        match bus.publish_fact(&control(written + 1, &text)).await {
            Ok(_) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 64, "the log has no bound");
    };
    assert!(matches!(error, PublishError::Full { .. }), "{error:?}");
    assert!(error.to_string().contains("--log-max-gib"), "{error}");
    let usage = bus.log_usage().await.unwrap();
    assert_eq!(usage.facts, written);
    assert!(usage.bytes <= 64 << 10, "{usage:?}");
    // Without a limit in the call, the earlier one stays.
    bus.prepare_log_within(1, LogLimit { update_to: None, at_creation: Some(1 << 40) })
        .await
        .unwrap();
    assert_eq!(bus.log_usage().await.unwrap().limit, Some(64 << 10));
    bus.prepare_log_within(1, limit(128 << 10)).await.unwrap();
    let more = bus.publish_fact(&control(written + 1, &text)).await.unwrap();
    assert!(matches!(more, PublishOutcome::New { .. }), "{more:?}");
}

/// Subjects of a member that does not wait for acknowledgements.
const FLOOD: u64 = 300_000;

#[tokio::test(flavor = "multi_thread")]
async fn facts_are_written_while_a_member_floods_the_log() {
    let (rig, bus) = Rig::start().await;
    let flooder = rig.raw().await.client();
    let flood = async {
        for number in 0..FLOOD {
            let subject = format!("flotilla.r2.control.{number}");
            flooder.publish(subject, "{}".into()).await.unwrap();
        }
        flooder.flush().await.unwrap();
    };
    let honest = async {
        for number in 1..=50 {
            bus.publish_fact(&control(number, "honest")).await.unwrap();
        }
    };
    tokio::join!(flood, honest);
    let stored = bus.log_usage().await.unwrap().facts;
    assert!(stored < FLOOD, "{stored}: the queue in front of the disk has no bound");
    assert!(bus.get_fact("flotilla.r1.control.50").await.unwrap().is_some());
}
