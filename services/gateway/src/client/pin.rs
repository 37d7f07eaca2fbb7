//! Getting to know a fleet by the hash of its authority: a first handshake believes nobody and
//! only looks at what is shown; everything after it is verified with what was found.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use authority::{Fingerprint, SERVER_NAME};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

const LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error(
        "reach the gateway at {address}; is the fleet up, and is that address right from here? (G106)"
    )]
    Unreachable {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("speak TLS with the gateway at {address}; is that a closed fleet's gateway? (G106)")]
    Handshake {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the gateway at {address} is another fleet's: its authority is not {wanted}, which the join token is for (it shows {shown}); is the address right, and is nobody in between? (K113)"
    )]
    Other { address: String, wanted: Fingerprint, shown: String },
    #[error("speak TLS with the gateway at {address} (G106)")]
    Setup {
        address: String,
        #[source]
        source: rustls::Error,
    },
}

/// The certificate authority of the gateway at `address`, in PEM, if its hash is the one wanted.
///
/// # Errors
/// When it cannot be reached, or is not that fleet's.
pub async fn fetch_authority(address: &str, wanted: Fingerprint) -> Result<String, PinError> {
    let shown = shown_at(address).await?;
    let found = shown.iter().find(|certificate| Fingerprint::of(certificate) == wanted);
    found.map(|certificate| pem(certificate)).ok_or_else(|| {
        let shown = shown.last().map_or("nothing".into(), |last| Fingerprint::of(last).to_string());
        PinError::Other { address: address.to_owned(), wanted, shown }
    })
}

/// What a server shows, believed by nobody yet.
async fn shown_at(address: &str) -> Result<Vec<CertificateDer<'static>>, PinError> {
    let at = || address.to_owned();
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {LIMIT:?}"));
    let socket = timeout(LIMIT, TcpStream::connect(address)).await;
    let socket = socket
        .unwrap_or_else(|_| Err(late()))
        .map_err(|source| PinError::Unreachable { address: at(), source })?;
    let provider = Arc::new(ring::default_provider());
    let looker = Arc::new(Looker { provider: provider.clone(), shown: Mutex::default() });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| PinError::Setup { address: at(), source })?
        .dangerous()
        .with_custom_certificate_verifier(looker.clone())
        .with_no_client_auth();
    let name = ServerName::try_from(SERVER_NAME).expect("it is a host name");
    let shaking = TlsConnector::from(Arc::new(config)).connect(name, socket);
    let shaken = timeout(LIMIT, shaking).await.unwrap_or_else(|_| Err(late()));
    shaken.map_err(|source| PinError::Handshake { address: at(), source })?;
    Ok(std::mem::take(&mut *looker.shown.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn pem(certificate: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(certificate);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Takes down what is shown, and believes it for the length of one handshake in which nothing is
/// said.
#[derive(Debug)]
struct Looker {
    provider: Arc<CryptoProvider>,
    shown: Mutex<Vec<CertificateDer<'static>>>,
}

impl ServerCertVerifier for Looker {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        let chain = chain.map(|certificate| certificate.clone().into_owned()).collect();
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = chain;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
