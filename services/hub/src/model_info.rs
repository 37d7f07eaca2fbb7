//! The hub's description of a model at a revision.

use serde::Deserialize;
use serde_json::Value;

use crate::{
    HubClient, HubError, ModelRevision,
    error::RequestError,
    hub_http::{HubHttp, encode_component},
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModelInfo {
    /// The repository's name, which is another one after it was renamed.
    #[serde(default)]
    id: String,
    /// The commit.
    pub(crate) sha: String,
    #[serde(default)]
    pub(crate) private: bool,
    #[serde(default)]
    siblings: Vec<ModelSibling>,
    /// The metadata at the start of the model's card.
    #[serde(default)]
    card_data: Value,
}

/// The license that a model's card names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLicense {
    /// Such as `apache-2.0`, or `other`.
    pub id: String,
    /// Set for `other`.
    pub name: Option<String>,
    /// The address of its text.
    pub link: Option<String>,
}

#[derive(Deserialize)]
struct ModelSibling {
    rfilename: String,
}

impl ModelInfo {
    pub(crate) fn file_names(&self) -> impl Iterator<Item = &str> {
        self.siblings.iter().map(|file| file.rfilename.as_str())
    }

    /// Returns the new name of a repository that was renamed.
    pub(crate) fn new_name_of(&self, repo: &str) -> Option<&str> {
        let is_new = !self.id.is_empty() && !self.id.eq_ignore_ascii_case(repo);
        is_new.then_some(self.id.as_str())
    }
}

pub(crate) async fn read_model_info(
    http: &HubHttp,
    repo: &str,
    revision: &str,
) -> Result<ModelInfo, RequestError> {
    let path = format!("api/models/{repo}/revision/{}", encode_component(revision));
    http.get_json(http.hub_url(&path)).await
}

impl HubClient {
    /// Returns the license that a model's card names.
    ///
    /// # Errors
    /// The hub does not have the model, refuses, or cannot be asked.
    pub async fn find_license(
        &self,
        model: &ModelRevision,
    ) -> Result<Option<ModelLicense>, HubError> {
        let ModelRevision { repo, commit } = model;
        let found = read_model_info(self.http().await?, repo, commit).await;
        let info =
            found.map_err(|error| HubError::for_download(&format!("the card of {repo}"), error))?;
        let text = |key: &str| info.card_data[key].as_str().map(str::to_owned);
        let link = text("license_link").filter(|link| link.starts_with("https://"));
        Ok(text("license").map(|id| ModelLicense { id, name: text("license_name"), link }))
    }
}
