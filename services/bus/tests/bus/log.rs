//! Writing once, reading back, following.

use std::time::{Duration, Instant};

use bus::{AckDurability, Bus, LogEvent, PublishError, PublishOutcome, ReadError};
use futures::{StreamExt, future::join_all, stream::BoxStream};
use tokio::time::{sleep, timeout};
use wire::{FactBody, v1};

use crate::rig::{PATIENCE, Rig, control};

type Follower = BoxStream<'static, Result<LogEvent, ReadError>>;

async fn next(follower: &mut Follower) -> LogEvent {
    timeout(PATIENCE, follower.next()).await.expect("nothing followed").unwrap().unwrap()
}

async fn next_sequence(follower: &mut Follower) -> u64 {
    match next(follower).await {
        LogEvent::Record(record) => record.sequence,
        other => panic!("{other:?} is no record"),
    }
}

async fn all(bus: &Bus) -> Vec<wire::Record> {
    let mut follower = bus.follow_facts(vec![], 0);
    let mut records = Vec::new();
    loop {
        match next(&mut follower).await {
            LogEvent::Record(record) => records.push(record),
            LogEvent::CaughtUp => return records,
            other => panic!("{other:?}"),
        }
    }
}

/// Shorter than the time after which the server deletes the consumer by itself.
const GIVEN_BACK: Duration = Duration::from_secs(10);

