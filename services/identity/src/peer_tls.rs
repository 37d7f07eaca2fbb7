//! TLS between agents that exchange files.
//!
//! Each agent creates a key and a certificate when it starts, and announces its fingerprint on the
//! bus under its own name. Both ends of a connection present their certificates; the fingerprint
//! identifies the owner. No authority signs these certificates, and they are not stored.

use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
    client::Resumption,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    version::TLS13,
};

use crate::{Fingerprint, SERVER_NAME};

/// The reason why no key for the exchange of files could be created or used.
#[derive(Debug, thiserror::Error)]
pub enum PeerTlsError {
    #[error("make a key for exchanging files (K112)")]
    Key(#[from] rcgen::Error),
    #[error("use a key for exchanging files (K112)")]
    Tls(#[from] Error),
}

/// The key and certificate of an agent towards its peers, for the lifetime of the process.
#[derive(Debug)]
pub struct PeerIdentity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl PeerIdentity {
    /// Creates a key and a self-signed certificate.
    ///
    /// # Errors
    /// Fails if no key can be created.
    pub fn new() -> Result<Self, PeerTlsError> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([SERVER_NAME.to_owned()])?.self_signed(&key)?;
        let (certificate, key) = (certificate.der().clone(), key.serialize_der());
        let key = PrivateKeyDer::Pkcs8(key.into());
        Ok(Self { certificate, key, provider: Arc::new(ring::default_provider()) })
    }

    /// Returns the fingerprint of the certificate.
    pub fn own_fingerprint(&self) -> Fingerprint {
        Fingerprint::from_der(&self.certificate)
    }

    /// Returns the TLS configuration to serve peers. It accepts any client certificate; its owner
    /// is looked up for each request. Sessions are not resumed, because the client may have been
    /// revoked meanwhile.
    ///
    /// # Errors
    /// Fails if the key cannot be used.
    pub fn server_config(&self) -> Result<ServerConfig, PeerTlsError> {
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier =
            Arc::new(FingerprintVerifier { provider: self.provider.clone(), expected: None });
        let mut config = builder
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Returns the TLS configuration to connect to the owner of one certificate only.
    ///
    /// # Errors
    /// Fails if the key cannot be used.
    pub fn client_config(&self, of: Fingerprint) -> Result<ClientConfig, PeerTlsError> {
        let builder = ClientConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier =
            Arc::new(FingerprintVerifier { provider: self.provider.clone(), expected: Some(of) });
        let mut config = builder
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// A certificate verifier that checks possession of the key and, if `only` is set, the fingerprint.
#[derive(Debug)]
struct FingerprintVerifier {
    provider: Arc<CryptoProvider>,
    expected: Option<Fingerprint>,
}

impl FingerprintVerifier {
    /// Checks the fingerprint, if one is expected.
    fn check_fingerprint(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match self.expected {
            Some(only) if Fingerprint::from_der(certificate) != only => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(()),
        }
    }

    /// Verifies a TLS 1.3 signature.
    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let known = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    /// Returns the supported signature schemes.
    fn supported_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Rejects TLS 1.2, which is not offered.
fn reject_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled))
}

impl ServerCertVerifier for FingerprintVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check_fingerprint(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        reject_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.supported_schemes()
    }
}

impl ClientCertVerifier for FingerprintVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check_fingerprint(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        reject_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.supported_schemes()
    }
}
