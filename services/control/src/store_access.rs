//! Chooses a way to the fleet's store: directly if this machine can reach it, else through the
//! gateway if this process has access to one.

use std::path::Path;

use store::{GatewayStore, OpenError, Store};

/// The possible ways to the fleet's store from this machine.
#[derive(Debug, Clone)]
pub struct StoreAccess {
    /// Address in the fleet's configuration.
    pub url: String,
    /// Address that the user gave; no other way is tried then.
    pub override_url: Option<String>,
    /// Way through the gateway, for a member of the fleet.
    pub gateway: Option<GatewayStore>,
}

/// The reason why the fleet's store cannot be used from this machine.
#[derive(Debug, thiserror::Error)]
pub enum StoreAccessError {
    #[error(
        "the fleet's store is {0}, which is not on this machine; start the fleet with --store \
         s3://…, or mount that directory here, or join the fleet to read through its gateway \
         (S111)"
    )]
    Elsewhere(String),
    #[error("open the fleet's store")]
    Open(#[from] OpenError),
}

impl StoreAccess {
    /// Returns access to a store at this address only.
    pub fn for_url(url: impl Into<String>) -> Self {
        Self { url: url.into(), override_url: None, gateway: None }
    }

    /// Opens the store. Fails if it is on another machine.
    pub async fn open(&self) -> Result<Store, StoreAccessError> {
        // Boxed, because the future of an HTTP client is large, and every future that submits a run
        // contains this one.
        Box::pin(self.open_first_usable()).await
    }

    /// Prefers the user's address, then direct access, then the gateway if direct access lacks
    /// credentials.
    async fn open_first_usable(&self) -> Result<Store, StoreAccessError> {
        if let Some(named) = &self.override_url {
            return Ok(Store::open(named).await?);
        }
        if let Some(directory) = self.url.strip_prefix("file://") {
            return self.open_local_store(directory).await;
        }
        match (Store::open(&self.url).await, &self.gateway) {
            (Err(OpenError::Credentials { .. }), Some(gateway)) => {
                Ok(Store::open_gateway(gateway)?)
            }
            (opened, _) => Ok(opened?),
        }
    }

    /// A local directory of the same name may belong to another machine's store, so a member asks
    /// the gateway for confirmation.
    async fn open_local_store(&self, directory: &str) -> Result<Store, StoreAccessError> {
        let is_here = Path::new(directory).is_dir();
        match &self.gateway {
            None if is_here => Ok(Store::open(&self.url).await?),
            None => Err(StoreAccessError::Elsewhere(self.url.clone())),
            Some(gateway) if is_here && gateway.serves_directory(Path::new(directory)).await => {
                Ok(Store::open(&self.url).await?)
            }
            Some(gateway) => Ok(Store::open_gateway(gateway)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway() -> GatewayStore {
        GatewayStore { gateway: "127.0.0.1:9".into(), ca: None, bearer: None }
    }

    // The gateway is asked for ten seconds, which pass at once.
    #[tokio::test(start_paused = true)]
    async fn a_directory_that_is_not_the_gateways_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("file://{}", directory.path().display());
        let open = StoreAccess::for_url(&url).open().await.unwrap();
        assert_eq!(open.url(), url);
        let member = StoreAccess { gateway: Some(gateway()), ..StoreAccess::for_url(&url) };
        assert_eq!(member.open().await.unwrap().url(), "http://127.0.0.1:9/store");
        let told = StoreAccess { override_url: Some(url.clone()), ..member };
        assert_eq!(told.open().await.unwrap().url(), url);
    }

    #[tokio::test]
    async fn what_is_elsewhere_is_reached_through_the_gateway_or_said_to_be() {
        let stores = StoreAccess::for_url("file:///nowhere/at/all");
        assert!(matches!(stores.open().await, Err(StoreAccessError::Elsewhere(_))));
        let member = StoreAccess { gateway: Some(gateway()), ..stores };
        assert_eq!(member.open().await.unwrap().url(), "http://127.0.0.1:9/store");
    }
}
