//! What the hub answers to those who upload.

use std::fs;

use bytes::Bytes;
use data_encoding::BASE64;
use hyper::{Response, StatusCode, header};
use serde_json::{Map, Value, json};

use crate::{
    HubRequest, HubResponse, HubState, LFS_BYTES, PART_BYTES,
    branches::{Branch, FileChange},
    downloads::sha256_hex,
    not_found, refuse, respond_empty, respond_json,
};

impl HubRequest {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl HubState {
    pub(crate) fn create_repository(&self, request: &HubRequest) -> HubResponse {
        let asked = request.json();
        let name = |field: &str| asked[field].as_str().unwrap_or("org").to_owned();
        let repo = format!("{}/{}", name("organization"), name("name"));
        if self.has_repository(&repo) {
            return refuse(StatusCode::CONFLICT, "You already created this model repo");
        }
        if let Err(error) = fs::create_dir_all(self.models.join(&repo)) {
            return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
        }
        let url = format!("{}/{repo}", self.hub_url);
        if asked["private"] == true {
            self.records().private.insert(repo);
        }
        respond_json(&json!({ "url": url }))
    }

    pub(crate) fn answer_upload_call(
        &self,
        repo: &str,
        (call, revision): (&str, &str),
        request: &HubRequest,
    ) -> HubResponse {
        let branch = match self.find_branch(repo, revision) {
            Ok(branch) => branch,
            Err(code) => return not_found(code),
        };
        if call == "preupload" {
            return choose_upload_modes(&branch, &request.json());
        }
        let lines = request.body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let lines: Result<Vec<Value>, _> = lines.map(serde_json::from_slice).collect();
        let Ok(lines) = lines else { return refuse(StatusCode::BAD_REQUEST, "no lines of JSON") };
        let parent = lines.first().and_then(|line| line["value"]["parentCommit"].as_str());
        if parent.is_some_and(|parent| parent != branch.commit) {
            let message = "A commit has happened since. Please refresh and try again.";
            return refuse(StatusCode::PRECONDITION_FAILED, message);
        }
        let changes: Result<Vec<_>, String> =
            lines.iter().skip(1).map(|line| self.read_change(line)).collect();
        let written = changes.and_then(|changes| {
            self.change_branch(repo, &branch, &request.body, &changes)
                .map_err(|error| error.to_string())
        });
        match written {
            Ok(commit) => respond_json(&json!({
                "commitOid": commit,
                "commitUrl": format!("{}/{repo}/commit/{commit}", self.hub_url),
            })),
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error),
        }
    }

    fn read_change(&self, line: &Value) -> Result<FileChange, String> {
        let value = &line["value"];
        let text = |field: &str| value[field].as_str().ok_or(format!("no {field}"));
        let bytes = match line["key"].as_str() {
            Some("file") => {
                let decoded = BASE64.decode(text("content")?.as_bytes());
                Some(Bytes::from(decoded.map_err(|error| error.to_string())?))
            }
            Some("lfsFile") => {
                let object = self.records().objects.get(text("oid")?).cloned();
                Some(object.ok_or("it names an object that the storage does not have")?)
            }
            Some("deletedFile") => None,
            _ => return Err("it has an unknown operation".into()),
        };
        Ok((text("path")?.to_owned(), bytes))
    }

    /// Tells where to upload objects that the storage lacks.
    pub(crate) fn answer_batch(&self, request: &HubRequest) -> HubResponse {
        let asked = request.json();
        let objects = asked["objects"].as_array().cloned().unwrap_or_default();
        let answered = objects.into_iter().map(|mut object| {
            let oid = object["oid"].as_str().unwrap_or_default().to_owned();
            let size = usize::try_from(object["size"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
            if !self.records().objects.contains_key(&oid) {
                let verify = json!({ "href": format!("{}/lfs/verify", self.hub_url) });
                object["actions"] =
                    json!({ "upload": self.plan_upload(&oid, size), "verify": verify });
            }
            object
        });
        respond_json(&json!({ "objects": answered.collect::<Vec<_>>() }))
    }

    fn plan_upload(&self, oid: &str, size: usize) -> Value {
        let place = format!("{}/storage/objects/{oid}", self.storage_url);
        if size <= PART_BYTES {
            return json!({ "href": place });
        }
        let part = |part| (format!("{part:05}"), json!(format!("{place}/{part}")));
        let mut header: Map<String, Value> = (1..=size.div_ceil(PART_BYTES)).map(part).collect();
        header.insert("chunk_size".into(), json!(PART_BYTES.to_string()));
        json!({ "href": format!("{}/lfs/complete", self.hub_url), "header": header })
    }

    /// Stores an object, or a part of one.
    pub(crate) fn store_object(&self, key: &str, request: &HubRequest) -> HubResponse {
        let digest = sha256_hex(&request.body);
        if !request.head.headers.contains_key(header::CONTENT_LENGTH) {
            return refuse(StatusCode::NOT_IMPLEMENTED, "a body without its length");
        }
        if !key.contains('/') && digest != key {
            return refuse(StatusCode::BAD_REQUEST, "its digest is another");
        }
        self.records().objects.insert(key.to_owned(), request.body.clone());
        respond_empty(Response::builder().header(header::ETAG, format!("\"{digest}\"")))
    }

    /// Joins the parts of an object, or checks that the storage has it.
    pub(crate) fn finish_object(&self, call: &str, request: &HubRequest) -> HubResponse {
        let asked = request.json();
        let oid = asked["oid"].as_str().unwrap_or_default();
        let objects = &mut self.records().objects;
        if call == "complete" {
            let parts = asked["parts"].as_array().cloned().unwrap_or_default();
            let stored = parts.iter().map(|part| {
                let bytes = objects.get(&format!("{oid}/{}", part["partNumber"]))?;
                (part["etag"] == format!("\"{}\"", sha256_hex(bytes))).then(|| bytes.to_vec())
            });
            let joined = stored.collect::<Option<Vec<_>>>().unwrap_or_default().concat();
            if sha256_hex(&joined) != oid {
                return refuse(StatusCode::BAD_REQUEST, "the parts are not the object");
            }
            objects.insert(oid.to_owned(), joined.into());
        }
        match objects.get(oid) {
            Some(bytes) if call == "complete" || asked["size"] == bytes.len() => {
                respond_json(&json!({}))
            }
            _ => refuse(StatusCode::NOT_FOUND, "the storage does not have the object"),
        }
    }
}

fn choose_upload_modes(branch: &Branch, asked: &Value) -> HubResponse {
    let files = asked["files"].as_array().cloned().unwrap_or_default();
    let answered = files.into_iter().map(|file| {
        let is_large = file["size"].as_u64().is_some_and(|size| size >= LFS_BYTES as u64);
        let mode = if is_large { "lfs" } else { "regular" };
        let oid = file["path"].as_str().and_then(|path| branch.file_id(path));
        json!({ "path": file["path"], "uploadMode": mode, "shouldIgnore": false, "oid": oid })
    });
    respond_json(&json!({ "files": answered.collect::<Vec<_>>() }))
}
