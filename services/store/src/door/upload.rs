//! An upload in parts through a door.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use object_store::{MultipartUpload, PutPayload, PutResult, Result, UploadPart, path::Path};

use super::{put_result, request::Client};

#[derive(Debug)]
pub(super) struct DoorUpload {
    client: Arc<Client>,
    key: Path,
    /// `None` when the object is there already: parts go nowhere.
    upload: Option<String>,
    parts: usize,
    bytes: u64,
    /// What the parts are called, as they arrived.
    sent: Arc<Mutex<Vec<Option<String>>>>,
}

impl DoorUpload {
    pub(super) async fn begin(client: Arc<Client>, key: &Path) -> Result<Self> {
        let upload = client.begin(key).await?;
        let sent = Arc::default();
        Ok(Self { client, key: key.clone(), upload, parts: 0, bytes: 0, sent })
    }
}

#[async_trait]
impl MultipartUpload for DoorUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let bytes = Bytes::from(data);
        let (index, offset) = (self.parts, self.bytes);
        self.parts += 1;
        self.bytes += bytes.len() as u64;
        let (client, key, sent) = (self.client.clone(), self.key.clone(), self.sent.clone());
        let upload = self.upload.clone();
        Box::pin(async move {
            let Some(upload) = upload else { return Ok(()) };
            let name = client.put_part(&key, &upload, (index, offset), bytes).await?;
            let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
            let length = sent.len().max(index + 1);
            sent.resize(length, None);
            sent[index] = Some(name);
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let Some(upload) = &self.upload else { return Ok(put_result(None)) };
        let sent = std::mem::take(&mut *self.sent.lock().unwrap_or_else(PoisonError::into_inner));
        let parts: Option<Vec<String>> = sent.into_iter().collect();
        let parts = parts.filter(|parts| parts.len() == self.parts).ok_or_else(|| {
            object_store::Error::Generic { store: "door", source: "a part was not sent".into() }
        })?;
        self.client.complete(&self.key, upload, parts, self.bytes).await?;
        Ok(put_result(None))
    }

    async fn abort(&mut self) -> Result<()> {
        let Some(upload) = &self.upload else { return Ok(()) };
        self.client.abort(&self.key, upload).await
    }
}
