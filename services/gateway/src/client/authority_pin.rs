//! Fetches a fleet's certificate authority by its hash. The first handshake trusts no certificate
//! and only records the chain; all later connections verify against the authority found in it.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use identity::{CertificateCheck, CertificateVerifier, Fingerprint, SERVER_NAME};
use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

/// The limit of the connection, and again of the handshake.
const LIMIT: Duration = Duration::from_secs(5);

/// A failure to fetch a fleet's certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error(
        "reach the gateway at {address}; check that the fleet is up and the address is correct (G106)"
    )]
    Unreachable {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("TLS with the gateway at {address}; check that its fleet is closed (G106)")]
    Handshake {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the gateway at {address} belongs to another fleet: the join token expects authority {wanted}, it shows {shown}; check the address and for interception (K113)"
    )]
    OtherFleet { address: String, wanted: Fingerprint, shown: String },
    #[error("TLS with the gateway at {address} (G106)")]
    Setup {
        address: String,
        #[source]
        source: rustls::Error,
    },
}

/// Returns the certificate authority of the gateway at `address` in PEM, if its hash is `wanted`.
pub async fn fetch_authority(address: &str, wanted: Fingerprint) -> Result<String, PinError> {
    let shown = fetch_shown_chain(address).await?;
    let found = shown.iter().find(|certificate| Fingerprint::from_der(certificate) == wanted);
    found.map(|certificate| encode_pem(certificate)).ok_or_else(|| {
        let shown =
            shown.last().map_or("nothing".into(), |last| Fingerprint::from_der(last).to_string());
        PinError::OtherFleet { address: address.to_owned(), wanted, shown }
    })
}

/// Returns the chain that a server presents, unverified.
async fn fetch_shown_chain(address: &str) -> Result<Vec<CertificateDer<'static>>, PinError> {
    let at = || address.to_owned();
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {LIMIT:?}"));
    let socket = timeout(LIMIT, TcpStream::connect(address)).await;
    let socket = socket
        .unwrap_or_else(|_| Err(late()))
        .map_err(|source| PinError::Unreachable { address: at(), source })?;
    let provider = Arc::new(ring::default_provider());
    let shown = ChainRecorder::default();
    let verifier = CertificateVerifier::new(shown.clone(), provider.clone());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| PinError::Setup { address: at(), source })?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let name = ServerName::try_from(SERVER_NAME).expect("it is a host name");
    let shaking = TlsConnector::from(Arc::new(config)).connect(name, socket);
    let shaken = timeout(LIMIT, shaking).await.unwrap_or_else(|_| Err(late()));
    shaken.map_err(|source| PinError::Handshake { address: at(), source })?;
    Ok(std::mem::take(&mut *shown.0.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn encode_pem(certificate: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(certificate);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Records the chain and accepts it, for one handshake over which no data is sent.
#[derive(Debug, Default, Clone)]
struct ChainRecorder(Arc<Mutex<Vec<CertificateDer<'static>>>>);

impl CertificateCheck for ChainRecorder {
    fn check_certificate(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &[u8],
        _: UnixTime,
    ) -> Result<(), rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        let chain = chain.map(|certificate| certificate.clone().into_owned()).collect();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = chain;
        Ok(())
    }

    fn requires_key(&self) -> bool {
        false
    }
}
