//! What the hub answers to those who ask for data sets.

use std::{fs, path::PathBuf};

use hyper::{Response, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    COMMIT, CONVERTED_COMMIT, HubRequest, HubResponse, HubState, LFS_BYTES, branches,
    downloads::{git_blob_id, sha256_hex},
    not_found, respond_empty, respond_json,
};

/// The size that a file of large file storage has in Git.
const POINTER_BYTES: usize = 100;
/// Repositories whose names begin so need a token.
const PRIVATE_PREFIX: &str = "private-";

impl HubState {
    /// Describes a revision with the names and sizes of its files.
    pub(crate) fn list_dataset(
        &self,
        repo: [&str; 2],
        revision: &str,
        request: &HubRequest,
    ) -> HubResponse {
        let (directory, commit) = match self.find_revision(repo, revision, request) {
            Ok(found) => found,
            Err(refusal) => return *refusal,
        };
        let names = branches::list_files(&directory).unwrap_or_default();
        let hides_sizes = self.records().hides_sizes;
        let files = names.iter().map(|name| {
            if hides_sizes {
                return json!({ "rfilename": name });
            }
            let bytes = fs::read(directory.join(name)).unwrap_or_default();
            let mut file =
                json!({ "rfilename": name, "size": bytes.len(), "blobId": git_blob_id(&bytes) });
            if bytes.len() >= LFS_BYTES {
                let (sha256, size) = (sha256_hex(&bytes), bytes.len());
                file["lfs"] =
                    json!({ "sha256": sha256, "size": size, "pointerSize": POINTER_BYTES });
            }
            file
        });
        let files: Vec<Value> = files.collect();
        let id = repo.join("/");
        let answer = json!({ "id": id, "sha": commit, "private": false, "siblings": files });
        respond_json(&answer)
    }

    /// Lists all files of a revision.
    pub(crate) fn list_dataset_tree(
        &self,
        repo: [&str; 2],
        revision: &str,
        request: &HubRequest,
    ) -> HubResponse {
        match self.find_revision(repo, revision, request) {
            Ok((directory, _)) => branches::describe_tree(&directory),
            Err(refusal) => *refusal,
        }
    }

    pub(crate) fn describe_dataset_file(
        &self,
        repo: [&str; 2],
        revision: &str,
        file: &str,
        request: &HubRequest,
    ) -> HubResponse {
        match self.find_revision(repo, revision, request) {
            Ok((directory, commit)) => self.describe_file(&directory, commit, file, request),
            Err(refusal) => *refusal,
        }
    }

    /// Returns the directory and the commit of a revision.
    fn find_revision(
        &self,
        [org, name]: [&str; 2],
        revision: &str,
        request: &HubRequest,
    ) -> Result<(PathBuf, &'static str), Box<HubResponse>> {
        let has_token = request.head.headers.contains_key(header::AUTHORIZATION);
        if name.starts_with(PRIVATE_PREFIX) && !has_token {
            let answer = Response::builder().status(StatusCode::UNAUTHORIZED);
            return Err(Box::new(respond_empty(answer.header("x-error-code", "RepoNotFound"))));
        }
        let organisation = self.models.join("datasets").join(org);
        let directory = organisation.join(name);
        if !directory.is_dir() {
            return Err(Box::new(not_found("RepoNotFound")));
        }
        let converted = organisation.join(format!("{name}.parquet"));
        match revision {
            branches::MAIN | COMMIT => Ok((directory, COMMIT)),
            "refs%2Fconvert%2Fparquet" | CONVERTED_COMMIT if converted.is_dir() => {
                Ok((converted, CONVERTED_COMMIT))
            }
            _ => Err(Box::new(not_found("RevisionNotFound"))),
        }
    }
}
