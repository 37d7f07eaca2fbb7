//! The minimum version of the nats-server.

use std::fmt;

/// 2.10 acknowledges duplicates that it has not stored (in a cluster) and has lost streams after
/// kill -9.
pub(crate) const MINIMUM: ServerVersion = ServerVersion { major: 2, minor: 11 };

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ServerVersion {
    pub major: u32,
    pub minor: u32,
}

impl ServerVersion {
    /// Accepts "2.11.4", "v2.15.1" and "2.12.0-RC.1".
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().trim_start_matches('v').split('.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        Some(Self { major, minor })
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for good in ["2.11.0", "v2.15.1", "2.12.0-RC.1", "3.0.0"] {
            assert!(ServerVersion::parse(good).unwrap() >= MINIMUM, "{good}");
        }
        for bad in ["2.9.10", "v2.10.27", "1.99.0"] {
            assert!(ServerVersion::parse(bad).unwrap() < MINIMUM, "{bad}");
        }
        for none in ["", "two", "2", "2.x"] {
            assert_eq!(ServerVersion::parse(none), None, "{none}");
        }
    }
}
