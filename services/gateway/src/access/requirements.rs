//! The rights that each method and path requires: one row per method.

use identity::{GatewayCaller, UserScope};

use crate::{openai::OPENAI_PATHS, openapi, page};

/// The right that a method or path requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessRequirement {
    /// The call is made before a client is a member, or its answer is not confidential.
    Anonymous,
    /// The caller has a valid bearer; the called service checks the rest.
    AnyMember,
    /// The caller is an agent, or a user with at least the scope `reader`.
    AgentOrReader,
    /// The caller is a user with at least this scope.
    Scope(UserScope),
}

const CLIENT: AccessRequirement = AccessRequirement::Scope(UserScope::Client);
const READER: AccessRequirement = AccessRequirement::Scope(UserScope::Reader);
const OPERATOR: AccessRequirement = AccessRequirement::Scope(UserScope::Operator);
const ADMIN: AccessRequirement = AccessRequirement::Scope(UserScope::Admin);

const METHOD_REQUIREMENTS: &[(&str, &[(&str, AccessRequirement)])] = &[
    (
        "flotilla.v1.Runs",
        &[
            ("Submit", OPERATOR),
            ("Fork", OPERATOR),
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
    (
        "flotilla.v1.Checkpoints",
        &[("List", READER), ("Get", READER), ("Download", READER), ("Compare", READER)],
    ),
    (
        "flotilla.v1.Channels",
        &[
            ("List", READER),
            ("History", READER),
            ("Move", OPERATOR),
            ("RollBack", OPERATOR),
            ("Learn", OPERATOR),
            ("Kept", OPERATOR),
        ],
    ),
    (
        "flotilla.v1.Fleet",
        &[
            ("Agents", READER),
            ("Drain", OPERATOR),
            ("Watch", READER),
            ("Hello", AccessRequirement::AnyMember),
        ],
    ),
    (
        "flotilla.v1.Members",
        &[
            ("CreateToken", ADMIN),
            ("ListTokens", ADMIN),
            ("RevokeToken", ADMIN),
            // These carry their own proof: a secret, or a signature.
            ("Join", AccessRequirement::Anonymous),
            ("Renew", AccessRequirement::Anonymous),
            ("ListMembers", READER),
            ("Revoke", ADMIN),
            ("CreateUser", ADMIN),
            // A code has the rights of its caller.
            ("CreateLoginCode", READER),
            ("ExchangeLoginCode", AccessRequirement::Anonymous),
        ],
    ),
    (
        "grpc.health.v1.Health",
        // Probes check; a watch stays open.
        &[("Check", AccessRequirement::Anonymous), ("Watch", AccessRequirement::AnyMember)],
    ),
    (
        "grpc.reflection.v1.ServerReflection",
        &[("ServerReflectionInfo", AccessRequirement::AnyMember)],
    ),
    (
        "grpc.reflection.v1alpha.ServerReflection",
        &[("ServerReflectionInfo", AccessRequirement::AnyMember)],
    ),
];

/// Calls that prove themselves by a secret, which must not be guessed.
const SECRET_METHODS: [&str; 2] =
    ["/flotilla.v1.Members/Join", "/flotilla.v1.Members/ExchangeLoginCode"];

/// Returns true if a call to this path contains a secret in place of a bearer.
pub(crate) fn has_secret(path: &str) -> bool {
    SECRET_METHODS.contains(&path)
}

/// By path prefix, for paths that are not gRPC.
const PATH_REQUIREMENTS: &[(&str, AccessRequirement)] =
    &[("/store/", AccessRequirement::AgentOrReader), (OPENAI_PATHS, CLIENT)];

/// Returns `None` if the path is unknown and no caller may use it.
pub(crate) fn requirement_for(path: &str) -> Option<AccessRequirement> {
    if page::has_path(path) || path == openapi::DOCUMENT_PATH {
        return Some(AccessRequirement::Anonymous);
    }
    let place = PATH_REQUIREMENTS.iter().find(|(place, _)| path.starts_with(place));
    place.map(|(_, need)| *need).or_else(|| method_requirement(path))
}

fn method_requirement(path: &str) -> Option<AccessRequirement> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    let (_, methods) = METHOD_REQUIREMENTS.iter().find(|(name, _)| *name == service)?;
    methods.iter().find(|(name, _)| *name == method).map(|(_, need)| *need)
}

impl AccessRequirement {
    pub(crate) fn is_met_by(self, caller: &GatewayCaller) -> bool {
        match self {
            Self::Anonymous | Self::AnyMember => true,
            Self::AgentOrReader => caller.scope.is_none_or(|has| has >= UserScope::Reader),
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
        let rows = METHOD_REQUIREMENTS.iter().flat_map(|(service, methods)| {
            methods.iter().map(move |(method, _)| format!("/{service}/{method}"))
        });
        assert_eq!(rows.collect::<BTreeSet<_>>(), served);
        for path in &served {
            assert!(requirement_for(path).is_some(), "{path}");
        }
    }

    #[test]
    fn a_path_without_a_row_is_denied_to_all() {
        for path in ["", "/page", "/flotilla.v1.Runs", "/flotilla.v1.Runs/Erase", "/store", "//Get"]
        {
            assert_eq!(requirement_for(path), None, "{path}");
        }
        assert_eq!(requirement_for("/store/blobs/b3/00"), Some(AccessRequirement::AgentOrReader));
        assert_eq!(requirement_for("/v1/models"), Some(CLIENT));
        assert_eq!(
            requirement_for("/page.js"),
            Some(AccessRequirement::Anonymous),
            "it shows nothing by itself"
        );
    }
}
