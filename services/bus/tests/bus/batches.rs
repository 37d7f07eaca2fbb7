//! Publishing several facts at once.

use bus::{PublishError, PublishOutcome};
use wire::Fact;

use crate::rig::{Rig, control};

fn facts(numbers: std::ops::RangeInclusive<u64>) -> Vec<Fact> {
    numbers.map(|number| control(number, "batch")).collect()
}

#[tokio::test]
async fn what_is_written_at_once_is_there_in_its_order_and_once() {
    let (_rig, bus) = Rig::start().await;
    let facts = facts(1..=600);
    let published = bus.publish_all(&facts).await.unwrap();
    let new = (1..=600).map(|sequence| PublishOutcome::New { sequence });
    assert_eq!(published, new.collect::<Vec<_>>(), "more than one batch holds");
    let again = bus.publish_all(&facts).await.unwrap();
    let there = (1..=600).map(|sequence| PublishOutcome::AlreadyWritten { sequence, same: true });
    assert_eq!(again, there.collect::<Vec<_>>());
    assert_eq!(bus.last_sequence().await.unwrap(), 600);
    for (sequence, fact) in (1..).zip(&facts) {
        let found = bus.get_fact(&fact.subject.to_string()).await.unwrap().unwrap();
        assert_eq!((found.sequence, &found.fact), (sequence, fact));
    }
}

#[tokio::test]
async fn a_batch_of_which_somebody_wrote_one_loses_nothing_of_the_others() {
    let (rig, bus) = Rig::start().await;
    rig.bus("other").await.publish_fact(&control(3, "first")).await.unwrap();
    let published = bus.publish_all(&facts(1..=5)).await.unwrap();
    assert_eq!(published[2], PublishOutcome::AlreadyWritten { sequence: 1, same: false });
    let mut others: Vec<u64> =
        [0, 1, 3, 4].map(|at: usize| published[at]).map(PublishOutcome::log_sequence).to_vec();
    others.sort_unstable();
    assert_eq!(others, [2, 3, 4, 5]);
}

#[tokio::test]
async fn a_log_that_takes_no_batches_is_written_one_by_one() {
    let (rig, bus) = Rig::start().await;
    // Configured as by a server before 2.12.
    let context = rig.raw().await;
    let mut stream = context.get_stream(bus::LOG_STREAM).await.unwrap();
    let config = stream.info().await.unwrap().config.clone();
    assert!(config.allow_atomic_publish, "prepared without");
    let without =
        async_nats::jetstream::stream::Config { allow_atomic_publish: false, ..config.clone() };
    context.update_stream(&without).await.unwrap();
    assert_eq!(bus.publish_all(&facts(1..=9)).await.unwrap().len(), 9);
    assert_eq!(bus.last_sequence().await.unwrap(), 9);
    // A client that has seen batches accepted, on a log that no longer accepts them.
    let late = rig.bus("late").await;
    context.update_stream(&config).await.unwrap();
    late.publish_all(&facts(11..=12)).await.unwrap();
    context.update_stream(&without).await.unwrap();
    late.publish_all(&facts(13..=19)).await.unwrap();
    assert_eq!(bus.last_sequence().await.unwrap(), 18);
}

#[tokio::test]
async fn one_fact_that_is_too_large_keeps_the_others_out() {
    let (_rig, bus) = Rig::start().await;
    let large = control(2, &"x".repeat(9 << 20));
    let refused = bus.publish_all(&[control(1, "small"), large]).await;
    assert!(matches!(refused, Err(PublishError::TooLarge { .. })), "{refused:?}");
    assert_eq!(bus.last_sequence().await.unwrap(), 0);
}
