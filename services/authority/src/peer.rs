//! How agents of a fleet know each other when they exchange files: each makes a key and a
//! certificate when it starts and says their fingerprint on the bus, under its own name. Both ends
//! of a connection show theirs; whose it is, is looked up there. No authority signs anything, and
//! nothing is kept.

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

#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("make a key for exchanging files (K112)")]
    Key(#[from] rcgen::Error),
    #[error("use a key for exchanging files (K112)")]
    Tls(#[from] Error),
}

/// Who an agent is to its peers, for as long as it runs.
#[derive(Debug)]
pub struct PeerIdentity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl PeerIdentity {
    /// # Errors
    /// When no key can be made.
    pub fn new() -> Result<Self, PeerError> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([SERVER_NAME.to_owned()])?.self_signed(&key)?;
        let (certificate, key) = (certificate.der().clone(), key.serialize_der());
        let key = PrivateKeyDer::Pkcs8(key.into());
        Ok(Self { certificate, key, provider: Arc::new(ring::default_provider()) })
    }

    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// Answers whoever has a certificate: whose it is, is asked when a request comes. Nothing is
    /// resumed, for who was let in may be out by then.
    ///
    /// # Errors
    /// When the key cannot be used.
    pub fn server(&self) -> Result<ServerConfig, PeerError> {
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier = Arc::new(OwnersOfKeys { provider: self.provider.clone(), only: None });
        let mut config = builder
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Speaks to the owner of that certificate and nobody else.
    ///
    /// # Errors
    /// When the key cannot be used.
    pub fn client(&self, of: Fingerprint) -> Result<ClientConfig, PeerError> {
        let builder = ClientConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let verifier = Arc::new(OwnersOfKeys { provider: self.provider.clone(), only: Some(of) });
        let mut config = builder
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// That whoever shows a certificate has its key is always checked; who it is, by fingerprint.
#[derive(Debug)]
struct OwnersOfKeys {
    provider: Arc<CryptoProvider>,
    only: Option<Fingerprint>,
}

impl OwnersOfKeys {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match self.only {
            Some(only) if Fingerprint::of(certificate) != only => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(()),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let known = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS 1.2 is not offered.
fn too_old() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled))
}

impl ServerCertVerifier for OwnersOfKeys {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for OwnersOfKeys {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}
