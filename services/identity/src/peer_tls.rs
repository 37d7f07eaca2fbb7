//! TLS between agents that exchange files.
//!
//! Each agent creates a key and a certificate when it starts, and announces its fingerprint on the
//! bus under its own name. Both ends of a connection present their certificates; the fingerprint
//! identifies the owner. No authority signs these certificates, and they are not stored.

use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::{
    CertificateError, ClientConfig, Error, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime},
    server::NoServerSessionStorage,
    version::TLS13,
};

use crate::{CertificateCheck, CertificateVerifier, Fingerprint, SERVER_NAME};

/// The reason why no key for the exchange of files could be created or used.
#[derive(Debug, thiserror::Error)]
pub enum PeerTlsError {
    #[error("make a key for exchanging files (K112)")]
    Key(#[from] rcgen::Error),
    #[error("use a key for exchanging files (K112)")]
    Tls(#[from] Error),
}

/// An agent's key and certificate towards its peers, for the lifetime of the process.
#[derive(Debug)]
pub struct PeerIdentity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl PeerIdentity {
    /// Creates a key and a self-signed certificate.
    pub fn new() -> Result<Self, PeerTlsError> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([SERVER_NAME.to_owned()])?.self_signed(&key)?;
        let (certificate, key) = (certificate.der().clone(), key.serialize_der());
        let key = PrivateKeyDer::Pkcs8(key.into());
        Ok(Self { certificate, key, provider: Arc::new(ring::default_provider()) })
    }

    pub fn own_fingerprint(&self) -> Fingerprint {
        Fingerprint::from_der(&self.certificate)
    }

    /// Returns the TLS configuration of the server. It accepts any client certificate; its owner is
    /// looked up for each request. Sessions are not resumed, because the client may have been
    /// revoked meanwhile.
    pub fn server_config(&self) -> Result<ServerConfig, PeerTlsError> {
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier = CertificateVerifier::new(FingerprintCheck(None), self.provider.clone());
        let mut config = builder
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Returns the TLS configuration to connect to the owner of one certificate only.
    pub fn client_config(&self, of: Fingerprint) -> Result<ClientConfig, PeerTlsError> {
        let builder = ClientConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier = CertificateVerifier::new(FingerprintCheck(Some(of)), self.provider.clone());
        let mut config = builder
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// Accepts one certificate, or any if none is expected.
#[derive(Debug)]
struct FingerprintCheck(Option<Fingerprint>);

impl CertificateCheck for FingerprintCheck {
    fn check_certificate(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &[u8],
        _: UnixTime,
    ) -> Result<(), Error> {
        match self.0 {
            Some(expected) if Fingerprint::from_der(end_entity) != expected => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(()),
        }
    }
}
