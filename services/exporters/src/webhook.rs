//! Export to a webhook: each fact is sent as one POST, in order, with the line that an archive has.

use std::path::PathBuf;

use reqwest::{Client, Url, header::CONTENT_TYPE};
use wire::RunId;

use crate::{
    ExporterError, RunExporter, cursor_file::CursorFile, http_client, metric_points::RunUpdate,
};

/// An exporter to a webhook, with a file for its cursors. After a crash a fact may be sent again;
/// receivers recognise it by its `sequence`.
#[derive(Debug)]
pub struct WebhookExporter {
    client: Client,
    url: Url,
    token: Option<String>,
    /// Cursors of the runs.
    cursors: CursorFile,
}

impl WebhookExporter {
    /// Creates an exporter. `token` is a bearer token, if the address requires one.
    ///
    /// # Errors
    /// When the cursor file cannot be read or is invalid, or TLS is unavailable on this machine.
    pub fn new(url: Url, token: Option<String>, state: PathBuf) -> Result<Self, ExporterError> {
        Ok(Self {
            client: http_client::build_client()?,
            url,
            token,
            cursors: CursorFile::open_file(state)?,
        })
    }

    /// Sends one fact.
    async fn post_fact(&self, told: &RunUpdate) -> Result<(), ExporterError> {
        let request = self.client.post(self.url.clone());
        let request = request.header(CONTENT_TYPE, "application/json");
        let request = http_client::with_bearer(request, self.token.as_deref());
        http_client::request_text("the webhook", request.body(told.record.to_line()))
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
        told: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        for told in told {
            // Earlier facts of the batch may have been sent in a previous attempt.
            if told.record.sequence > self.cursors.run_cursor(run) {
                self.post_fact(told).await?;
                self.cursors.set_cursor(run, told.record.sequence);
                self.cursors.save_file()?;
            }
        }
        Ok(())
    }
}
