//! Export to a webhook: each fact is sent as one POST, in order, with the line that an archive has.

use std::path::PathBuf;

use reqwest::{Client, Url, header::CONTENT_TYPE};
use wire::RunId;

use crate::{
    ExporterError, RunExporter, cursor_file::CursorFile, http_client, metric_points::RunUpdate,
};

/// An exporter to a webhook. After a crash a fact may be sent again; receivers recognise it by its
/// `sequence`.
#[derive(Debug)]
pub struct WebhookExporter {
    client: Client,
    url: Url,
    token: Option<String>,
    cursors: CursorFile,
}

impl WebhookExporter {
    /// Creates an exporter. `token` is a bearer token; `state` is the file with the cursors.
    pub fn new(url: Url, token: Option<String>, state: PathBuf) -> Result<Self, ExporterError> {
        Ok(Self {
            client: http_client::build_client()?,
            url,
            token,
            cursors: CursorFile::open_file(state)?,
        })
    }

    async fn post_fact(&self, update: &RunUpdate) -> Result<(), ExporterError> {
        let request = self.client.post(self.url.clone());
        let request = request.header(CONTENT_TYPE, "application/json");
        let request = http_client::with_bearer(request, self.token.as_deref());
        http_client::request_text("the webhook", request.body(update.record.to_line()))
            .await
            .map(drop)
    }
}

impl RunExporter for WebhookExporter {
    async fn read_cursor(&mut self, run: &RunId) -> Result<u64, ExporterError> {
        Ok(self.cursors.run_cursor(run))
    }

    async fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        for update in updates {
            // Earlier facts of the batch may have been sent in a previous attempt.
            if update.record.sequence > self.cursors.run_cursor(run) {
                self.post_fact(update).await?;
                self.cursors.set_cursor(run, update.record.sequence);
                self.cursors.save_file()?;
            }
        }
        Ok(())
    }
}
