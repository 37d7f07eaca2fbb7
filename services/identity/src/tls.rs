//! TLS of members towards the servers of their own fleet.

use std::sync::Arc;

use rustls::{
    ClientConfig, Error, RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};

use crate::{CertificateCheck, CertificateVerifier, SERVER_NAME};

/// The reason why a certificate authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FleetTlsError {
    #[error("the fleet's certificate authority is not a certificate in PEM (K112)")]
    Pem,
    #[error("use the fleet's certificate authority (K112)")]
    Authority(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Returns a TLS configuration that trusts only servers certified by the fleet's authority (one or
/// several certificates in PEM), at any address.
pub fn fleet_client_config(authority_pem: &[u8]) -> Result<ClientConfig, FleetTlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority_pem) {
        let certificate = certificate.map_err(|_| FleetTlsError::Pem)?;
        roots.add(certificate).map_err(|error| FleetTlsError::Authority(error.into()))?;
    }
    if roots.is_empty() {
        return Err(FleetTlsError::Pem);
    }
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| FleetTlsError::Authority(error.into()))?;
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| FleetTlsError::Authority(error.into()))?;
    let verifier = CertificateVerifier::new(FleetServerCheck(verifier), provider);
    Ok(config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// All usual checks, except that the server's name is [`SERVER_NAME`] instead of its address.
#[derive(Debug)]
struct FleetServerCheck(Arc<WebPkiServerVerifier>);

impl CertificateCheck for FleetServerCheck {
    fn check_certificate(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<(), Error> {
        let name = ServerName::try_from(SERVER_NAME).expect("it is a host name");
        self.0.verify_server_cert(end_entity, intermediates, &name, ocsp_response, now).map(|_| ())
    }
}
