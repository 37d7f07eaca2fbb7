//! The fleet's own certificate authority, and the one certificate all its servers show.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};

/// The name by which members know a server of their fleet, wherever it is: boxes change their
/// addresses.
pub const SERVER_NAME: &str = "fleet.flotilla.internal";

const DAY_S: u64 = 24 * 3600;
const CA_DAYS: u64 = 3650;
/// Longer is refused by some clients.
const SERVER_DAYS: u64 = 825;
/// A clock that is behind must not find them invalid.
const SLACK_S: u64 = DAY_S;

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("make the certificate authority (K112)")]
    Authority(#[source] rcgen::Error),
    #[error("make the servers' certificate (K112)")]
    Server(#[source] rcgen::Error),
    #[error("{name:?} cannot be in a certificate: give host names and addresses (K112)")]
    Name {
        name: String,
        #[source]
        source: rcgen::Error,
    },
}

/// Both in PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

pub(crate) fn new_authority(fleet: &str, now: u64) -> Result<Pair, CertificateError> {
    let key = KeyPair::generate().map_err(CertificateError::Authority)?;
    let params = authority_params(fleet, now);
    let certificate = params.self_signed(&key).map_err(CertificateError::Authority)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

/// What a server may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// One of a cluster: they are each other's clients.
    Cluster,
    /// A server to its clients alone: no cluster takes it for one of its own.
    Leaf,
}

/// For `hosts`, besides this machine's own names for itself and the one members use. The chain
/// ends with the authority's certificate, so that whoever only knows its hash can take it.
pub(crate) fn new_server(
    fleet: &str,
    authority: &Pair,
    hosts: &[String],
    usage: Use,
    now: u64,
) -> Result<Pair, CertificateError> {
    let ca_key = KeyPair::from_pem(&authority.key).map_err(CertificateError::Authority)?;
    // What an issuer says of itself follows from its name and its key.
    let issuer = Issuer::new(authority_params(fleet, now), ca_key);
    let key = KeyPair::generate().map_err(CertificateError::Server)?;
    let mut params = CertificateParams::default();
    for name in [SERVER_NAME, "localhost", "127.0.0.1", "::1"]
        .into_iter()
        .chain(hosts.iter().map(String::as_str))
    {
        let wrong = |source| CertificateError::Name { name: name.to_owned(), source };
        let one = CertificateParams::new([name.to_owned()]).map_err(wrong)?;
        params.subject_alt_names.extend(one.subject_alt_names);
    }
    params.distinguished_name = named(&format!("{fleet} servers"));
    period(&mut params, now.saturating_sub(SLACK_S), now + SERVER_DAYS * DAY_S);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    if usage == Use::Cluster {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    params.use_authority_key_identifier_extension = true;
    let certificate = params.signed_by(&key, &issuer).map_err(CertificateError::Server)?;
    let chain = format!("{}{}", certificate.pem(), authority.certificate);
    Ok(Pair { certificate: chain, key: key.serialize_pem() })
}

/// In seconds since 1970, of one made then.
pub(crate) fn server_expires(made: u64) -> u64 {
    made + SERVER_DAYS * DAY_S
}

fn authority_params(fleet: &str, now: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&format!("{fleet} authority"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    period(&mut params, now.saturating_sub(SLACK_S), now + CA_DAYS * DAY_S);
    params
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::OrganizationName, "flotilla");
    names.push(DnType::CommonName, name);
    names
}

/// In seconds since 1970.
fn period(params: &mut CertificateParams, from: u64, until: u64) {
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(from);
    params.not_after = epoch + Duration::from_secs(until);
}
