//! How many connections come from one address: whoever is on the network can connect, and is not to
//! keep others from it.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
};

/// A site behind one address has some; four of them leave room for nobody else.
const ONE_ADDRESS_MAX: usize = 128;

#[derive(Debug, Clone, Default)]
pub(super) struct Crowd {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
    address: IpAddr,
}

#[derive(Debug)]
pub(super) struct Full;

impl Crowd {
    /// A place for one more from there. Whoever is on this machine needs none: it has other ways to
    /// do harm.
    pub(super) fn place(&self, address: Option<IpAddr>) -> Result<Option<Place>, Full> {
        let Some(address) = address.map(network).filter(|address| !address.is_loopback()) else {
            return Ok(None);
        };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= ONE_ADDRESS_MAX {
            return Err(Full);
        }
        *count += 1;
        Ok(Some(Place { counts: self.counts.clone(), address }))
    }
}

impl Drop for Place {
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

/// A host has a whole /64 of IPv6.
fn network(address: IpAddr) -> IpAddr {
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
        let crowd = Crowd::default();
        let take = |text: &str| crowd.place(ip(text));
        let mut places: Vec<_> =
            (0..ONE_ADDRESS_MAX).map(|_| take("192.168.1.7").unwrap()).collect();
        assert!(take("192.168.1.7").is_err());
        assert!(take("::ffff:192.168.1.7").is_err(), "the same in other words");
        take("192.168.1.8").unwrap();
        places.pop();
        take("192.168.1.7").unwrap();
        drop(places);
        assert!(crowd.counts.lock().unwrap().is_empty(), "nothing is kept of who left");
    }

    #[test]
    fn a_host_has_one_network_of_ipv6() {
        let crowd = Crowd::default();
        let _places: Vec<_> = (0..ONE_ADDRESS_MAX)
            .map(|n| crowd.place(ip(&format!("2001:db8::{n:x}"))).unwrap())
            .collect();
        assert!(crowd.place(ip("2001:db8::ffff")).is_err());
        crowd.place(ip("2001:db8:0:1::1")).unwrap();
    }

    #[test]
    fn this_machine_is_not_counted() {
        let crowd = Crowd::default();
        for _ in 0..2 * ONE_ADDRESS_MAX {
            assert!(crowd.place(ip("127.0.0.1")).unwrap().is_none());
            assert!(crowd.place(ip("::1")).unwrap().is_none());
        }
    }
}
