//! Which nats-server versions the fleet trusts.

use std::fmt;

/// 2.10 acknowledges duplicates it has not stored (in a cluster) and has lost streams to kill -9.
pub(crate) const MINIMUM: Version = Version { major: 2, minor: 11 };

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
}

impl Version {
    /// Reads "2.11.4", "v2.15.1" or "2.12.0-RC.1".
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().trim_start_matches('v').split('.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        Some(Self { major, minor })
    }
}

impl fmt::Display for Version {
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
            assert!(Version::parse(good).unwrap() >= MINIMUM, "{good}");
        }
        for bad in ["2.9.10", "v2.10.27", "1.99.0"] {
            assert!(Version::parse(bad).unwrap() < MINIMUM, "{bad}");
        }
        for none in ["", "two", "2", "2.x"] {
            assert_eq!(Version::parse(none), None, "{none}");
        }
    }
}