#[tokio::test]
async fn who_stops_reading_leaves_nothing_at_the_server() {
    let (rig, bus) = Rig::start().await;
    bus.publish_fact(&control(1, "one")).await.unwrap();
    for _ in 0..20 {
        assert_eq!(all(&bus).await.len(), 1);
    }
    let still_reading = {
        let mut follower = bus.follow_facts(vec![], 0);
        next(&mut follower).await;
        follower
    };
    let mut stream = rig.raw().await.get_stream(bus::LOG_STREAM).await.unwrap();
    let only_one = async {
        while stream.info().await.unwrap().state.consumer_count != 1 {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(GIVEN_BACK, only_one).await.expect("readers that are gone have consumers");
    drop(still_reading);
}

/// More than the messages that a reader requests at a time.
const FACTS: u64 = 600;

#[tokio::test]
async fn a_follower_has_each_fact_at_once_however_many_it_has_read() {
    let (_rig, bus) = Rig::start().await;
    let mut follower = bus.follow_facts(vec![], 0);
    assert!(matches!(next(&mut follower).await, LogEvent::CaughtUp));
    for number in 1..=FACTS {
        bus.publish_fact(&control(number, "one by one")).await.unwrap();
        assert_eq!(next_sequence(&mut follower).await, number);
    }
}

#[tokio::test]
async fn of_sixteen_writers_of_one_subject_one_wins() {
    let (rig, bus) = Rig::start().await;
    let buses = join_all((0..16).map(|_| rig.bus("racer")));
    let results = join_all(buses.await.into_iter().enumerate().map(|(n, bus)| async move {
        let reason = if n % 2 == 0 { "even" } else { "odd" };
        (reason, bus.publish_fact(&control(1, reason)).await.unwrap())
    }))
    .await;
    let winners: Vec<&str> = results
        .iter()
        .filter(|(_, published)| matches!(published, PublishOutcome::New { .. }))
        .map(|(reason, _)| *reason)
        .collect();
    assert_eq!(winners.len(), 1, "{results:?}");
    for (reason, published) in results {
        if let PublishOutcome::AlreadyWritten { sequence, same } = published {
            assert_eq!((sequence, same), (1, reason == winners[0]));
        }
    }
    assert_eq!(all(&bus).await.len(), 1);
}

#[tokio::test]
async fn what_was_acknowledged_survives_kills_of_the_server_and_is_there_once() {
    let (mut rig, bus) = Rig::start().await;
    let writer = tokio::spawn({
        let bus = bus.clone();
        async move {
            for n in 1..=400 {
                let published = bus.publish_fact(&control(n, "x")).await.unwrap();
                assert!(matches!(published, PublishOutcome::New { .. }), "{n}: {published:?}");
            }
        }
    });
    for target in [100, 200] {
        crate::rig::until("the writer is on its way", async || {
            bus.last_sequence().await.unwrap() > target
        })
        .await;
        rig.kill_and_restart().await;
    }
    timeout(PATIENCE, writer).await.unwrap().unwrap();
    let numbers: Vec<String> =
        all(&bus).await.iter().map(|record| record.fact.subject.to_string()).collect();
    let expected: Vec<String> = (1..=400).map(|n| format!("flotilla.r1.control.{n}")).collect();
    assert_eq!(numbers, expected);
}

#[tokio::test]
async fn a_follower_sees_everything_in_order_over_a_restart() {
    let (mut rig, bus) = Rig::start().await;
    for n in 1..=600 {
        bus.publish_fact(&control(n, "x")).await.unwrap();
    }
    let mut follower = bus.follow_facts(vec!["flotilla.*.control.*".into()], 100);
    for n in 101..=300 {
        assert_eq!(next_sequence(&mut follower).await, n);
    }
    rig.kill_and_restart().await;
    for n in 301..=600 {
        assert_eq!(next_sequence(&mut follower).await, n);
    }
    assert!(matches!(next(&mut follower).await, LogEvent::CaughtUp));
    bus.publish_fact(&control(601, "x")).await.unwrap();
    assert_eq!(next_sequence(&mut follower).await, 601, "and CaughtUp only once");
    rig.kill_and_restart().await;
    bus.publish_fact(&control(602, "x")).await.unwrap();
    assert_eq!(next_sequence(&mut follower).await, 602);
}

#[tokio::test]
async fn a_follower_of_an_empty_log_is_caught_up_and_waits() {
    let (_rig, bus) = Rig::start().await;
    let mut follower = bus.follow_facts(vec!["flotilla.r2.>".into()], 0);
    assert!(matches!(next(&mut follower).await, LogEvent::CaughtUp));
    bus.publish_fact(&control(1, "of another run")).await.unwrap();
    let mut done = control(1, "x");
    done.subject = "flotilla.r2.done".parse().unwrap();
    done.body = FactBody::Done(v1::Done::default());
    bus.publish_fact(&done).await.unwrap();
    assert_eq!(next_sequence(&mut follower).await, 2);
}

#[tokio::test]
async fn an_entry_that_does_not_parse_is_shown_and_passed() {
    let (rig, bus) = Rig::start().await;
    let raw = rig.raw().await;
    raw.publish("flotilla.r1.control.1", "{".into()).await.unwrap().await.unwrap();
    bus.publish_fact(&control(2, "x")).await.unwrap();
    let mut follower = bus.follow_facts(vec![], 0);
    match next(&mut follower).await {
        LogEvent::Unreadable { sequence: 1, subject, .. } => {
            assert_eq!(subject, "flotilla.r1.control.1");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(next_sequence(&mut follower).await, 2);
    let error = bus.get_fact("flotilla.r1.control.1").await.unwrap_err();
    assert!(matches!(error, ReadError::Unreadable { sequence: 1, .. }), "{error}");
}

#[tokio::test]
async fn the_last_fact_of_a_pattern_is_read_back_as_written() {
    let (_rig, bus) = Rig::start().await;
    assert_eq!(bus.get_fact("flotilla.r1.>").await.unwrap(), None);
    assert_eq!(bus.last_sequence().await.unwrap(), 0);
    for n in [1, 2] {
        bus.publish_fact(&control(n, "because")).await.unwrap();
    }
    let record = bus.get_fact("flotilla.r1.control.*").await.unwrap().unwrap();
    assert_eq!((record.sequence, &record.fact), (2, &control(2, "because")));
    assert!(record.time_ms > 1_700_000_000_000);
    assert_eq!(bus.last_sequence().await.unwrap(), 2);
}

#[tokio::test]
async fn a_follower_notices_a_log_that_lost_facts() {
    let (_rig, bus) = Rig::start().await;
    bus.publish_fact(&control(1, "x")).await.unwrap();
    let error = bus.follow_facts(vec![], 9).next().await.unwrap().unwrap_err();
    assert!(matches!(error, ReadError::Truncated { after: 9, last: 1 }), "{error}");
}

#[tokio::test]
async fn a_fact_that_is_too_large_is_refused_before_it_is_sent() {
    let (_rig, bus) = Rig::start().await;
    let limit = bus.max_fact_bytes();
    assert!(limit > 7 << 20, "the managed server takes big jobs");
    bus.publish_fact(&control(1, &"x".repeat(limit - 100))).await.unwrap();
    let error = bus.publish_fact(&control(2, &"x".repeat(limit))).await.unwrap_err();
    assert!(matches!(error, PublishError::TooLarge { .. }));
    assert!(error.to_string().contains("raise the nats-server"), "{error}");
}

#[tokio::test]
async fn big_facts_are_followed_without_drowning() {
    let (_rig, bus) = Rig::start().await;
    let big = "x".repeat(bus.max_fact_bytes() - 100);
    for n in 1..=10 {
        bus.publish_fact(&control(n, &big)).await.unwrap();
    }
    assert_eq!(all(&bus).await.len(), 10);
}

#[tokio::test]
async fn preparing_twice_changes_nothing_and_the_managed_server_is_durable() {
    let rig = Rig::bare().await;
    let bus = rig.bus("test").await;
    let error = bus.last_sequence().await.unwrap_err();
    assert!(matches!(error, ReadError::NoStream { .. }), "{error}");
    let first = bus.prepare_log(1).await.unwrap();
    assert_eq!((first.durability, first.replicas), (AckDurability::Always, 1));
    bus.publish_fact(&control(1, "x")).await.unwrap();
    assert_eq!(bus.prepare_log(1).await.unwrap().last_sequence, 1);
}

/// Prints what one fact costs; run with `--run-ignored only --no-capture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn latencies() {
    let (_rig, bus) = Rig::start().await;
    let pool = wire::Pool::new("default").unwrap();
    let mut queue = bus
        .join_work_queue(wire::WorkKind::Generate, &pool, Duration::from_secs(30))
        .await
        .unwrap();
    let (mut publish, mut take, mut ack) = (vec![], vec![], vec![]);
    for n in 0..500 {
        let worker = tokio::spawn(async move {
            let delivery = queue.next(PATIENCE).await.unwrap().unwrap();
            (queue, delivery, Instant::now())
        });
        tokio::time::sleep(Duration::from_millis(2)).await;
        let start = Instant::now();
        bus.publish_fact(&crate::rig::order(n)).await.unwrap();
        publish.push(start.elapsed());
        let (returned, delivery, taken) = worker.await.unwrap();
        take.push(taken - start);
        let start = Instant::now();
        delivery.ack().await.unwrap();
        ack.push(start.elapsed());
        queue = returned;
    }
    for (what, mut times) in [("publish", publish), ("publish to next", take), ("ack", ack)] {
        times.sort();
        println!("{what}: p50 {:?} p99 {:?}", times[250], times[495]);
    }
    let start = Instant::now();
    let records = all(&bus).await.len();
    println!("follow: {records} in {:?}", start.elapsed());
}
