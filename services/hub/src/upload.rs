//! Uploads of files to a model of the hub. The hub decides which files go to large file storage;
//! the others are a part of the request that makes the commit.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use data_encoding::BASE64;
use reqwest::{Method, StatusCode, header::CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{fs, fs::File, io::AsyncReadExt, time::timeout};

use crate::{
    HubClient, HubError, ModelId,
    client::revision_of,
    error::RequestError,
    git_lfs::{LfsObject, upload_objects},
    hub_http::{HubHttp, check_status, encode_component, read_json, send},
    repo_cache::is_file_path,
};

/// The hub looks at the start of a file to decide how to store it.
const SAMPLE_BYTES: u64 = 512;
const PREUPLOAD_FILES_MAX: usize = 256;
/// The limit of all files within one commit request, which is in memory.
const INLINE_BYTES_MAX: u64 = 64 << 20;
/// The hub checks a commit before it answers.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(600);

/// A file to upload.
#[derive(Debug, Clone)]
pub struct UploadFile {
    /// Its path in the repository.
    pub name: String,
    pub source: PathBuf,
}

#[derive(Deserialize)]
struct PreuploadAnswer {
    files: Vec<PreuploadFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PreuploadFile {
    path: String,
    upload_mode: UploadMethod,
    /// By the repository's `.gitignore`.
    #[serde(default)]
    should_ignore: bool,
}

#[derive(PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum UploadMethod {
    Lfs,
    Regular,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CommitAnswer {
    commit_oid: String,
}

impl HubClient {
    /// Creates a model's repository, unless it exists.
    pub async fn create_repository(&self, repo: &str, is_private: bool) -> Result<(), HubError> {
        let http = self.http().await?;
        let (organization, name) = repo.split_once('/').unwrap_or(("", repo));
        let body = json!({
            "type": "model", "organization": organization, "name": name, "private": is_private,
        });
        let request = http.start_request(Method::POST, http.hub_url("api/repos/create"));
        let answered = async {
            let response = send(request.json(&body)).await?;
            let exists = response.status() == StatusCode::CONFLICT;
            if exists { Ok(()) } else { check_status(response).await.map(drop) }
        };
        answered.await.map_err(|error| HubError::for_upload(repo, error))
    }

    /// Uploads files to a branch of a repository in one commit, and returns the commit. Bytes that
    /// the hub's large file storage has are not sent again.
    pub async fn upload_files(
        &self,
        id: &ModelId,
        message: &str,
        files: &[UploadFile],
    ) -> Result<String, HubError> {
        let http = self.http().await?;
        let uploaded = upload_commit(http, id, message, files).await;
        uploaded.map_err(|error| HubError::for_upload(&id.to_string(), error))
    }
}

async fn upload_commit(
    http: &HubHttp,
    id: &ModelId,
    message: &str,
    files: &[UploadFile],
) -> Result<String, RequestError> {
    let revision = revision_of(id);
    let mut commit = CommitBody::new(message);
    let mut objects = Vec::new();
    for batch in files.chunks(PREUPLOAD_FILES_MAX) {
        let plans = plan_uploads(http, &id.repo, revision, batch).await?;
        for UploadFile { name, source } in batch {
            let plan = plans.get(name).ok_or("it does not say how to upload a file")?;
            if plan.should_ignore {
                continue;
            }
            let size = fs::metadata(source).await?.len();
            // Large file storage has no empty objects.
            if plan.upload_mode == UploadMethod::Lfs && size > 0 {
                let object = LfsObject::from_file(source, size).await?;
                commit.push_object(name, &object);
                objects.push(object);
            } else {
                commit.push_file(name, source).await?;
            }
        }
    }
    upload_objects(http, &id.repo, revision, &objects).await?;
    let url =
        http.hub_url(&format!("api/models/{}/commit/{}", id.repo, encode_component(revision)));
    let request = http.start_request(Method::POST, url);
    let request = request.header(CONTENT_TYPE, "application/x-ndjson").body(commit.lines);
    let response = timeout(COMMIT_TIMEOUT, request.send()).await;
    let late = |_| format!("it did not commit within {} s", COMMIT_TIMEOUT.as_secs());
    let answer: CommitAnswer = read_json(response.map_err(late)??).await?;
    Ok(answer.commit_oid)
}

/// Asks the hub how to upload files; they are by path.
async fn plan_uploads(
    http: &HubHttp,
    repo: &str,
    revision: &str,
    files: &[UploadFile],
) -> Result<BTreeMap<String, PreuploadFile>, RequestError> {
    let mut described = Vec::new();
    for UploadFile { name, source } in files {
        if !is_file_path(name) {
            return Err(format!("{name:?} is not the path of a file").into());
        }
        let (sample, size) = read_sample(source).await?;
        described.push(json!({ "path": name, "size": size, "sample": BASE64.encode(&sample) }));
    }
    let path = format!("api/models/{repo}/preupload/{}", encode_component(revision));
    let request = http.start_request(Method::POST, http.hub_url(&path));
    let response = send(request.json(&json!({ "files": described }))).await?;
    let answer: PreuploadAnswer = read_json(response).await?;
    Ok(answer.files.into_iter().map(|file| (file.path.clone(), file)).collect())
}

async fn read_sample(path: &Path) -> io::Result<(Vec<u8>, u64)> {
    let file = File::open(path).await?;
    let size = file.metadata().await?.len();
    let mut sample = Vec::new();
    file.take(SAMPLE_BYTES).read_to_end(&mut sample).await?;
    Ok((sample, size))
}

/// The request that makes a commit: a line of JSON for its message, and one for each file.
struct CommitBody {
    lines: String,
    inline_bytes: u64,
}

impl CommitBody {
    fn new(message: &str) -> Self {
        let mut body = Self { lines: String::new(), inline_bytes: 0 };
        body.push_line("header", &json!({ "summary": message, "description": "" }));
        body
    }

    fn push_line(&mut self, key: &str, value: &Value) {
        self.lines.push_str(&json!({ "key": key, "value": value }).to_string());
        self.lines.push('\n');
    }

    fn push_object(&mut self, name: &str, LfsObject { sha256, size, .. }: &LfsObject) {
        let value = json!({ "path": name, "algo": "sha256", "oid": sha256, "size": size });
        self.push_line("lfsFile", &value);
    }

    async fn push_file(&mut self, name: &str, source: &Path) -> Result<(), RequestError> {
        let room = INLINE_BYTES_MAX - self.inline_bytes;
        let mut bytes = Vec::new();
        File::open(source).await?.take(room + 1).read_to_end(&mut bytes).await?;
        if bytes.len() as u64 > room {
            return Err(format!("{name} and the files before it are too large").into());
        }
        self.inline_bytes += bytes.len() as u64;
        let content = BASE64.encode(&bytes);
        let value = json!({ "path": name, "encoding": "base64", "content": content });
        self.push_line("file", &value);
        Ok(())
    }
}
