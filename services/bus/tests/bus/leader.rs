//! Electing a leader.

use std::time::Duration;

use bus::LeadershipHandle;
use tokio::time::{Instant, timeout};

use crate::rig::{PATIENCE, Rig, until};

const LEASE: Duration = Duration::from_secs(2);

async fn won(candidate: &mut LeadershipHandle) {
    let won = timeout(PATIENCE, candidate.wait_changed()).await.expect("nobody was elected");
    assert!(won);
}

#[tokio::test]
async fn one_of_two_leads_and_the_other_follows_a_crash_within_the_lease() {
    let (rig, bus) = Rig::start().await;
    let mut first = bus.campaign_for_leadership("a", LEASE);
    won(&mut first).await;
    let mut second = rig.bus("b").await.campaign_for_leadership("b", LEASE);
    assert!(timeout(LEASE * 2, second.wait_changed()).await.is_err(), "two lead");
    assert!(first.is_leader() && !second.is_leader());
    let epoch = first.current_epoch().unwrap();
    drop(first);
    let crashed = Instant::now();
    won(&mut second).await;
    assert!(crashed.elapsed() < LEASE * 2, "{:?}", crashed.elapsed());
    assert!(second.current_epoch().unwrap() > epoch);
}

#[tokio::test]
async fn a_leader_that_stops_in_order_is_followed_at_once() {
    let (rig, bus) = Rig::start().await;
    let lease = Duration::from_secs(60);
    let mut first = bus.campaign_for_leadership("a", lease);
    won(&mut first).await;
    let mut second = rig.bus("b").await.campaign_for_leadership("b", lease);
    assert!(timeout(Duration::from_millis(300), second.wait_changed()).await.is_err());
    let released = Instant::now();
    first.release_leadership().await;
    won(&mut second).await;
    assert!(released.elapsed() < Duration::from_secs(3), "{:?}", released.elapsed());
}

#[tokio::test]
async fn a_leader_keeps_its_term_over_a_restart_and_steps_down_without_a_server() {
    let (mut rig, bus) = Rig::start().await;
    let mut leader = bus.campaign_for_leadership("a", LEASE);
    won(&mut leader).await;
    let epoch = leader.current_epoch();
    rig.kill_and_restart().await;
    assert!(timeout(LEASE * 2, leader.wait_changed()).await.is_err(), "a restart cost the term");
    assert_eq!(leader.current_epoch(), epoch);
    rig.kill().await;
    until("the leader stepped down", async || !leader.is_leader()).await;
    assert!(!timeout(PATIENCE, leader.wait_changed()).await.unwrap());
}

#[tokio::test]
async fn everyone_sees_who_leads_and_that_a_crashed_or_released_leader_does_not() {
    let (rig, bus) = Rig::start().await;
    let reader = rig.bus("reader").await;
    assert_eq!(reader.find_leader().await.unwrap(), None, "none has ever led");
    let mut first = bus.campaign_for_leadership("a", LEASE);
    won(&mut first).await;
    assert_eq!(reader.find_leader().await.unwrap().as_deref(), Some("a"));
    drop(first);
    assert_eq!(reader.find_leader().await.unwrap(), None, "its claim is not renewed");
    let mut second = bus.campaign_for_leadership("b", LEASE);
    won(&mut second).await;
    assert_eq!(reader.find_leader().await.unwrap().as_deref(), Some("b"));
    second.release_leadership().await;
    assert_eq!(reader.find_leader().await.unwrap(), None, "it was released");
}
