//! The branches of a model and their files. A branch has the files of its newest commit alone.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use hyper::StatusCode;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use serde_json::{Value, json};

use crate::{
    COMMIT, HubResponse, HubState, LFS_BYTES,
    downloads::{git_blob_id, sha256_hex},
    not_found, refuse, respond_json,
};

pub(crate) const MAIN: &str = "main";
/// Of a file in Git that names an object of large file storage.
const POINTER_BYTES: usize = 134;

/// A branch that a request names, by its name or by its newest commit.
pub(crate) struct Branch {
    pub(crate) name: String,
    pub(crate) commit: String,
    pub(crate) directory: PathBuf,
}

/// A change of one file by a commit; `None` removes it.
pub(crate) type FileChange = (String, Option<Bytes>);

impl HubState {
    pub(crate) fn has_repository(&self, repo: &str) -> bool {
        self.models.join(repo).is_dir()
    }

    /// Returns the error code of the hub if there is no such repository or revision.
    pub(crate) fn find_branch(&self, repo: &str, revision: &str) -> Result<Branch, &'static str> {
        if !self.has_repository(repo) {
            return Err("RepoNotFound");
        }
        let records = self.records();
        let known = records.heads.iter().filter(|((of, _), _)| of == repo);
        let known = known.map(|((_, name), commit)| (name.clone(), commit.clone()));
        let mut branches: Vec<(String, String)> = known.collect();
        if !branches.iter().any(|(name, _)| name == MAIN) {
            branches.push((MAIN.to_owned(), COMMIT.to_owned()));
        }
        let is_it = |(name, commit): &(String, String)| name == revision || commit == revision;
        let (name, commit) = branches.into_iter().find(is_it).ok_or("RevisionNotFound")?;
        let directory = match name.as_str() {
            MAIN => self.models.join(repo),
            other => self.models.join(format!("{repo}@{other}")),
        };
        Ok(Branch { name, commit, directory })
    }

    pub(crate) fn create_branch(&self, repo: &str, name: &str) -> HubResponse {
        let main = match self.find_branch(repo, MAIN) {
            Ok(main) if self.find_branch(repo, name).is_err() => main,
            Ok(_) => return refuse(StatusCode::CONFLICT, "the branch exists"),
            Err(code) => return not_found(code),
        };
        let copied = list_files(&main.directory).and_then(|names| {
            let to = self.models.join(format!("{repo}@{name}"));
            fs::create_dir_all(&to)?;
            names.iter().try_for_each(|file| {
                write_file(&to.join(file), &fs::read(main.directory.join(file))?)
            })
        });
        if let Err(error) = copied {
            return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
        }
        self.records().heads.insert((repo.to_owned(), name.to_owned()), main.commit);
        respond_json(&json!({}))
    }

    /// Makes the changes of a commit, and returns its id.
    pub(crate) fn change_branch(
        &self,
        repo: &str,
        branch: &Branch,
        body: &[u8],
        changes: &[FileChange],
    ) -> io::Result<String> {
        for (name, bytes) in changes {
            let path = branch.directory.join(name);
            match bytes {
                Some(bytes) => write_file(&path, bytes)?,
                None => fs::remove_file(path)?,
            }
        }
        let seed = [branch.commit.as_bytes(), body].concat();
        let commit = HEXLOWER.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &seed).as_ref());
        self.records().heads.insert((repo.to_owned(), branch.name.clone()), commit.clone());
        Ok(commit)
    }

    pub(crate) fn describe_model(&self, repo: &str, revision: &str) -> HubResponse {
        let Branch { commit, directory, .. } = match self.find_branch(repo, revision) {
            Ok(branch) => branch,
            Err(code) => return not_found(code),
        };
        let names = list_files(&directory).unwrap_or_default();
        let siblings: Vec<Value> = names.iter().map(|name| json!({ "rfilename": name })).collect();
        let card = fs::read_to_string(directory.join("README.md")).unwrap_or_default();
        let license = card.lines().find_map(|line| line.strip_prefix("license: "));
        let license = license.map(|license| license.trim_matches('"'));
        respond_json(&json!({
            "id": repo, "sha": commit, "private": self.records().private.contains(repo),
            "tags": [], "siblings": siblings, "cardData": { "license": license },
        }))
    }

    pub(crate) fn list_tree(&self, repo: &str, revision: &str) -> HubResponse {
        match self.find_branch(repo, revision) {
            Ok(branch) => describe_tree(&branch.directory),
            Err(code) => not_found(code),
        }
    }
}

impl Branch {
    /// Returns the id by which the hub compares a file.
    pub(crate) fn file_id(&self, name: &str) -> Option<String> {
        let bytes = fs::read(self.directory.join(name)).ok()?;
        Some(if bytes.len() >= LFS_BYTES { sha256_hex(&bytes) } else { git_blob_id(&bytes) })
    }
}

/// Lists all files of a revision.
pub(crate) fn describe_tree(directory: &Path) -> HubResponse {
    let names = list_files(directory).unwrap_or_default();
    let described = names.iter().map(|name| {
        let bytes = fs::read(directory.join(name)).unwrap_or_default();
        let mut file = json!({
            "type": "file", "path": name, "size": bytes.len(), "oid": git_blob_id(&bytes),
        });
        if bytes.len() >= LFS_BYTES {
            let (oid, size) = (sha256_hex(&bytes), bytes.len());
            file["lfs"] = json!({ "oid": oid, "size": size, "pointerSize": POINTER_BYTES });
        }
        file
    });
    respond_json(&Value::Array(described.collect()))
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, bytes)
}

/// Returns the names of the files below a directory, sorted.
pub(crate) fn list_files(directory: &Path) -> io::Result<Vec<String>> {
    let (mut names, mut open) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if let Ok(name) = path.strip_prefix(directory) {
                names.push(name.display().to_string());
            }
        }
    }
    names.sort();
    Ok(names)
}
