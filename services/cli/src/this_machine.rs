//! Facts about this machine and this process, and conversions of units.

use std::{net::IpAddr, path::PathBuf};

use anyhow::Context;

pub(crate) const SECONDS_PER_HOUR: f64 = 3600.0;

pub(crate) fn cpu_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns true if a host's name or address means only the machine that uses it.
pub(crate) fn is_local_host(host: &str) -> bool {
    let address: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
    host == "localhost" || address.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

pub(crate) fn this_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("find this program")
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "callers check that it is a positive number of at most 2^50 bytes"
)]
pub(crate) fn gib_to_bytes(gib: f64) -> u64 {
    (gib * (1_u64 << 30) as f64) as u64
}
