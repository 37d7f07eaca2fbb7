//! The gRPC health service. The process as a whole (`""`) is serving as long as it answers; the
//! services are serving while the bus is connected, because all of them need it.

use std::time::Duration;

use bus::Bus;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic_health::{
    ServingStatus,
    pb::health_server::{Health, HealthServer},
    server::{HealthReporter, health_reporter},
};

use crate::rpc::{checkpoints_server, evals_server, fleet_server, members_server, runs_server};

/// The services whose health depends on the bus.
const SERVICES: [&str; 5] = [
    runs_server::SERVICE_NAME,
    evals_server::SERVICE_NAME,
    checkpoints_server::SERVICE_NAME,
    fleet_server::SERVICE_NAME,
    members_server::SERVICE_NAME,
];
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) fn health_service() -> (HealthReporter, HealthServer<impl Health>) {
    health_reporter()
}

/// Updates the health status until the gateway stops, then ends the streams of its watchers.
pub(crate) async fn report_health(health: &HealthReporter, bus: &Bus, stop: &CancellationToken) {
    let mut last = None;
    while !stop.is_cancelled() {
        let status =
            if bus.is_connected() { ServingStatus::Serving } else { ServingStatus::NotServing };
        // Each one that is set is sent to all watchers.
        if last.replace(status) != Some(status) {
            for service in SERVICES {
                health.set_service_status(service, status).await;
            }
        }
        tokio::select! {
            () = sleep(CHECK_INTERVAL) => {}
            () = stop.cancelled() => {}
        }
    }
    let mut health = health.clone();
    for service in SERVICES.into_iter().chain([""]) {
        health.set_service_status(service, ServingStatus::NotServing).await;
        health.clear_service_status(service).await;
    }
}
