//! Limits connections per address: every host on the network can connect, but must not block
//! others.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
};

/// Enough for a site behind NAT; four such addresses use up all connections.
const ONE_ADDRESS_MAX: usize = 128;

#[derive(Debug, Clone, Default)]
pub(super) struct ConnectionLimiter {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// The permit of one connection, returned when dropped.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
    address: IpAddr,
}

#[derive(Debug)]
pub(super) struct LimitReached;

impl ConnectionLimiter {
    /// Returns a permit for one more connection. Connections from this machine need none, as its
    /// processes can do harm in other ways.
    pub(super) fn acquire_permit(
        &self,
        address: Option<IpAddr>,
    ) -> Result<Option<ConnectionPermit>, LimitReached> {
        let Some(address) = address.map(client_network).filter(|address| !address.is_loopback())
        else {
            return Ok(None);
        };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= ONE_ADDRESS_MAX {
            return Err(LimitReached);
        }
        *count += 1;
        Ok(Some(ConnectionPermit { counts: self.counts.clone(), address }))
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// Returns the /64 network for IPv6, as a host usually has a whole one.
fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn an_address_has_its_places_and_no_more_and_others_have_theirs() {
        let limiter = ConnectionLimiter::default();
        let take = |text: &str| limiter.acquire_permit(ip(text));
        let mut places: Vec<_> =
            (0..ONE_ADDRESS_MAX).map(|_| take("192.168.1.7").unwrap()).collect();
        assert!(take("192.168.1.7").is_err());
        assert!(take("::ffff:192.168.1.7").is_err(), "the same in other words");
        take("192.168.1.8").unwrap();
        places.pop();
        take("192.168.1.7").unwrap();
        drop(places);
        assert!(limiter.counts.lock().unwrap().is_empty(), "nothing is kept of who left");
    }

    #[test]
    fn a_host_has_one_network_of_ipv6() {
        let limiter = ConnectionLimiter::default();
        let _places: Vec<_> = (0..ONE_ADDRESS_MAX)
            .map(|n| limiter.acquire_permit(ip(&format!("2001:db8::{n:x}"))).unwrap())
            .collect();
        assert!(limiter.acquire_permit(ip("2001:db8::ffff")).is_err());
        limiter.acquire_permit(ip("2001:db8:0:1::1")).unwrap();
    }

    #[test]
    fn this_machine_is_not_counted() {
        let limiter = ConnectionLimiter::default();
        for _ in 0..2 * ONE_ADDRESS_MAX {
            assert!(limiter.acquire_permit(ip("127.0.0.1")).unwrap().is_none());
            assert!(limiter.acquire_permit(ip("::1")).unwrap().is_none());
        }
    }
}
