//! What the hub answers to those who download.

use std::{fs, path::Path};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use hyper::{Method, Response, StatusCode, header, http::response::Builder as Answer};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

use crate::{
    HubRequest, HubResponse, HubState, LFS_BYTES, branches::Branch, build_response, not_found,
    respond_empty,
};

impl HubState {
    pub(crate) fn describe_model_file(
        &self,
        repo: &str,
        revision: &str,
        file: &str,
        request: &HubRequest,
    ) -> HubResponse {
        match self.find_branch(repo, revision) {
            Ok(Branch { commit, directory, .. }) => {
                self.describe_file(&directory, &commit, file, request)
            }
            Err(code) => not_found(code),
        }
    }

    /// Sends a small file of a directory, and redirects to the storage of a large one.
    pub(crate) fn describe_file(
        &self,
        directory: &Path,
        commit: &str,
        file: &str,
        request: &HubRequest,
    ) -> HubResponse {
        let Ok(bytes) = fs::read(directory.join(file)) else { return not_found("EntryNotFound") };
        let answer = Response::builder().header("x-repo-commit", commit);
        if bytes.len() < LFS_BYTES {
            let answer = answer.header(header::ETAG, format!("\"{}\"", git_blob_id(&bytes)));
            return send_bytes(answer, request, bytes);
        }
        let below = directory.strip_prefix(&self.models).unwrap_or(directory).display();
        let place = format!("{}/storage/files/{below}/{file}", self.storage_url);
        let answer = answer
            .status(StatusCode::FOUND)
            .header(header::LOCATION, place)
            .header("x-linked-etag", format!("\"{}\"", sha256_hex(&bytes)))
            .header("x-linked-size", bytes.len());
        respond_empty(answer)
    }
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(digest(&SHA256, bytes).as_ref())
}

pub(crate) fn git_blob_id(bytes: &[u8]) -> String {
    let object = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    HEXLOWER.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &object).as_ref())
}

/// Sends bytes, or those from the offset that the request names.
pub(crate) fn send_bytes(answer: Answer, request: &HubRequest, bytes: Vec<u8>) -> HubResponse {
    let (size, bytes) = (bytes.len(), Bytes::from(bytes));
    let answer = answer.header(header::ACCEPT_RANGES, "bytes");
    if request.head.method == Method::HEAD {
        return respond_empty(answer.header(header::CONTENT_LENGTH, size));
    }
    let range = request.head.headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let from =
        range.and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
    match from.filter(|from: &usize| *from < size) {
        Some(from) => {
            let range = format!("bytes {from}-{}/{size}", size - 1);
            let answer = answer.status(StatusCode::PARTIAL_CONTENT);
            build_response(answer.header(header::CONTENT_RANGE, range), bytes.slice(from..))
        }
        None => build_response(answer, bytes),
    }
}
