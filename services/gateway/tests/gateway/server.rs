//! The server: health, reflection, port and end; and the fleet service.

use std::{
    net::{Ipv4Addr, TcpListener},
    time::Duration,
};

use bus::server::ManagedServer;
use futures::StreamExt;
use gateway::{Config, rpc::members_client::MembersClient};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::{v1 as reflection, v1alpha};
use wire::v1;

use crate::rig::{PATIENCE, Rig, next};

const SERVICES: [&str; 5] = [
    "flotilla.v1.Runs",
    "flotilla.v1.Evals",
    "flotilla.v1.Checkpoints",
    "flotilla.v1.Fleet",
    "flotilla.v1.Members",
];

async fn health(channel: &Channel, service: &str) -> Result<ServingStatus, tonic::Status> {
    let request = HealthCheckRequest { service: service.into() };
    Ok(HealthClient::new(channel.clone()).check(request).await?.into_inner().status())
}

/// Waits, as the services follow the bus with a short delay.
async fn becomes(channel: &Channel, service: &str, wanted: ServingStatus) {
    let deadline = Instant::now() + PATIENCE;
    while health(channel, service).await.ok() != Some(wanted) {
        assert!(Instant::now() < deadline, "{service:?} is not {wanted:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn health_follows_the_bus_and_calls_without_it_are_unavailable() {
    let mut rig = Rig::start().await;
    assert_eq!(health(&rig.channel, "").await.unwrap(), ServingStatus::Serving);
    for service in SERVICES {
        becomes(&rig.channel, service, ServingStatus::Serving).await;
    }
    let request = HealthCheckRequest { service: SERVICES[0].into() };
    let watched = HealthClient::new(rig.channel.clone()).watch(request).await.unwrap();
    let mut watched = watched.into_inner();
    let mut told = async || next(&mut watched).await.unwrap().unwrap().status();
    assert_eq!(told().await, ServingStatus::Serving);
    let again = timeout(Duration::from_millis(1200), told()).await;
    assert!(again.is_err(), "a status that did not change is not sent again");
    ManagedServer::stop(&mut rig.nats).await;
    // Otherwise the server of another test may get the port, and answer.
    let held_port = TcpListener::bind((Ipv4Addr::LOCALHOST, rig.nats.client_port())).unwrap();
    becomes(&rig.channel, "flotilla.v1.Runs", ServingStatus::NotServing).await;
    assert_eq!(told().await, ServingStatus::NotServing);
    assert_eq!(health(&rig.channel, "").await.unwrap(), ServingStatus::Serving);
    let status = rig.runs().list(v1::ListRunsRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    drop(held_port);
    rig.nats.restart().await.unwrap();
    becomes(&rig.channel, "flotilla.v1.Runs", ServingStatus::Serving).await;
    rig.runs().list(v1::ListRunsRequest {}).await.unwrap();
}

#[tokio::test]
async fn reflection_lists_and_describes_the_services_in_both_versions() {
    use reflection::server_reflection_request::MessageRequest;
    use reflection::server_reflection_response::MessageResponse;
    let rig = Rig::start().await;
    let ask = |question| reflection::ServerReflectionRequest {
        message_request: Some(question),
        ..Default::default()
    };
    let mut client =
        reflection::server_reflection_client::ServerReflectionClient::new(rig.channel.clone());
    let questions = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("flotilla.v1.Evals.Watch".into())),
        ask(MessageRequest::FileByFilename("google/protobuf/timestamp.proto".into())),
        ask(MessageRequest::FileContainingSymbol("grpc.health.v1.Health".into())),
    ];
    let questions = futures::stream::iter(questions);
    let mut answers = client.server_reflection_info(questions).await.unwrap().into_inner();
    let listed = next(&mut answers).await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(listed) = listed else { panic!("{listed:?}") };
    for service in SERVICES.into_iter().chain(["grpc.health.v1.Health"]) {
        assert!(listed.service.iter().any(|found| found.name == service), "no {service}");
    }
    while let Some(answer) = next(&mut answers).await.unwrap() {
        let answer = answer.message_response.unwrap();
        assert!(matches!(answer, MessageResponse::FileDescriptorResponse(_)), "{answer:?}");
    }

    let mut old =
        v1alpha::server_reflection_client::ServerReflectionClient::new(rig.channel.clone());
    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let list =
        v1alpha::ServerReflectionRequest { message_request: Some(list), ..Default::default() };
    let list = futures::stream::iter([list]);
    let mut answers = old.server_reflection_info(list).await.unwrap().into_inner();
    let answer = format!("{:?}", next(&mut answers).await.unwrap());
    assert!(answer.contains("flotilla.v1.Checkpoints"), "{answer}");
}

#[tokio::test]
async fn a_taken_port_is_one_clear_error() {
    let listen = "127.0.0.1:0".parse().unwrap();
    let first = gateway::bind_port(Config { listen, tls: None }).await.unwrap();
    let listen = first.local_address();
    let error = gateway::bind_port(Config { listen, tls: None }).await.unwrap_err().to_string();
    assert!(error.contains(&listen.to_string()) && error.contains("another port"), "{error}");
    let listen = "192.0.2.1:7000".parse().unwrap();
    let error = gateway::bind_port(Config { listen, tls: None }).await.unwrap_err().to_string();
    assert!(error.contains("192.0.2.1:7000") && error.contains("0.0.0.0"), "{error}");
}

#[tokio::test]
async fn stopping_ends_open_streams_at_once_and_everything_within_seconds() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let mut evals = rig.evals().watch(v1::WatchEvalsRequest::default()).await.unwrap().into_inner();
    let watch = v1::WatchRunRequest { run, after: 0 };
    let mut events = rig.runs().watch(watch).await.unwrap().into_inner();
    next(&mut events).await.unwrap().unwrap();
    let mut healthy = HealthClient::new(rig.channel.clone())
        .watch(HealthCheckRequest { service: String::new() })
        .await
        .unwrap()
        .into_inner();
    // A client that never closes its connection.
    let mut client =
        reflection::server_reflection_client::ServerReflectionClient::new(rig.channel.clone());
    let silent = futures::stream::pending().boxed();
    let mut held = client.server_reflection_info(silent).await.unwrap().into_inner();

    rig.stop.cancel();
    let stopped = Instant::now();
    for status in [next(&mut evals).await.unwrap_err(), next(&mut events).await.unwrap_err()] {
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(status.message().contains("stopping"), "{status}");
    }
    while let Ok(Some(_)) = next(&mut healthy).await {}
    assert!(stopped.elapsed() < Duration::from_secs(2), "{:?}", stopped.elapsed());
    let served = timeout(PATIENCE, rig.serving).await.unwrap().unwrap();
    served.unwrap();
    assert!(next(&mut held).await.is_err());
    assert!(Channel::from_shared(rig.url).unwrap().connect().await.is_err());
}

