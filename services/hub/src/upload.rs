//! The files of a push that differ from those on the hub, and the request that commits them. The
//! hub decides which files go to large file storage; the others are a part of that request.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use data_encoding::{BASE64, HEXLOWER};
use reqwest::{Method, header::CONTENT_TYPE};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{fs, fs::File, io::AsyncReadExt, time::timeout};

use crate::{
    ModelId,
    client::revision_of,
    error::RequestError,
    git_lfs::LfsObject,
    hub_http::{HubHttp, encode_component, read_json, send},
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
    /// Git's id of the file on the branch, or the SHA-256 if it is in large file storage.
    oid: Option<String>,
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

/// The files that differ from those on the branch.
#[derive(Default)]
pub(crate) struct FileChanges {
    /// For large file storage.
    pub(crate) objects: Vec<LfsObject>,
    /// Names and contents.
    inline: Vec<(String, Vec<u8>)>,
}

impl FileChanges {
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let objects = self.objects.iter().map(|object| object.name.as_str());
        objects.chain(self.inline.iter().map(|(name, _)| name.as_str()))
    }

    /// Returns the request that makes a commit: a line of JSON for its message, and one for each
    /// file.
    pub(crate) fn commit_body(&self, message: &str, parent: &str, removed: &[String]) -> String {
        let header = json!({ "summary": message, "description": "", "parentCommit": parent });
        let mut body = commit_line("header", &header);
        for LfsObject { name, sha256, size, .. } in &self.objects {
            let value = json!({ "path": name, "algo": "sha256", "oid": sha256, "size": size });
            body.push_str(&commit_line("lfsFile", &value));
        }
        for (name, bytes) in &self.inline {
            let content = BASE64.encode(bytes);
            let value = json!({ "path": name, "encoding": "base64", "content": content });
            body.push_str(&commit_line("file", &value));
        }
        for name in removed {
            body.push_str(&commit_line("deletedFile", &json!({ "path": name })));
        }
        body
    }

    async fn read_inline(&self, name: &str, source: &Path) -> Result<Vec<u8>, RequestError> {
        let used: usize = self.inline.iter().map(|(_, bytes)| bytes.len()).sum();
        let room = INLINE_BYTES_MAX - used as u64;
        let mut bytes = Vec::new();
        File::open(source).await?.take(room + 1).read_to_end(&mut bytes).await?;
        if bytes.len() as u64 > room {
            return Err(format!("{name} and the files before it are too large").into());
        }
        Ok(bytes)
    }
}

fn commit_line(key: &str, value: &Value) -> String {
    format!("{}\n", json!({ "key": key, "value": value }))
}

/// Returns the files that differ from those on the branch.
pub(crate) async fn find_changes(
    http: &HubHttp,
    id: &ModelId,
    files: &[UploadFile],
) -> Result<FileChanges, RequestError> {
    let mut changes = FileChanges::default();
    for batch in files.chunks(PREUPLOAD_FILES_MAX) {
        let plans = plan_uploads(http, id, batch).await?;
        for UploadFile { name, source } in batch {
            let plan = plans.get(name).ok_or("it does not say how to upload a file")?;
            if plan.should_ignore {
                continue;
            }
            let size = fs::metadata(source).await?.len();
            // Large file storage has no empty objects.
            if plan.upload_mode == UploadMethod::Lfs && size > 0 {
                let object = LfsObject::from_file(name, source, size).await?;
                if plan.oid.as_ref() != Some(&object.sha256) {
                    changes.objects.push(object);
                }
            } else {
                let bytes = changes.read_inline(name, source).await?;
                if plan.oid.as_ref() != Some(&git_blob_id(&bytes)) {
                    changes.inline.push((name.clone(), bytes));
                }
            }
        }
    }
    Ok(changes)
}

fn git_blob_id(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", bytes.len()).as_bytes());
    context.update(bytes);
    HEXLOWER.encode(context.finish().as_ref())
}

/// Asks the hub how to upload files; they are by path.
async fn plan_uploads(
    http: &HubHttp,
    id: &ModelId,
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
    let path = format!("api/models/{}/preupload/{}", id.repo, encode_component(revision_of(id)));
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

/// Commits to the branch that the id names, and returns the commit.
pub(crate) async fn send_commit(
    http: &HubHttp,
    id: &ModelId,
    body: String,
) -> Result<String, RequestError> {
    let path = format!("api/models/{}/commit/{}", id.repo, encode_component(revision_of(id)));
    let request = http.start_request(Method::POST, http.hub_url(&path));
    let request = request.header(CONTENT_TYPE, "application/x-ndjson").body(body);
    let response = timeout(COMMIT_TIMEOUT, request.send()).await;
    let late = |_| format!("it did not commit within {} s", COMMIT_TIMEOUT.as_secs());
    match read_json::<CommitAnswer>(response.map_err(late)??).await {
        Ok(answer) => Ok(answer.commit_oid),
        // The parent is no longer the branch's commit, or another commit is under way.
        Err(RequestError::Answer(answer)) if [409, 412].contains(&answer.status) => {
            Err(RequestError::Conflict)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_id_that_git_gives_it() {
        assert_eq!(git_blob_id(b"{}"), "9e26dfeeb6e641a33dae4961196235bdb965b21b");
    }
}
