//! A proxy between one agent and the NATS server that stops at a chosen publication.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::wait_until;

/// What the proxy withholds from the first publication that matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withheld {
    /// The publication, and everything that the client sends after it.
    Publication,
    /// Everything that the server answers from then on, so that the publication is stored but not
    /// confirmed.
    Confirmation,
}

/// A proxy of a NATS server. Its threads end with their connections or the test.
pub struct BusProxy {
    address: SocketAddr,
    is_holding: Arc<AtomicBool>,
}

impl BusProxy {
    /// Starts a proxy that holds at the first publication to a subject that begins with `subject`.
    pub fn start(server: &str, subject: &str, withheld: Withheld) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = server.trim_start_matches("nats://").to_owned();
        let is_holding = Arc::new(AtomicBool::new(false));
        let hold = HoldPoint {
            // Publications with and without headers.
            marker: format!("PUB {subject}").into_bytes(),
            withheld,
            is_holding: is_holding.clone(),
        };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(upstream) = TcpStream::connect(&server) else { continue };
                hold.forward_connection(client, upstream);
            }
        });
        Self { address, is_holding }
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Waits until the publication was seen.
    pub fn await_hold(&self, limit: Duration) {
        wait_until("the proxy holds", limit, || {
            self.is_holding.load(Ordering::SeqCst).then_some(())
        });
    }
}

#[derive(Clone)]
struct HoldPoint {
    marker: Vec<u8>,
    withheld: Withheld,
    is_holding: Arc<AtomicBool>,
}

impl HoldPoint {
    fn forward_connection(&self, client: TcpStream, server: TcpStream) {
        let (to_client, to_server) = (clone_stream(&client), clone_stream(&server));
        let hold = self.clone();
        std::thread::spawn(move || hold.forward_requests(client, to_server));
        let hold = self.clone();
        std::thread::spawn(move || hold.forward_answers(server, to_client));
    }

    fn forward_requests(&self, mut client: TcpStream, mut server: TcpStream) {
        // The marker may be split between two reads.
        let mut seen: Vec<u8> = Vec::new();
        let mut chunk = [0; 1 << 16];
        while let Ok(count @ 1..) = client.read(&mut chunk) {
            let before = seen.len();
            seen.extend_from_slice(&chunk[..count]);
            let found = seen.windows(self.marker.len()).position(|part| part == self.marker);
            if found.is_some() {
                self.is_holding.store(true, Ordering::SeqCst);
            }
            let is_withheld =
                self.withheld == Withheld::Publication && self.is_holding.load(Ordering::SeqCst);
            let passed = match found {
                Some(at) if is_withheld => at.saturating_sub(before),
                _ if is_withheld => 0,
                _ => count,
            };
            if server.write_all(&chunk[..passed]).is_err() {
                break;
            }
            let kept = seen.len().saturating_sub(self.marker.len());
            seen.drain(..kept);
        }
        let _ = server.shutdown(Shutdown::Both);
    }

    fn forward_answers(&self, mut server: TcpStream, mut client: TcpStream) {
        let mut chunk = [0; 1 << 16];
        while let Ok(count @ 1..) = server.read(&mut chunk) {
            let is_withheld =
                self.withheld == Withheld::Confirmation && self.is_holding.load(Ordering::SeqCst);
            if !is_withheld && client.write_all(&chunk[..count]).is_err() {
                break;
            }
        }
        let _ = client.shutdown(Shutdown::Both);
    }
}

fn clone_stream(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a descriptor")
}
