//! How a member knows that it speaks to a server of its own fleet.

use std::sync::Arc;

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};

use crate::SERVER_NAME;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the fleet's certificate authority is not a certificate in PEM (K112)")]
    Pem,
    #[error("use the fleet's certificate authority (K112)")]
    Authority(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Decides what programs of ours encrypt with, where libraries leave that open: they know of two
/// providers and would panic. Harmless to repeat.
pub fn choose_provider() {
    // Fails when it is chosen already.
    let _ = ring::default_provider().install_default();
}

/// Trusts servers that the fleet's authority (one certificate or several, in PEM) has made,
/// whatever address they are reached by; and nobody else.
///
/// # Errors
/// When that is no certificate authority.
pub fn client_config(authority_pem: &[u8]) -> Result<ClientConfig, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority_pem) {
        let certificate = certificate.map_err(|_| TlsError::Pem)?;
        roots.add(certificate).map_err(|error| TlsError::Authority(error.into()))?;
    }
    if roots.is_empty() {
        return Err(TlsError::Pem);
    }
    let provider = Arc::new(ring::default_provider());
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| TlsError::Authority(error.into()))?;
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Authority(error.into()))?;
    let ours = Arc::new(OfTheFleet { inner, provider });
    Ok(config.dangerous().with_custom_certificate_verifier(ours).with_no_client_auth())
}

/// Everything that is usually checked, but with the fleet's name for its servers in place of
/// the address that was called.
#[derive(Debug)]
struct OfTheFleet {
    inner: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for OfTheFleet {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = ServerName::try_from(SERVER_NAME).expect("it is a host name");
        self.inner.verify_server_cert(end_entity, intermediates, &name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
