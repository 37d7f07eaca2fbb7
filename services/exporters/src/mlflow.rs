//! Export to MLflow by its REST API (mlflow.org/docs/latest/rest-api.html), which GitLab and others
//! also implement. A run is found by one tag, and another tag contains its cursor; both are stored
//! in MLflow.

use std::collections::BTreeMap;

use reqwest::{Client, Url};
use serde_json::{Value, json};
use wire::{RunId, v1};

use crate::{
    ExporterError, RunExporter, http_client,
    metric_points::{RunStart, RunUpdate, UpdateKind},
};

/// MLflow's limit on metrics in one request.
const METRICS_MAX: usize = 1000;
/// MLflow's limit on parameters in one request.
const PARAMETERS_MAX: usize = 100;

const RUN: &str = "flotilla.run";
const CURSOR_TAG: &str = "flotilla.cursor";

/// An exporter to an MLflow tracking server.
#[derive(Debug)]
pub struct MlflowExporter {
    client: Client,
    url: Url,
    token: Option<String>,
    experiment: String,
    experiment_id: Option<String>,
    runs: BTreeMap<RunId, String>,
}

impl MlflowExporter {
    /// Creates an exporter. `token` is a bearer token, if the server requires one.
    pub fn new(url: Url, experiment: String, token: Option<String>) -> Result<Self, ExporterError> {
        let (client, experiment_id, runs) = (http_client::build_client()?, None, BTreeMap::new());
        Ok(Self { client, url, token, experiment, experiment_id, runs })
    }

    async fn post_json(&self, path: &str, message: &Value) -> Result<Value, ExporterError> {
        let url = http_client::append_path(&self.url, &format!("api/2.0/mlflow/{path}"));
        let request =
            http_client::with_bearer(self.client.post(url), self.token.as_deref()).json(message);
        http_client::request_json(&format!("MLflow's {path}"), request).await
    }

    async fn ensure_experiment(&mut self) -> Result<String, ExporterError> {
        if let Some(id) = &self.experiment_id {
            return Ok(id.clone());
        }
        let name = self.experiment.replace('\'', "\\'");
        let search = json!({ "filter": format!("name = '{name}'"), "max_results": 1 });
        let found = self.post_json("experiments/search", &search).await?;
        let id = match found["experiments"][0]["experiment_id"].as_str() {
            Some(id) => id.to_owned(),
            None => {
                let create = json!({ "name": self.experiment });
                let made = self.post_json("experiments/create", &create).await?;
                require_text("experiments/create", &made["experiment_id"])?
            }
        };
        self.experiment_id = Some(id.clone());
        Ok(id)
    }

    /// Finds the MLflow run by its tag, and remembers its id.
    async fn find_run(&mut self, run: &RunId) -> Result<Option<Value>, ExporterError> {
        let experiment = self.ensure_experiment().await?;
        let filter = format!("tags.`{RUN}` = '{run}'");
        let search = json!({ "experiment_ids": [experiment], "filter": filter, "max_results": 1 });
        let found = self.post_json("runs/search", &search).await?;
        let Some(found) = found["runs"].get(0) else { return Ok(None) };
        let id = require_text("runs/search", &found["info"]["run_id"])?;
        self.runs.insert(run.clone(), id);
        Ok(Some(found.clone()))
    }

    async fn ensure_run(
        &mut self,
        run: &RunId,
        begun: &RunStart,
        at_ms: u64,
    ) -> Result<(), ExporterError> {
        // The run may have been created by an attempt whose answer was lost.
        if self.runs.contains_key(run) || self.find_run(run).await?.is_some() {
            return Ok(());
        }
        let experiment = self.ensure_experiment().await?;
        let tag = |key: &str, value: &str| json!({ "key": key, "value": value });
        let note = format!("{} run {run} of Flotilla", begun.kind);
        let create = json!({
            "experiment_id": experiment,
            "run_name": format!("{} ({run})", begun.name),
            "start_time": at_ms,
            "tags": [
                tag(RUN, run.as_str()),
                tag("flotilla.kind", begun.kind),
                tag("mlflow.note.content", &note),
            ],
        });
        let made = self.post_json("runs/create", &create).await?;
        let id = require_text("runs/create", &made["run"]["info"]["run_id"])?;
        self.runs.insert(run.clone(), id);
        Ok(())
    }

