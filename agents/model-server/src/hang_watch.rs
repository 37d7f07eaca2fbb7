//! Notices a process that runs but no longer works on its requests, for example because its GPU
//! hangs.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use reqwest::RequestBuilder;
use tokio::time::{Instant, sleep, timeout_at};

/// The number of looks at a process in the time after which it counts as hung.
const LOOKS: u32 = 10;

/// The requests of a process, and the parts of its answers.
#[derive(Debug, Default)]
pub(crate) struct ProcessActivity {
    active: AtomicU32,
    /// The number of requests so far.
    begun: AtomicU64,
    /// The number of parts of answers so far.
    parts: AtomicU64,
}

/// Counts a request for as long as it is answered.
pub(crate) struct ActiveRequest<'a>(&'a ProcessActivity);

impl ActiveRequest<'_> {
    /// Notes that a part of the answer arrived.
    pub(crate) fn note_part(&self) {
        self.0.parts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for ActiveRequest<'_> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ProcessActivity {
    pub(crate) fn count_request(&self) -> ActiveRequest<'_> {
        self.active.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(self)
    }

    pub(crate) fn active_requests(&self) -> u32 {
        self.active.load(Ordering::Relaxed)
    }

    fn begun_requests(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn answered_parts(&self) -> u64 {
        self.parts.load(Ordering::Relaxed)
    }
}

/// Returns once a process that has requests neither sent a part of an answer nor answered `check`
/// for `limit`. Servers answer the check between two of their steps. One that is busy with more
/// requests than it takes may not answer it either, but sends parts.
pub(crate) async fn await_hang(
    activity: &ProcessActivity,
    check: impl Fn() -> RequestBuilder,
    limit: Duration,
) {
    let (mut begun, mut parts, mut alive_at) = (0, 0, Instant::now());
    loop {
        sleep(limit / LOOKS).await;
        // A request whose client has left counts: others may come and leave all the time.
        let is_idle = activity.active_requests() == 0 && activity.begun_requests() == begun;
        let is_alive = is_idle
            || activity.answered_parts() != parts
            || timeout_at(alive_at + limit, check().send()).await.is_ok_and(|sent| sent.is_ok())
            || activity.answered_parts() != parts;
        if is_alive {
            (begun, parts) = (activity.begun_requests(), activity.answered_parts());
            alive_at = Instant::now();
        } else if alive_at.elapsed() >= limit {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        time::timeout,
    };

    use super::*;

    const LIMIT: Duration = Duration::from_millis(500);
    const LONG: Duration = Duration::from_secs(60);

    /// Starts a server that accepts all requests, and answers them if it is not hung.
    async fn serve(is_hung: bool) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let _ = stream.read(&mut [0; 4096]).await;
                if !is_hung {
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]";
                    let _ = stream.write_all(answer).await;
                }
                open.push(stream);
            }
        });
        address
    }

    async fn watch(address: SocketAddr, activity: &ProcessActivity) {
        let client = bounded_http::client_builder().no_proxy().pool_max_idle_per_host(0);
        let client = client.build().unwrap();
        await_hang(activity, || client.get(format!("http://{address}/slots")), LIMIT).await;
    }

    #[tokio::test]
    async fn a_process_that_completes_nothing_and_answers_no_check_hangs() {
        let (address, activity) = (serve(true).await, ProcessActivity::default());
        assert!(timeout(2 * LIMIT, watch(address, &activity)).await.is_err(), "it is idle");
        let request = activity.count_request();
        timeout(LONG, watch(address, &activity)).await.expect("it hangs");
        // The client gives up before the next look.
        drop(request);
        let activity = ProcessActivity::default();
        drop(activity.count_request());
        timeout(LONG, watch(address, &activity)).await.expect("it hangs");
    }

    #[tokio::test]
    async fn a_process_that_answers_checks_or_sends_parts_does_not_hang() {
        let activity = ProcessActivity::default();
        let request = activity.count_request();
        let working = serve(false).await;
        assert!(timeout(4 * LIMIT, watch(working, &activity)).await.is_err(), "it answers checks");
        let full = serve(true).await;
        let parts = async {
            loop {
                sleep(LIMIT / 20).await;
                request.note_part();
            }
        };
        let watched = async {
            tokio::select! {
                () = watch(full, &activity) => {}
                () = parts => {}
            }
        };
        assert!(timeout(4 * LIMIT, watched).await.is_err(), "it sends parts");
    }
}
