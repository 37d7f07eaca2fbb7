//! The verifier of certificates that all TLS connections of this workspace share. A
//! [`CertificateCheck`] decides which certificates it accepts.

use std::{fmt, sync::Arc};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

/// A decision which certificates to accept, independent of the server's address.
pub trait CertificateCheck: fmt::Debug + Send + Sync {
    /// Checks the certificate of the other end, its intermediates and its OCSP response, which is
    /// empty for clients.
    fn check_certificate(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<(), Error>;

    /// Returns false if the other end need not prove that it has the certificate's key. Only a
    /// connection without data may do so.
    fn requires_key(&self) -> bool {
        true
    }
}

/// A verifier of servers and clients: the check `C` for certificates, and the signatures of the
/// crypto provider.
#[derive(Debug)]
pub struct CertificateVerifier<C> {
    check: C,
    provider: Arc<CryptoProvider>,
}

impl<C: CertificateCheck> CertificateVerifier<C> {
    /// Creates the verifier in the form that rustls takes.
    pub fn new(check: C, provider: Arc<CryptoProvider>) -> Arc<Self> {
        Arc::new(Self { check, provider })
    }

    fn check_signature(
        &self,
        verify: impl FnOnce() -> Result<HandshakeSignatureValid, Error>,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.check.requires_key() { verify() } else { Ok(HandshakeSignatureValid::assertion()) }
    }
}

/// Implements the methods that [`ServerCertVerifier`] and [`ClientCertVerifier`] have in common.
macro_rules! verify_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let known = &self.provider.signature_verification_algorithms;
            self.check_signature(|| verify_tls12_signature(message, certificate, signature, known))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let known = &self.provider.signature_verification_algorithms;
            self.check_signature(|| verify_tls13_signature(message, certificate, signature, known))
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl<C: CertificateCheck> ServerCertVerifier for CertificateVerifier<C> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check.check_certificate(end_entity, intermediates, ocsp_response, now)?;
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!();
}

impl<C: CertificateCheck> ClientCertVerifier for CertificateVerifier<C> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check.check_certificate(end_entity, intermediates, &[], now)?;
        Ok(ClientCertVerified::assertion())
    }

    verify_signatures!();
}
