//! Records of the uploads into a bucket that members began through the gateway: one object per
//! upload in `.door/uploads`, because `object_store` cannot list the multipart uploads of a bucket.
//! With the records the uploads can be counted, and abandoned ones aborted, even after a restart of
//! the gateway.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStoreExt, multipart::MultipartStore, path::Path};
use serde::{Deserialize, Serialize};
use wire::Digest;

use super::{
    StoreObjects,
    staged_uploads::{MEMBER_UPLOADS_MAX, ReceiveError, UPLOADS_MAX, owner_prefix},
};
use crate::{
    backend::{S3Bucket, StoreBackend},
    error::StorageError,
    leftovers::UploadLeftovers,
};

/// The largest number of records read at once; the rest is read after some have been removed.
const RECORDS_MAX: usize = 2 * UPLOADS_MAX;
const RECORDS_DIRECTORY: &str = ".door/uploads";

#[derive(Debug, Serialize, Deserialize)]
struct UploadRecord {
    key: String,
    upload: String,
}

fn record_path(owner: &str, key: &Path, upload: &str) -> Path {
    let what = Digest::hash_bytes(format!("{key}\n{upload}").as_bytes()).to_hex();
    Path::from(format!("{RECORDS_DIRECTORY}/{}-{}", owner_prefix(owner), &what[..32]))
}

/// Begins and records an upload, in a task of its own, so that it is recorded even if the caller is
/// dropped.
pub(super) async fn begin_recorded(
    at: Arc<StoreBackend>,
    owner: &str,
    key: Path,
) -> Result<String, ReceiveError> {
    let owner = owner.to_owned();
    let begun = tokio::spawn(async move {
        let Some(bucket) = &at.bucket else { return Err(ReceiveError::NoUpload) };
        check_upload_limits(&at, &owner).await?;
        let fault = |source| at.storage_error(&key, source);
        let upload = bucket.s3.create_multipart(&bucket.full_key(&key)).await.map_err(fault)?;
        let record = UploadRecord { key: key.to_string(), upload: upload.clone() };
        let json = serde_json::to_vec(&record).map_err(|error| ReceiveError::Io(error.into()))?;
        let put = at.objects.put(&record_path(&owner, &key, &upload), json.into()).await;
        if let Err(source) = put {
            let _ = bucket.s3.abort_multipart(&bucket.full_key(&key), &upload).await;
            return Err(fault(source).into());
        }
        Ok(upload)
    });
    begun.await.map_err(|error| ReceiveError::Io(std::io::Error::other(error)))?
}

/// Removes the record of an ended upload; a failure leaves it until it is old enough.
pub(super) async fn remove_record(at: &StoreBackend, owner: &str, key: &Path, upload: &str) {
    let path = record_path(owner, key, upload);
    if let Err(error) = at.objects.delete(&path).await {
        tracing::debug!(%error, %path, "could not remove the record of a finished upload");
    }
}

async fn check_upload_limits(at: &StoreBackend, owner: &str) -> Result<(), ReceiveError> {
    let records = list_records(at).await?;
    let owner = format!("{}-", owner_prefix(owner));
    let is_theirs =
        |record: &&ObjectMeta| record.location.filename().is_some_and(|it| it.starts_with(&owner));
    if records.iter().filter(is_theirs).count() >= MEMBER_UPLOADS_MAX {
        return Err(ReceiveError::TooManyUploads);
    }
    if records.len() >= UPLOADS_MAX { Err(ReceiveError::Busy) } else { Ok(()) }
}

async fn list_records(at: &StoreBackend) -> Result<Vec<ObjectMeta>, StorageError> {
    let prefix = Path::from(RECORDS_DIRECTORY);
    match at.objects.list(Some(&prefix)).take(RECORDS_MAX).try_collect().await {
        Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
        listed => listed.map_err(|source| at.storage_error(&prefix, source)),
    }
}

impl StoreObjects {
    /// Counts the uploads that began at least `age` ago. If `abort` is true, aborts them and counts
    /// only those for which that worked.
    pub(crate) async fn find_abandoned_uploads(
        &self,
        age: Duration,
        abort: bool,
    ) -> Result<UploadLeftovers, StorageError> {
        let Some(bucket) = &self.backend.bucket else { return Ok(UploadLeftovers::default()) };
        let mut found = UploadLeftovers::default();
        for record in list_records(&self.backend).await? {
            let begun = SystemTime::from(record.last_modified);
            if begun.elapsed().unwrap_or_default() < age {
                continue;
            }
            if !abort || self.abort_recorded_upload(bucket, &record.location).await {
                found.count += 1;
            }
        }
        Ok(found)
    }

    /// Logs a failure and returns false.
    async fn abort_recorded_upload(&self, bucket: &S3Bucket, at: &Path) -> bool {
        let aborted = async {
            let json = self.backend.objects.get(at).await?.bytes().await?;
            // An object that is not a valid record is removed too.
            if let Ok(UploadRecord { key, upload }) = serde_json::from_slice(&json) {
                let key = Path::parse(key)?;
                match bucket.s3.abort_multipart(&bucket.full_key(&key), &upload).await {
                    // The upload has ended already, or the bucket's lifecycle rule has removed it.
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            self.backend.objects.delete(at).await
        };
        let aborted = aborted.await;
        if let Err(error) = &aborted {
            tracing::warn!(%error, record = %at, "could not remove an unfinished upload");
        }
        aborted.is_ok()
    }
}
