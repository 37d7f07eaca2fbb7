//! Reservation of the gateway's port by the program that starts gateways.

use std::net::SocketAddr;

use tokio::net::TcpSocket;

use crate::BindError;

/// A port that only a process which names it can listen on: a guard against accidents, and not
/// against other users of this machine.
///
/// The kernel gives it to no program that asks for any free port, and to no outgoing connection.
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    _socket: TcpSocket,
}

impl ReservedPort {
    /// Reserves the port while this value exists. Fails if a program listens on it.
    pub fn reserve(address: SocketAddr) -> Result<Self, BindError> {
        let error = |source| BindError::new(address, source);
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.map_err(error)?;
        // The gateway's listener has this option too, without which it could not bind the port.
        socket.set_reuseaddr(true).map_err(error)?;
        socket.bind(address).map_err(error)?;
        Ok(Self { address: socket.local_addr().map_err(error)?, _socket: socket })
    }

    /// Returns the address with the actual port if the port was 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener as StdListener};

    use crate::{Config, bind_port};

    use super::*;

    #[tokio::test]
    async fn a_reserved_port_is_for_gateways_also_for_one_that_starts_again() {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let reserved = ReservedPort::reserve(any).unwrap();
        let config = Config { listen: reserved.address(), tls: None };
        for _ in 0..2 {
            let gateway = bind_port(config.clone()).await.unwrap();
            assert_eq!(gateway.local_address(), reserved.address());
            let second = ReservedPort::reserve(reserved.address());
            assert!(matches!(second, Err(BindError::PortTaken { .. })), "{second:?}");
        }
    }

    #[test]
    fn nobody_else_gets_a_reserved_port() {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _entered = runtime.enter();
        let reserved = ReservedPort::reserve(any).unwrap();
        let others: Vec<StdListener> = (0..500).map(|_| StdListener::bind(any).unwrap()).collect();
        for other in others {
            assert_ne!(other.local_addr().unwrap(), reserved.address());
        }
    }
}
