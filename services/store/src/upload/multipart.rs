//! Uploads in parts that outlive the process that began them: a bucket's, or a gateway's.

use bytes::Bytes;
use object_store::{
    Result,
    multipart::{MultipartStore, PartId},
    path::Path,
};

use crate::location::Location;

impl Location {
    /// The upload's name; `None` when the object is there already.
    pub(super) async fn begin(&self, key: &Path) -> Result<Option<String>> {
        match (&self.bucket, &self.door) {
            (Some(bucket), _) => bucket.s3.create_multipart(&bucket.path(key)).await.map(Some),
            (None, Some(door)) => door.client().begin(key).await,
            (None, None) => Err(nowhere()),
        }
    }

    /// What the part is called.
    pub(super) async fn put_part(
        &self,
        key: &Path,
        upload: &String,
        (index, offset): (usize, u64),
        bytes: Bytes,
    ) -> Result<String> {
        match (&self.bucket, &self.door) {
            (Some(bucket), _) => {
                let put = bucket.s3.put_part(&bucket.path(key), upload, index, bytes.into()).await;
                put.map(|part| part.content_id)
            }
            (None, Some(door)) => door.client().put_part(key, upload, (index, offset), bytes).await,
            (None, None) => Err(nowhere()),
        }
    }

    pub(super) async fn complete(
        &self,
        key: &Path,
        upload: &String,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<()> {
        match (&self.bucket, &self.door) {
            (Some(bucket), _) => {
                let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
                let done = bucket.s3.complete_multipart(&bucket.path(key), upload, parts).await;
                done.map(|_| ())
            }
            (None, Some(door)) => door.client().complete(key, upload, parts, bytes).await,
            (None, None) => Err(nowhere()),
        }
    }

    pub(super) async fn abort(&self, key: &Path, upload: &String) -> Result<()> {
        match (&self.bucket, &self.door) {
            (Some(bucket), _) => bucket.s3.abort_multipart(&bucket.path(key), upload).await,
            (None, Some(door)) => door.client().abort(key, upload).await,
            (None, None) => Err(nowhere()),
        }
    }
}

/// A directory's files are copied.
fn nowhere() -> object_store::Error {
    object_store::Error::NotSupported { source: "a directory has no uploads in parts".into() }
}