    async fn log_batch(&self, id: &str, what: Value) -> Result<(), ExporterError> {
        let mut batch = what;
        batch["run_id"] = id.into();
        self.post_json("runs/log-batch", &batch).await.map(drop)
    }

    async fn log_parameters(&self, id: &str, begun: &RunStart) -> Result<(), ExporterError> {
        let all: Vec<Value> = begun
            .settings
            .iter()
            // MLflow rejects empty values, and accepts only a limited set of characters in names.
            .filter(|(_, value)| !value.is_empty())
            .map(|(key, value)| json!({ "key": key, "value": value }))
            .collect();
        for some in all.chunks(PARAMETERS_MAX) {
            self.log_batch(id, json!({ "params": some })).await?;
        }
        Ok(())
    }

    async fn end_run(
        &self,
        id: &str,
        status: v1::done::Status,
        at_ms: u64,
    ) -> Result<(), ExporterError> {
        use v1::done::Status;
        let status = match status {
            Status::Succeeded => "FINISHED",
            Status::Cancelled => "KILLED",
            Status::Failed | Status::Unspecified => "FAILED",
        };
        let update = json!({ "run_id": id, "status": status, "end_time": at_ms });
        self.post_json("runs/update", &update).await.map(drop)
    }
}

impl RunExporter for MlflowExporter {
    async fn read_cursor(&mut self, run: &RunId) -> Result<u64, ExporterError> {
        let Some(found) = self.find_run(run).await? else { return Ok(0) };
        let tags = found["data"]["tags"].as_array().map(Vec::as_slice).unwrap_or_default();
        let cursor = tags.iter().find(|tag| tag["key"] == CURSOR_TAG);
        Ok(cursor.and_then(|tag| tag["value"].as_str()?.parse().ok()).unwrap_or(0))
    }

    async fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        for update in updates {
            if let UpdateKind::Started(begun) = &update.kind {
                self.ensure_run(run, begun, update.record.time_ms).await?;
                self.log_parameters(&self.runs[run], begun).await?;
            }
        }
        let Some(id) = self.runs.get(run) else {
            let what = format!("MLflow's run of {run}");
            return Err(ExporterError::Permanent {
                what,
                why: "it was removed during the export".into(),
            });
        };
        // A repeated point has the same time and step, and MLflow keeps it once.
        let metrics = updates.iter().flat_map(|update| {
            let UpdateKind::Metrics(figures) = &update.kind else { return vec![] };
            let at = update.record.time_ms;
            let metric = |figure: &crate::metric_points::MetricPoint| {
                json!({ "key": figure.key, "value": figure.value, "timestamp": at, "step": figure.step })
            };
            figures.iter().map(metric).collect()
        });
        let metrics: Vec<Value> = metrics.collect();
        for some in metrics.chunks(METRICS_MAX) {
            self.log_batch(id, json!({ "metrics": some })).await?;
        }
        for update in updates {
            if let UpdateKind::Ended(status) = update.kind {
                self.end_run(id, status, update.record.time_ms).await?;
            }
        }
        let last = updates.last().map_or(0, |update| update.record.sequence);
        let cursor = json!({ "key": CURSOR_TAG, "value": last.to_string() });
        self.log_batch(id, json!({ "tags": [cursor] })).await
    }
}

fn require_text(path: &str, value: &Value) -> Result<String, ExporterError> {
    value.as_str().map(str::to_owned).ok_or_else(|| ExporterError::Permanent {
        what: format!("MLflow's {path}"),
        why: "its answer has no id; is that an MLflow tracking server?".into(),
    })
}
