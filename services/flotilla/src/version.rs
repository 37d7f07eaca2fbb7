//! The version that people are told, and by which one build is told from another.

/// `0.1.0+g1234abc` where the build said what it is built from (`make build` does, in a checkout);
/// otherwise the package's.
pub(crate) const VERSION: &str = match option_env!("FLOTILLA_VERSION") {
    Some(built) => built,
    None => env!("CARGO_PKG_VERSION"),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_of_whatever_checkout_begins_with_the_package_s_version() {
        assert!(VERSION.starts_with(env!("CARGO_PKG_VERSION")), "{VERSION}");
    }
}
