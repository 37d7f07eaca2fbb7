//! Uploads in parts that outlive the process that began them: to a bucket or to a gateway.

use bytes::Bytes;
use object_store::{
    Result,
    multipart::{MultipartStore, PartId},
    path::Path,
};

use crate::backend::StoreBackend;

impl StoreBackend {
    /// Begins an upload and returns its name, or `None` when the object exists already.
    pub(super) async fn begin_upload(&self, key: &Path) -> Result<Option<String>> {
        match (&self.bucket, &self.gateway) {
            (Some(bucket), _) => bucket.s3.create_multipart(&bucket.full_key(key)).await.map(Some),
            (None, Some(gateway)) => gateway.gateway_client().begin_upload(key).await,
            (None, None) => Err(no_multipart()),
        }
    }

    pub(super) async fn put_part(
        &self,
        key: &Path,
        upload: &String,
        (index, offset): (usize, u64),
        bytes: Bytes,
    ) -> Result<String> {
        match (&self.bucket, &self.gateway) {
            (Some(bucket), _) => {
                let put =
                    bucket.s3.put_part(&bucket.full_key(key), upload, index, bytes.into()).await;
                put.map(|part| part.content_id)
            }
            (None, Some(gateway)) => {
                gateway.gateway_client().put_part(key, upload, (index, offset), bytes).await
            }
            (None, None) => Err(no_multipart()),
        }
    }

    pub(super) async fn complete_upload(
        &self,
        key: &Path,
        upload: &String,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<()> {
        match (&self.bucket, &self.gateway) {
            (Some(bucket), _) => {
                let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
                let done = bucket.s3.complete_multipart(&bucket.full_key(key), upload, parts).await;
                done.map(|_| ())
            }
            (None, Some(gateway)) => {
                gateway.gateway_client().complete_upload(key, upload, parts, bytes).await
            }
            (None, None) => Err(no_multipart()),
        }
    }

    pub(super) async fn abort_upload(&self, key: &Path, upload: &String) -> Result<()> {
        match (&self.bucket, &self.gateway) {
            (Some(bucket), _) => bucket.s3.abort_multipart(&bucket.full_key(key), upload).await,
            (None, Some(gateway)) => gateway.gateway_client().abort_upload(key, upload).await,
            (None, None) => Err(no_multipart()),
        }
    }
}

fn no_multipart() -> object_store::Error {
    object_store::Error::NotSupported {
        source: "a directory does not support multipart uploads".into(),
    }
}
