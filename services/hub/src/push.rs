//! Pushes of files to a branch of a model's repository, in one commit. The branch is read when a
//! push is opened; if it has another commit when the files are sent, nothing is changed.

use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::Method;
use serde::Serialize;
use serde_json::json;

use crate::{
    HubClient, HubError, ModelId,
    client::revision_of,
    error::RequestError,
    git_lfs::{SentCallback, upload_objects},
    hub_http::{HubHttp, check_status, encode_component, send},
    model_info::{ModelInfo, read_model_info},
    retry::retry_request,
    upload::{UploadFile, find_changes, send_commit},
};

/// The file that the hub writes to a new repository.
const NEW_REPOSITORY_FILE: &str = ".gitattributes";
/// One step creates the repository, and one the branch.
const OPEN_STEPS_MAX: usize = 3;

/// A branch to push to, as it was when the push was opened.
#[derive(Debug, Clone)]
pub struct PushTarget {
    /// With the branch as its revision.
    id: ModelId,
    /// A repository that the push creates is private.
    is_private: bool,
    /// The branch's commit; `None` if it does not exist.
    head: Option<String>,
}

/// Files to push.
pub struct PushRequest<'a> {
    pub message: &'a str,
    pub files: &'a [UploadFile],
    /// Returns true for a file that is removed from the branch if the push does not contain it.
    pub is_replaced: fn(&str) -> bool,
    pub sent: SentCallback,
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PushOutcome {
    /// The branch's page.
    pub url: String,
    /// The branch's commit.
    pub commit: String,
    /// False if the branch had all files already.
    pub is_new: bool,
    /// Files that differed from those on the branch.
    pub changed: Vec<String>,
    pub removed: Vec<String>,
}

enum BranchState {
    NoRepository,
    NoBranch,
    Head(ModelInfo),
}

impl HubClient {
    /// Reads the branch that the id names, by default `main`. Changes nothing.
    ///
    /// # Errors
    /// There is no token, the hub refuses it, the repository has another name now, or it is public and
    /// should be private.
    pub async fn open_push(&self, id: &ModelId, is_private: bool) -> Result<PushTarget, HubError> {
        let failed = |error| HubError::for_upload(&id.to_string(), error);
        let http = self.http().await?;
        if !http.has_token() {
            return Err(HubError::NoToken);
        }
        let branch = retry_request(async || read_branch(http, id).await).await.map_err(failed)?;
        if is_private {
            let is_public = retry_request(async || is_public(http, id, &branch).await).await;
            if is_public.map_err(failed)? {
                return Err(HubError::Public { what: id.repo.clone() });
            }
        }
        let head = match branch {
            BranchState::Head(info) => {
                if let Some(name) = info.new_name_of(&id.repo) {
                    return Err(HubError::Renamed { what: id.repo.clone(), name: name.to_owned() });
                }
                Some(info.sha)
            }
            BranchState::NoRepository | BranchState::NoBranch => None,
        };
        Ok(PushTarget { id: id.clone(), is_private, head })
    }

    /// Sends the files that differ from those on the branch, and commits them. Creates the
    /// repository and the branch if they do not exist. Bytes that the hub's large file storage has
    /// are not sent again.
    ///
    /// # Errors
    /// The branch has another commit than when the push was opened, the hub refuses, or it fails
    /// repeatedly. The branch is as it was then.
    pub async fn push_files(
        &self,
        target: &PushTarget,
        request: &PushRequest<'_>,
    ) -> Result<PushOutcome, HubError> {
        let http = self.http().await?;
        // After an answer to the commit is lost, the next attempt finds that nothing differs.
        let has_created = AtomicBool::new(false);
        let pushed = retry_request(async || push_once(http, target, request, &has_created).await);
        let pushed = pushed.await;
        pushed.map_err(|error| HubError::for_upload(&target.id.to_string(), error))
    }
}

