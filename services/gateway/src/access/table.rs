//! Who may call what: one row a method.

use authority::{Caller, Scope};

use crate::{openapi, page};

/// What a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is asked by those who are not let in yet, or says nothing worth keeping.
    Nothing,
    /// Any bearer; what is called looks closer.
    Member,
    Scope(Scope),
}

const READER: Need = Need::Scope(Scope::Reader);
const OPERATOR: Need = Need::Scope(Scope::Operator);
const ADMIN: Need = Need::Scope(Scope::Admin);

/// The service, and its methods.
const TABLE: &[(&str, &[(&str, Need)])] = &[
    (
        "flotilla.v1.Runs",
        &[
            ("Submit", OPERATOR),
            ("Get", READER),
            ("List", READER),
            ("Pause", OPERATOR),
            ("Resume", OPERATOR),
            ("Cancel", OPERATOR),
            ("Audit", READER),
            ("Watch", READER),
            ("Board", READER),
            ("Samples", READER),
        ],
    ),
    ("flotilla.v1.Evals", &[("History", READER), ("Watch", READER)]),
    ("flotilla.v1.Checkpoints", &[("List", READER), ("Get", READER), ("Download", READER)]),
    (
        "flotilla.v1.Fleet",
        &[("Agents", READER), ("Drain", OPERATOR), ("Watch", READER), ("Hello", Need::Member)],
    ),
    (
        "flotilla.v1.Members",
        &[
            ("CreateToken", ADMIN),
            ("ListTokens", ADMIN),
            ("RevokeToken", ADMIN),
            // These two bring their own proof: a secret, or a signature.
            ("Join", Need::Nothing),
            ("Renew", Need::Nothing),
            ("ListMembers", READER),
            ("Revoke", ADMIN),
            ("CreateUser", ADMIN),
        ],
    ),
    ("grpc.health.v1.Health", &[("Check", Need::Nothing), ("Watch", Need::Nothing)]),
    ("grpc.reflection.v1.ServerReflection", &[("ServerReflectionInfo", Need::Member)]),
    ("grpc.reflection.v1alpha.ServerReflection", &[("ServerReflectionInfo", Need::Member)]),
];

/// What is no gRPC, by the path it begins with.
const PLACES: &[(&str, Need)] = &[("/store/", Need::Member)];

/// What a request to this path needs. What no row speaks of is for nobody: `None`.
pub(crate) fn need(path: &str) -> Option<Need> {
    if page::has(path) || path == openapi::PATH {
        return Some(Need::Nothing);
    }
    let place = PLACES.iter().find(|(place, _)| path.starts_with(place));
    place.map(|(_, need)| *need).or_else(|| method(path))
}

fn method(path: &str) -> Option<Need> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    let (_, methods) = TABLE.iter().find(|(name, _)| *name == service)?;
    methods.iter().find(|(name, _)| *name == method).map(|(_, need)| *need)
}

impl Need {
    pub(crate) fn is_met_by(self, caller: &Caller) -> bool {
        match self {
            Self::Nothing | Self::Member => true,
            Self::Scope(scope) => caller.scope.is_some_and(|has| has >= scope),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    fn described(set: &[u8]) -> BTreeSet<String> {
        let set = FileDescriptorSet::decode(set).unwrap();
        let mut paths = BTreeSet::new();
        for file in &set.file {
            for service in &file.service {
                let (package, service_name) = (file.package(), service.name());
                let path = |method: &str| format!("/{package}.{service_name}/{method}");
                paths.extend(service.method.iter().map(|method| path(method.name())));
            }
        }
        paths
    }

    #[test]
    fn every_method_has_a_row_and_every_row_a_method() {
        let mut served = described(wire::FILE_DESCRIPTOR_SET);
        served.extend(described(tonic_health::pb::FILE_DESCRIPTOR_SET));
        served.extend(described(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET));
        served.extend(described(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET));
        let rows = TABLE.iter().flat_map(|(service, methods)| {
            methods.iter().map(move |(method, _)| format!("/{service}/{method}"))
        });
        assert_eq!(rows.collect::<BTreeSet<_>>(), served);
        for path in &served {
            assert!(need(path).is_some(), "{path}");
        }
    }

    #[test]
    fn what_no_row_speaks_of_is_for_nobody() {
        for path in ["", "/page", "/flotilla.v1.Runs", "/flotilla.v1.Runs/Erase", "/store", "//Get"]
        {
            assert_eq!(need(path), None, "{path}");
        }
        assert_eq!(need("/store/blobs/b3/00"), Some(Need::Member));
        assert_eq!(need("/page.js"), Some(Need::Nothing), "it shows nothing by itself");
    }
}
