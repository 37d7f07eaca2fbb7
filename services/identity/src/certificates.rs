//! The fleet's certificate authority, and the certificate that all its servers present.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};

/// The host name in the certificates of all servers of a fleet. Members verify it instead of the
/// address, because hosts change their addresses.
pub const SERVER_NAME: &str = "fleet.flotilla.internal";

const DAY_S: u64 = 24 * 3600;
const CA_DAYS: u64 = 3650;
/// Some clients refuse a longer validity.
const SERVER_DAYS: u64 = 825;
/// Certificates are backdated, so that a host whose clock is behind accepts them.
const BACKDATE_S: u64 = DAY_S;

/// The reason why a certificate could not be issued.
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

/// A certificate and its key, both in PEM.
pub(crate) struct PemPair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// Creates a key and a self-signed certificate authority. `now` is in seconds since 1970.
pub(crate) fn issue_ca(fleet: &str, now: u64) -> Result<PemPair, CertificateError> {
    let key = KeyPair::generate().map_err(CertificateError::Authority)?;
    let params = build_ca_params(fleet, now);
    let certificate = params.self_signed(&key).map_err(CertificateError::Authority)?;
    Ok(PemPair { certificate: certificate.pem(), key: key.serialize_pem() })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerUsage {
    /// A server of the log's cluster; these servers are also clients of each other.
    Cluster,
    /// A leaf node, which no cluster accepts as a member.
    Leaf,
}

/// Issues a server certificate for `hosts`, localhost and [`SERVER_NAME`].
///
/// The chain ends with the authority's certificate, so that a client that only knows its hash can
/// obtain it.
pub(crate) fn issue_server_certificate(
    fleet: &str,
    authority: &PemPair,
    hosts: &[String],
    usage: ServerUsage,
    now: u64,
) -> Result<PemPair, CertificateError> {
    let ca_key = KeyPair::from_pem(&authority.key).map_err(CertificateError::Authority)?;
    // The name and key of the issuer determine its issuer fields.
    let issuer = Issuer::new(build_ca_params(fleet, now), ca_key);
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
    params.distinguished_name = distinguished_name(&format!("{fleet} servers"));
    set_validity(&mut params, now.saturating_sub(BACKDATE_S), now + SERVER_DAYS * DAY_S);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    if usage == ServerUsage::Cluster {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    params.use_authority_key_identifier_extension = true;
    let certificate = params.signed_by(&key, &issuer).map_err(CertificateError::Server)?;
    let chain = format!("{}{}", certificate.pem(), authority.certificate);
    Ok(PemPair { certificate: chain, key: key.serialize_pem() })
}

/// Returns the expiry of a certificate issued at `made`, both in seconds since 1970.
pub(crate) fn server_expiry(made: u64) -> u64 {
    made + SERVER_DAYS * DAY_S
}

fn build_ca_params(fleet: &str, now: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished_name(&format!("{fleet} authority"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_validity(&mut params, now.saturating_sub(BACKDATE_S), now + CA_DAYS * DAY_S);
    params
}

fn distinguished_name(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::OrganizationName, "flotilla");
    names.push(DnType::CommonName, name);
    names
}

fn set_validity(params: &mut CertificateParams, from: u64, until: u64) {
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(from);
    params.not_after = epoch + Duration::from_secs(until);
}
