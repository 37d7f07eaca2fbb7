//! What the gateway proves itself with.

use std::{io, sync::Arc};

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Tls {
    /// The gateway's own certificate first; the authority that signed it last, so that a box that
    /// joins can compare it with its token.
    pub cert_pem: Vec<u8>,
    pub key_pem: Vec<u8>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("read the gateway's certificate; `flotilla init` makes one (G109)")]
    Certificate(#[source] io::Error),
    #[error("read the key of the gateway's certificate; `flotilla init` makes one (G109)")]
    Key(#[source] io::Error),
    #[error(
        "the gateway's certificate and its key do not go together; `flotilla init` makes both (G109)"
    )]
    Pair(#[source] rustls::Error),
}

pub(crate) fn acceptor(tls: &Tls) -> Result<TlsAcceptor, TlsError> {
    let chain: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(&tls.cert_pem)
        .collect::<Result<_, _>>()
        .map_err(|error| TlsError::Certificate(io::Error::other(error)))?;
    let key = PrivateKeyDer::from_pem_slice(&tls.key_pem)
        .map_err(|error| TlsError::Key(io::Error::other(error)))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?;
    let mut config = builder
        .with_no_client_auth()
        .with_single_cert(owned(chain), key)
        .map_err(TlsError::Pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn owned(chain: Vec<CertificateDer<'_>>) -> Vec<CertificateDer<'static>> {
    chain.into_iter().map(CertificateDer::into_owned).collect()
}
