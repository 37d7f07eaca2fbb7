//! The ways from here to a fleet's store, and which is taken: itself where it can be used, else
//! the gateway, where this is a member that may pass it.

use std::path::Path;

use store::{Door, OpenError, Store};

/// Where a fleet's store may be found from here.
#[derive(Debug, Clone)]
pub struct Stores {
    /// As the fleet says it.
    pub url: String,
    /// Where the user says it is from here; nothing else is tried then.
    pub named: Option<String>,
    /// This member's way through the gateway.
    pub door: Option<Door>,
}

/// The fleet's store cannot be used from here.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "the fleet's store is {0}, which is not on this machine; start the fleet with \
         --store s3://…, or mount that directory here, or join the fleet, whose gateway then \
         hands its files on (S111)"
    )]
    Elsewhere(String),
    #[error("open the fleet's store")]
    Open(#[from] OpenError),
}

impl Stores {
    /// There, or nowhere.
    pub fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), named: None, door: None }
    }

    /// Opens the store.
    ///
    /// # Errors
    /// When it is elsewhere, or cannot be set up.
    pub async fn open(&self) -> Result<Store, StoreError> {
        // Boxed, for a client of HTTP is deep, and all that submits a run holds one of these.
        Box::pin(self.choose()).await
    }

    async fn choose(&self) -> Result<Store, StoreError> {
        if let Some(named) = &self.named {
            return Ok(Store::open(named).await?);
        }
        if let Some(directory) = self.url.strip_prefix("file://") {
            return self.open_directory(directory).await;
        }
        match (Store::open(&self.url).await, &self.door) {
            (Err(OpenError::Credentials { .. }), Some(door)) => Ok(Store::through(door)?),
            (opened, _) => Ok(opened?),
        }
    }

    /// A directory of that name here may be another machine's store, or one's that is gone: a
    /// member asks the gateway which it is.
    async fn open_directory(&self, directory: &str) -> Result<Store, StoreError> {
        let is_here = Path::new(directory).is_dir();
        match &self.door {
            None if is_here => Ok(Store::open(&self.url).await?),
            None => Err(StoreError::Elsewhere(self.url.clone())),
            Some(door) if is_here && door.leads_to(Path::new(directory)).await => {
                Ok(Store::open(&self.url).await?)
            }
            Some(door) => Ok(Store::through(door)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door() -> Door {
        Door { gateway: "127.0.0.1:9".into(), ca: None, bearer: None }
    }

    #[tokio::test]
    async fn a_directory_that_is_not_the_gateways_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("file://{}", directory.path().display());
        let open = Stores::at(&url).open().await.unwrap();
        assert_eq!(open.url(), url);
        let member = Stores { door: Some(door()), ..Stores::at(&url) };
        assert_eq!(member.open().await.unwrap().url(), "http://127.0.0.1:9/store");
        let told = Stores { named: Some(url.clone()), ..member };
        assert_eq!(told.open().await.unwrap().url(), url);
    }

    #[tokio::test]
    async fn what_is_elsewhere_is_reached_through_the_gateway_or_said_to_be() {
        let stores = Stores::at("file:///nowhere/at/all");
        assert!(matches!(stores.open().await, Err(StoreError::Elsewhere(_))));
        let member = Stores { door: Some(door()), ..stores };
        assert_eq!(member.open().await.unwrap().url(), "http://127.0.0.1:9/store");
    }
}
