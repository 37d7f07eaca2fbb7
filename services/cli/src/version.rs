//! The version of this build.

/// `0.1.0+g1234abc` if the build set `FLOTILLA_VERSION` (`make build` does, in a checkout),
/// otherwise the package's version.
pub const VERSION: &str = match option_env!("FLOTILLA_VERSION") {
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
