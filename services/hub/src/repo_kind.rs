//! The kinds of repositories on the hub, which differ in their addresses.

/// The kind of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RepoKind {
    Model,
    Dataset,
}

impl RepoKind {
    /// Returns the name in the cache and in the addresses of the API.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }

    /// Returns the part of an address before the name of a repository.
    pub(crate) fn url_prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
        }
    }
}
