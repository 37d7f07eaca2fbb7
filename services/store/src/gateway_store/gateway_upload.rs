//! Multipart uploads through a gateway.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use object_store::{MultipartUpload, PutPayload, PutResult, Result, UploadPart, path::Path};

use super::{gateway_client::GatewayClient, put_result};

#[derive(Debug)]
pub(super) struct GatewayUpload {
    client: Arc<GatewayClient>,
    key: Path,
    /// `None` when the object exists already; parts are then discarded.
    upload: Option<String>,
    parts: usize,
    bytes: u64,
    /// Names by index; `None` while a part is in flight.
    sent: Arc<Mutex<Vec<Option<String>>>>,
}

impl GatewayUpload {
    pub(super) async fn begin_upload(client: Arc<GatewayClient>, key: &Path) -> Result<Self> {
        let upload = client.begin_upload(key).await?;
        let sent = Arc::default();
        Ok(Self { client, key: key.clone(), upload, parts: 0, bytes: 0, sent })
    }
}

#[async_trait]
impl MultipartUpload for GatewayUpload {
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
        let Some(upload) = &self.upload else { return Ok(put_result()) };
        let sent = std::mem::take(&mut *self.sent.lock().unwrap_or_else(PoisonError::into_inner));
        let parts: Option<Vec<String>> = sent.into_iter().collect();
        let parts = parts.filter(|parts| parts.len() == self.parts).ok_or_else(|| {
            object_store::Error::Generic { store: "gateway", source: "a part was not sent".into() }
        })?;
        self.client.complete_upload(&self.key, upload, parts, self.bytes).await?;
        Ok(put_result())
    }

    async fn abort(&mut self) -> Result<()> {
        let Some(upload) = &self.upload else { return Ok(()) };
        self.client.abort_upload(&self.key, upload).await
    }
}
