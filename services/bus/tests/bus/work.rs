//! Handing work to agents.

use std::time::Duration;

use bus::{Bus, Delivery, WorkQueue};
use tokio::time::{Instant, sleep, timeout};
use wire::{FactBody, Pool, WorkKind};

use crate::rig::{PATIENCE, Rig, order};

const LONG: Duration = Duration::from_secs(30);

async fn queue(bus: &Bus, lease: Duration) -> WorkQueue {
    bus.join_work_queue(WorkKind::Generate, &Pool::new("default").unwrap(), lease).await.unwrap()
}

async fn take(queue: &mut WorkQueue) -> Delivery {
    timeout(PATIENCE, queue.next(PATIENCE)).await.unwrap().unwrap().expect("no work came")
}

fn job(delivery: &Delivery) -> String {
    match &delivery.record.as_ref().unwrap().fact.body {
        FactBody::GenerateOrder(order) => order.job.clone(),
        other => panic!("{other:?} is no order"),
    }
}

#[tokio::test]
async fn one_order_goes_to_one_of_two_agents_and_an_acknowledged_one_to_nobody() {
    let (rig, bus) = Rig::start().await;
    let other = rig.bus("other").await;
    let (mut a, mut b) =
        (queue(&bus, Duration::from_secs(1)).await, queue(&other, Duration::from_secs(1)).await);
    bus.publish_fact(&order(1)).await.unwrap();
    let wait = Duration::from_millis(500);
    let (one, two) = tokio::join!(a.next(wait), b.next(wait));
    let mut got: Vec<Delivery> = [one.unwrap(), two.unwrap()].into_iter().flatten().collect();
    assert_eq!(got.len(), 1);
    let delivery = got.remove(0);
    assert_eq!((job(&delivery).as_str(), delivery.delivered, delivery.sequence), ("j1", 1, 1));
    delivery.ack().await.unwrap();
    assert!(a.next(Duration::from_millis(1500)).await.unwrap().is_none());
}

#[tokio::test]
async fn leased_facts_of_a_queue_are_counted_for_all_agents() {
    let (rig, bus) = Rig::start().await;
    let other = rig.bus("other").await;
    let (mut a, mut b) = (queue(&bus, LONG).await, queue(&other, LONG).await);
    for number in 1..=3 {
        bus.publish_fact(&order(number)).await.unwrap();
    }
    let (first, second) = (take(&mut a).await, take(&mut b).await);
    assert_eq!(first.count_leased_facts().await.unwrap(), 2);
    second.ack().await.unwrap();
    assert_eq!(first.count_leased_facts().await.unwrap(), 1);
}

#[tokio::test]
async fn waiting_wakes_as_soon_as_an_order_is_written() {
    let (_rig, bus) = Rig::start().await;
    let mut work = queue(&bus, LONG).await;
    let waiting = tokio::spawn(async move { (take(&mut work).await, Instant::now()) });
    // Longer than two heartbeats: a lost wake-up would show.
    sleep(Duration::from_millis(4500)).await;
    bus.publish_fact(&order(1)).await.unwrap();
    let published = Instant::now();
    let (delivery, taken) = waiting.await.unwrap();
    assert_eq!(job(&delivery), "j1");
    let late = taken.saturating_duration_since(published);
    assert!(late < Duration::from_millis(500), "it took {late:?}");
}

#[tokio::test]
async fn a_lease_that_ends_gives_the_order_to_another_and_progress_keeps_it() {
    let (_rig, bus) = Rig::start().await;
    let lease = Duration::from_millis(800);
    let (mut a, mut b) = (queue(&bus, lease).await, queue(&bus, lease).await);
    bus.publish_fact(&order(1)).await.unwrap();
    let held = take(&mut a).await;
    let kept_until = Instant::now() + lease * 3;
    while Instant::now() < kept_until {
        held.renew_lease().await.unwrap();
        assert!(b.next(lease / 4).await.unwrap().is_none(), "it was taken from a live agent");
    }
    drop(held);
    let again = take(&mut b).await;
    assert_eq!((job(&again).as_str(), again.delivered), ("j1", 2));
    again.ack().await.unwrap();
}

#[tokio::test]
async fn an_order_handed_back_comes_again_after_the_delay() {
    let (_rig, bus) = Rig::start().await;
    let mut work = queue(&bus, LONG).await;
    bus.publish_fact(&order(1)).await.unwrap();
    let first = take(&mut work).await;
    first.nak(Duration::from_millis(600)).await.unwrap();
    let handed_back = Instant::now();
    let second = take(&mut work).await;
    assert_eq!(second.delivered, 2);
    assert!(handed_back.elapsed() >= Duration::from_millis(500), "{:?}", handed_back.elapsed());
}

#[tokio::test]
async fn an_order_that_does_not_parse_is_delivered_as_an_error() {
    let (rig, bus) = Rig::start().await;
    let mut work = queue(&bus, LONG).await;
    let subject = "flotilla.r1.order.generate.default.1.j1.1";
    rig.raw().await.publish(subject, "no json".into()).await.unwrap().await.unwrap();
    let delivery = take(&mut work).await;
    assert_eq!(delivery.subject, subject);
    assert!(delivery.record.is_err());
    delivery.ack().await.unwrap();
}

#[tokio::test]
async fn work_goes_on_over_a_killed_server_and_a_deleted_consumer() {
    let (mut rig, bus) = Rig::start().await;
    let mut work = queue(&bus, Duration::from_secs(2)).await;
    bus.publish_fact(&order(1)).await.unwrap();
    let held = take(&mut work).await;
    let waiting = tokio::spawn(async move { (take(&mut work).await, work) });
    rig.kill_and_restart().await;
    held.ack().await.unwrap();
    bus.publish_fact(&order(2)).await.unwrap();
    let (mut delivery, mut work) = waiting.await.unwrap();
    if job(&delivery) == "j1" {
        // The killed server had not persisted this delivery.
        delivery.ack().await.unwrap();
        delivery = take(&mut work).await;
    }
    assert_eq!(job(&delivery), "j2");
    delivery.ack().await.unwrap();
    let stream = rig.raw().await.get_stream(bus::LOG_STREAM).await.unwrap();
    stream.delete_consumer(work.consumer_name()).await.unwrap();
    assert_eq!(job(&take(&mut work).await), "j1", "a new consumer begins at the beginning");
}

#[tokio::test]
async fn a_cancelled_wait_loses_nothing_and_a_dropped_queue_gives_back() {
    let (_rig, bus) = Rig::start().await;
    let (mut a, mut b) = (queue(&bus, LONG).await, queue(&bus, LONG).await);
    assert!(timeout(Duration::from_millis(100), a.next(LONG)).await.is_err());
    bus.publish_fact(&order(1)).await.unwrap();
    let first = take(&mut a).await;
    assert_eq!((job(&first).as_str(), first.delivered), ("j1", 1));
    assert!(timeout(Duration::from_millis(100), a.next(LONG)).await.is_err());
    bus.publish_fact(&order(2)).await.unwrap();
    drop(a);
    assert_eq!(job(&take(&mut b).await), "j2", "it waits for the lease of a queue that is gone");
}

#[tokio::test]
async fn an_unreachable_bus_is_an_error_and_not_an_empty_queue() {
    let (rig, bus) = Rig::start().await;
    let mut work = queue(&bus, LONG).await;
    rig.kill().await;
    let error = work.next(Duration::from_secs(1)).await.unwrap_err();
    assert!(matches!(error, bus::WorkError::Unavailable { .. }), "{error:?}");
}