async fn push_once(
    http: &HubHttp,
    PushTarget { id, is_private, head }: &PushTarget,
    PushRequest { message, files, is_replaced, sent }: &PushRequest<'_>,
    has_created: &AtomicBool,
) -> Result<PushOutcome, RequestError> {
    let info = open_branch(http, id, *is_private, has_created).await?;
    if *is_private && !info.private {
        return Err(RequestError::Public);
    }
    let is_pushed = |name: &str| files.iter().any(|file| file.name == name);
    let removed = info.file_names().filter(|name| is_replaced(name) && !is_pushed(name));
    let removed: Vec<String> = removed.map(str::to_owned).collect();
    let is_empty = info.file_names().all(|name| name == NEW_REPOSITORY_FILE);
    let changes = find_changes(http, id, files).await?;
    let page = format!("{}/tree/{}", id.repo, encode_component(revision_of(id)));
    let mut outcome = PushOutcome {
        url: http.hub_url(&page).to_string(),
        is_new: head.as_ref() != Some(&info.sha),
        commit: info.sha,
        changed: changes.names().map(str::to_owned).collect(),
        removed,
    };
    if outcome.changed.is_empty() && outcome.removed.is_empty() {
        return Ok(outcome);
    }
    let is_same = match head {
        Some(head) => *head == outcome.commit,
        // The answer to its creation may be lost.
        None => is_empty || has_created.load(Ordering::Relaxed),
    };
    if !is_same {
        return Err(RequestError::Conflict);
    }
    upload_objects(http, &id.repo, revision_of(id), &changes.objects, sent).await?;
    let body = changes.commit_body(message, &outcome.commit, &outcome.removed);
    outcome.commit = send_commit(http, id, body).await?;
    outcome.is_new = true;
    Ok(outcome)
}

/// Returns the branch, which is created if it does not exist. Sets `has_created` if this push has
/// created it.
async fn open_branch(
    http: &HubHttp,
    id: &ModelId,
    is_private: bool,
    has_created: &AtomicBool,
) -> Result<ModelInfo, RequestError> {
    for _ in 0..OPEN_STEPS_MAX {
        let is_new = match read_branch(http, id).await? {
            BranchState::Head(info) => return Ok(info),
            BranchState::NoRepository => create_repository(http, &id.repo, is_private).await?,
            BranchState::NoBranch => create_branch(http, id).await?,
        };
        has_created.fetch_or(is_new, Ordering::Relaxed);
    }
    Err("it does not show the branch that it created".into())
}

async fn read_branch(http: &HubHttp, id: &ModelId) -> Result<BranchState, RequestError> {
    match read_model_info(http, &id.repo, revision_of(id)).await {
        Ok(info) => Ok(BranchState::Head(info)),
        Err(RequestError::Answer(answer)) if answer.code == "RevisionNotFound" => {
            Ok(BranchState::NoBranch)
        }
        Err(RequestError::Answer(answer)) if answer.is_missing() => Ok(BranchState::NoRepository),
        Err(error) => Err(error),
    }
}

async fn is_public(
    http: &HubHttp,
    id: &ModelId,
    branch: &BranchState,
) -> Result<bool, RequestError> {
    match branch {
        BranchState::NoRepository => Ok(false),
        BranchState::Head(info) => Ok(!info.private),
        BranchState::NoBranch => {
            let default = ModelId { repo: id.repo.clone(), revision: None };
            let default = read_branch(http, &default).await?;
            Ok(matches!(default, BranchState::Head(info) if !info.private))
        }
    }
}

/// Creates a model's repository. Returns false if it exists.
async fn create_repository(
    http: &HubHttp,
    repo: &str,
    is_private: bool,
) -> Result<bool, RequestError> {
    let (organization, name) = repo.split_once('/').unwrap_or(("", repo));
    let body = json!({
        "type": "model", "organization": organization, "name": name, "private": is_private,
    });
    let request = http.start_request(Method::POST, http.hub_url("api/repos/create"));
    accept_existing(send(request.json(&body)).await?).await
}

/// Creates a branch at the head of the default branch. Returns false if it exists.
async fn create_branch(http: &HubHttp, id: &ModelId) -> Result<bool, RequestError> {
    let branch = encode_component(revision_of(id));
    let url = http.hub_url(&format!("api/models/{}/branch/{branch}", id.repo));
    accept_existing(send(http.start_request(Method::POST, url).json(&json!({}))).await?).await
}

async fn accept_existing(response: reqwest::Response) -> Result<bool, RequestError> {
    let exists = response.status() == reqwest::StatusCode::CONFLICT;
    if exists { Ok(false) } else { check_status(response).await.map(|_| true) }
}
