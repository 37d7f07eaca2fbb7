//! Ports for the servers of tests.

use std::{
    hash::{BuildHasher, RandomState},
    net::{Ipv4Addr, TcpListener},
};

/// Returns `N` different free ports. They are below those that Linux gives to connections, which
/// could take one while a server restarts.
///
/// # Panics
/// If a port cannot be bound for another reason than its use.
pub fn free_ports<const N: usize>() -> [u16; N] {
    let listeners: [TcpListener; N] = std::array::from_fn(|_| {
        let mut ports = std::iter::repeat_with(|| {
            10_000 + RandomState::new().hash_one(std::process::id()) % 22_000
        });
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, u16::try_from(port).ok()?)).ok();
        ports.find_map(bind).expect("a free port")
    });
    listeners.map(|one| one.local_addr().expect("an address").port())
}
