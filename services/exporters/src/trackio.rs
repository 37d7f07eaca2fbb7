//! Export to trackio, by the API of its own client (`POST /api/bulk_log`). The server keeps one
//! entry per id, even if it is sent several times. So everything is sent again after a start, and
//! no cursor is needed.

use std::collections::BTreeMap;

use reqwest::{Client, Url};
use serde_json::{Map, Value, json};
use wire::RunId;

use crate::{
    ExporterError, RunExporter, http_client,
    metric_points::{RunUpdate, UpdateKind},
};

const ENTRIES_MAX: usize = 200;

/// An exporter to a self-hosted trackio server.
#[derive(Debug)]
pub struct TrackioExporter {
    client: Client,
    url: Url,
    token: Option<String>,
    project: String,
    names: BTreeMap<RunId, String>,
}

impl TrackioExporter {
    /// Creates an exporter. `token` is the server's write token.
    pub fn new(url: Url, project: String, token: Option<String>) -> Result<Self, ExporterError> {
        Ok(Self {
            client: http_client::build_client()?,
            url,
            token,
            project,
            names: BTreeMap::new(),
        })
    }

    async fn send_entries(&self, entries: &[Value]) -> Result<(), ExporterError> {
        let mut url = http_client::append_path(&self.url, "api/bulk_log");
        url.set_query(None);
        let request = self.client.post(url).json(&json!({ "logs": entries, "hf_token": null }));
        let request = match &self.token {
            Some(token) => request.header("x-trackio-write-token", token),
            None => request,
        };
        http_client::request_json("trackio's bulk_log", request).await.map(drop)
    }

    /// Returns `None` for updates without metrics or settings, for which the API has no field.
    fn build_entry(&self, run: &RunId, update: &RunUpdate) -> Option<Value> {
        let name = self.names.get(run).map_or(run.as_str(), String::as_str);
        let sequence = update.record.sequence;
        let mut entry = json!({
            "project": self.project,
            "run": name,
            "run_id": run.as_str(),
            "log_id": format!("flotilla-{run}-{sequence}"),
        });
        match &update.kind {
            UpdateKind::Started(begun) => {
                entry["config"] = json!(begun.settings);
                // An entry needs at least one metric.
                entry["metrics"] = json!({ "flotilla/begun": 1 });
                entry["step"] = json!(0);
            }
            UpdateKind::Metrics(figures) => {
                let first = figures.first()?;
                let metrics = figures.iter().map(|it| (it.key.clone(), json!(it.value)));
                entry["metrics"] = Value::Object(metrics.collect::<Map<_, _>>());
                entry["step"] = json!(first.step);
            }
            UpdateKind::Ended(_) => return None,
        }
        Some(entry)
    }
}

impl RunExporter for TrackioExporter {
    async fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        if let Some(UpdateKind::Started(begun)) = updates.first().map(|update| &update.kind) {
            self.names.insert(run.clone(), format!("{} ({run})", begun.name));
        }
        let entries: Vec<Value> =
            updates.iter().filter_map(|update| self.build_entry(run, update)).collect();
        for some in entries.chunks(ENTRIES_MAX) {
            self.send_entries(some).await?;
        }
        Ok(())
    }
}
