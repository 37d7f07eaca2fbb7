//! The TLS identity of the gateway.

use std::{io, sync::Arc};

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

/// A certificate chain and its key in PEM.
#[derive(Clone)]
pub struct GatewayTls {
    /// The gateway's certificate first and its authority last, with which a joining box compares
    /// the hash in its token.
    pub cert_pem: Vec<u8>,
    pub key_pem: Vec<u8>,
}

impl std::fmt::Debug for GatewayTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// An unusable certificate or key.
#[derive(Debug, thiserror::Error)]
pub enum GatewayTlsError {
    #[error("read the gateway's certificate; create one with `flotilla init` (G109)")]
    Certificate(#[source] io::Error),
    #[error("read the key of the gateway's certificate; create one with `flotilla init` (G109)")]
    Key(#[source] io::Error),
    #[error(
        "the gateway's certificate and key do not match; create both with `flotilla init` (G109)"
    )]
    Pair(#[source] rustls::Error),
}

/// Builds an acceptor for HTTP/2 and HTTP/1.1 without client certificates.
pub(crate) fn build_acceptor(tls: &GatewayTls) -> Result<TlsAcceptor, GatewayTlsError> {
    let chain: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(&tls.cert_pem)
        .collect::<Result<_, _>>()
        .map_err(|error| GatewayTlsError::Certificate(io::Error::other(error)))?;
    let key = PrivateKeyDer::from_pem_slice(&tls.key_pem)
        .map_err(|error| GatewayTlsError::Key(io::Error::other(error)))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(GatewayTlsError::Pair)?;
    let mut config = builder
        .with_no_client_auth()
        .with_single_cert(into_owned_chain(chain), key)
        .map_err(GatewayTlsError::Pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn into_owned_chain(chain: Vec<CertificateDer<'_>>) -> Vec<CertificateDer<'static>> {
    chain.into_iter().map(CertificateDer::into_owned).collect()
}