#[tokio::test]
async fn agents_are_listed_and_drained() {
    let rig = Rig::start().await;
    let agent = "box-1".parse().unwrap();
    let status =
        v1::AgentStatus { agent: "box-1".into(), host: "box".into(), ..Default::default() };
    rig.bus.record_status(&status).await.unwrap();
    let agents = rig.fleet().agents(v1::AgentsRequest {}).await.unwrap().into_inner().agents;
    assert_eq!(agents, [status]);

    let drain = || v1::DrainRequest { agent: "box-1".into() };
    let status = rig.fleet().drain(drain()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    let mut commands = rig.bus.receive_commands(&agent).await.unwrap();
    let (heard, drained) =
        tokio::join!(commands.next(), async { rig.fleet().drain(drain()).await });
    drained.unwrap();
    assert_eq!(heard.unwrap().action(), v1::agent_command::Action::Drain);
}

#[tokio::test]
async fn membership_calls_in_an_open_fleet_report_that_it_has_no_members() {
    let rig = Rig::start().await;
    let mut members = MembersClient::new(rig.channel.clone());
    let status = members.list_members(v1::ListMembersRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("flotilla init"), "{status}");
}

#[tokio::test]
async fn what_uploads_left_is_removed_when_the_gateway_starts() {
    let rig = Rig::start().await;
    let directory = rig.dir.path().join("another store");
    let tree = directory.join("runs/r-1/checkpoints/c0-s1-0123456789ab");
    std::fs::create_dir_all(&tree).unwrap();
    let [old, young] = ["manifest.json#0", "manifest.json#1"].map(|name| tree.join(name));
    for path in [&old, &young] {
        std::fs::write(path, [7; 4096]).unwrap();
    }
    let long_ago = std::time::SystemTime::now() - 2 * store::LEFTOVER_AGE;
    std::fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    let store = store::Store::open(&format!("file://{}", directory.display())).await.unwrap();
    let config = Config { listen: "127.0.0.1:0".parse().unwrap(), tls: None };
    let bound = gateway::bind_port(config).await.unwrap();
    let counts = bound.call_counts();
    let control = control::FleetControl::with_store(rig.bus.clone(), store);
    let serving = tokio::spawn(bound.serve_calls(control, rig.stop.clone()));
    let deadline = Instant::now() + PATIENCE;
    while counts.removed_leftovers().is_empty() {
        assert!(Instant::now() < deadline && !serving.is_finished(), "nothing was removed");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(counts.removed_leftovers(), store::UploadLeftovers { count: 1, bytes: 4096 });
    assert!(!old.exists() && young.exists());
}
