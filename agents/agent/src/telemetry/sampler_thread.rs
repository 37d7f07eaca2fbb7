//! Telemetry sampling on its own thread, because reads of a hung GPU's files may block.

use std::{sync::mpsc as thread, time::Duration};

use hardware::{
    host_files::LiveFiles,
    owner_policy::{self, ForeignProcess},
    telemetry::{HostTelemetry, TelemetrySampler},
};
use tokio::sync::mpsc;

/// A sample takes well under a millisecond; reads of a card in a reset may block.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) struct TelemetrySample {
    pub(super) telemetry: HostTelemetry,
    pub(super) foreign: Vec<ForeignProcess>,
}

/// A request for a sample; `sensors` is false if the sensors must not be read.
struct SampleRequest {
    at: Duration,
    sensors: bool,
}

/// The thread ends when this is dropped, or when a blocked sample then returns.
pub(super) struct SamplerThread {
    requests: thread::SyncSender<SampleRequest>,
    samples: mpsc::Receiver<TelemetrySample>,
    is_stuck: bool,
}

impl SamplerThread {
    /// Starts the thread. If that fails, the host is not sampled.
    pub(super) fn start(files: LiveFiles) -> Self {
        // At most one request and one sample are pending.
        let (requests, asked) = thread::sync_channel::<SampleRequest>(1);
        let (answer, samples) = mpsc::channel(1);
        let work = move || {
            let own = owner_policy::own_process_name(&files);
            let mut sampler = TelemetrySampler::default();
            while let Ok(SampleRequest { at, sensors }) = asked.recv() {
                let at_ms = super::to_millis(at);
                let telemetry = sampler.take_sample(&files, at_ms, sensors);
                let foreign = owner_policy::find_foreign_processes(&files, &own);
                if answer.blocking_send(TelemetrySample { telemetry, foreign }).is_err() {
                    break;
                }
            }
        };
        let started = std::thread::Builder::new().name("watch".into()).spawn(work);
        if let Err(error) = started {
            tracing::warn!(%error, "the box cannot be monitored");
        }
        Self { requests, samples, is_stuck: false }
    }

    /// Takes a sample, `at` after the start. Returns `None` while the thread is blocked.
    pub(super) async fn take_sample(
        &mut self,
        at: Duration,
        sensors: bool,
    ) -> Option<TelemetrySample> {
        // Discards the late sample of a request that timed out.
        let _ = self.samples.try_recv();
        // If the channel is full, the thread still works on the previous request.
        let _ = self.requests.try_send(SampleRequest { at, sensors });
        let sample = tokio::time::timeout(SAMPLE_TIMEOUT, self.samples.recv()).await.ok().flatten();
        let stuck = sample.is_none();
        if stuck && !self.is_stuck {
            tracing::warn!("this box's sensors do not respond");
        }
        self.is_stuck = stuck;
        sample
    }
}
