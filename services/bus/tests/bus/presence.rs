//! Statuses, commands and the fleet's configuration.

use std::time::Duration;

use bus::PresenceError;
use futures::StreamExt;
use tokio::time::timeout;
use wire::{AgentId, v1};

use crate::rig::{PATIENCE, Rig, until};

fn status(agent: &str, jobs_done: u64) -> v1::AgentStatus {
    v1::AgentStatus { agent: agent.into(), jobs_done, ..Default::default() }
}

#[tokio::test]
async fn statuses_are_heard_live_and_kept_for_late_joiners() {
    let (rig, bus) = Rig::start().await;
    let late = rig.bus("late").await;
    let mut watched = late.watch_statuses().await.unwrap();
    // The subscription travels on another connection than the announcement.
    until("somebody listens", async || {
        bus.announce_status(&status("a1", 1)).await.unwrap();
        timeout(Duration::from_millis(50), watched.next()).await.is_ok()
    })
    .await;
    for (agent, jobs) in [("a1", 1), ("a2", 5), ("a1", 2)] {
        bus.record_status(&status(agent, jobs)).await.unwrap();
    }
    assert_eq!(late.list_statuses().await.unwrap(), [status("a1", 2), status("a2", 5)]);
    assert_eq!(bus.last_sequence().await.unwrap(), 0, "presence is no fact");
}

#[tokio::test]
async fn all_agents_are_listed_while_they_record_their_statuses() {
    let (rig, bus) = Rig::start().await;
    let agents = ["a1", "a2", "a3"];
    for agent in agents {
        bus.record_status(&status(agent, 0)).await.unwrap();
    }
    let busy = rig.bus("busy").await;
    let writing = tokio::spawn(async move {
        for jobs in 1.. {
            for agent in agents {
                busy.record_status(&status(agent, jobs)).await.unwrap();
            }
        }
    });
    for attempt in 0..100 {
        let listed = bus.list_statuses().await.unwrap();
        let names: Vec<&str> = listed.iter().map(|status| status.agent.as_str()).collect();
        assert_eq!(names, agents, "attempt {attempt}");
    }
    writing.abort();
}

#[tokio::test]
async fn some_of_those_who_are_there_are_found_in_a_fleet_of_any_size() {
    let (_rig, bus) = Rig::start().await;
    let names = |statuses: Vec<v1::AgentStatus>| -> Vec<String> {
        statuses.into_iter().map(|status| status.agent).collect()
    };
    for agent in ["a1", "a2", "a3"] {
        bus.record_status(&status(agent, 1)).await.unwrap();
    }
    let gone = v1::agent_status::State::Stopped.into();
    bus.record_status(&v1::AgentStatus { state: gone, ..status("a2", 1) }).await.unwrap();
    assert_eq!(names(bus.sample_recent_statuses(32, 5).await.unwrap()), ["a1", "a3"]);
    let one = |agent: &str| AgentId::new(agent).unwrap();
    assert_eq!(bus.read_recent_status(&one("a3")).await.unwrap(), Some(status("a3", 1)));
    for absent in ["a2", "nobody"] {
        assert_eq!(bus.read_recent_status(&one(absent)).await.unwrap(), None, "{absent}");
    }
    for agent in 0..60 {
        bus.record_status(&status(&format!("b{agent}"), 1)).await.unwrap();
    }
    for chance in [0, 7, 100, u64::MAX] {
        let found = names(bus.sample_recent_statuses(16, chance).await.unwrap());
        // The stopped agent may be among them, and is left out.
        assert!((15..=16).contains(&found.len()), "{chance}: {found:?}");
    }
}

#[tokio::test]
async fn a_command_is_confirmed_by_the_agent_it_names() {
    let (rig, bus) = Rig::start().await;
    let (agent, absent) = (AgentId::new("a1").unwrap(), AgentId::new("a2").unwrap());
    let mut commands = rig.bus("a1").await.receive_commands(&agent).await.unwrap();
    let command = v1::AgentCommand { action: v1::agent_command::Action::Drain.into() };
    let heard = tokio::spawn(async move { commands.next().await });
    until("the agent listens", async || bus.send_command(&agent, &command).await.is_ok()).await;
    assert_eq!(timeout(PATIENCE, heard).await.unwrap().unwrap(), Some(command));
    let error = bus.send_command(&absent, &command).await.unwrap_err();
    assert!(matches!(error, PresenceError::NotListening { .. }), "{error:?}");
}

#[tokio::test]
async fn the_fleets_configuration_is_kept() {
    let (mut rig, bus) = Rig::start().await;
    assert_eq!(bus.read_fleet_config().await.unwrap(), None);
    let config = v1::FleetConfig { store: "file:///x".into(), lease_s: 30.0, ..Default::default() };
    bus.write_fleet_config(&config).await.unwrap();
    rig.kill_and_restart().await;
    assert_eq!(bus.read_fleet_config().await.unwrap(), Some(config));
}
