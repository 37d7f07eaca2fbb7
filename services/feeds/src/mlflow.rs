//! MLflow, by its REST API (mlflow.org/docs/latest/rest-api.html), which GitLab and others speak as
//! well. A run is found by its tag, and a tag says how far it is: both are in MLflow, so nothing is
//! kept here.

use std::collections::BTreeMap;

use reqwest::{Client, Url};
use serde_json::{Value, json};
use wire::{RunId, v1};

use crate::{
    Sink, SinkError, http,
    points::{Begun, Told, What},
};

/// MLflow's own limits on what is logged at once.
const METRICS_MAX: usize = 1000;
const PARAMETERS_MAX: usize = 100;

const RUN: &str = "flotilla.run";
const CURSOR: &str = "flotilla.cursor";

/// A tracking server.
#[derive(Debug)]
pub struct MlFlow {
    client: Client,
    url: Url,
    token: Option<String>,
    experiment: String,
    experiment_id: Option<String>,
    /// MLflow's ids of runs.
    runs: BTreeMap<RunId, String>,
}

impl MlFlow {
    /// `token`: a bearer, where the server asks for one.
    ///
    /// # Errors
    /// When this machine cannot speak TLS.
    pub fn new(url: Url, experiment: String, token: Option<String>) -> Result<Self, SinkError> {
        let (client, experiment_id, runs) = (http::client()?, None, BTreeMap::new());
        Ok(Self { client, url, token, experiment, experiment_id, runs })
    }

    async fn post(&self, path: &str, message: &Value) -> Result<Value, SinkError> {
        let url = http::below(&self.url, &format!("api/2.0/mlflow/{path}"));
        let request = http::bearing(self.client.post(url), self.token.as_deref()).json(message);
        http::json(&format!("MLflow's {path}"), request).await
    }

    async fn experiment(&mut self) -> Result<String, SinkError> {
        if let Some(id) = &self.experiment_id {
            return Ok(id.clone());
        }
        let name = self.experiment.replace('\'', "\\'");
        let search = json!({ "filter": format!("name = '{name}'"), "max_results": 1 });
        let found = self.post("experiments/search", &search).await?;
        let id = match found["experiments"][0]["experiment_id"].as_str() {
            Some(id) => id.to_owned(),
            None => {
                let create = json!({ "name": self.experiment });
                let made = self.post("experiments/create", &create).await?;
                said("experiments/create", &made["experiment_id"])?
            }
        };
        self.experiment_id = Some(id.clone());
        Ok(id)
    }

    /// What was fed of a run before, which is gone on with from here on.
    async fn find(&mut self, run: &RunId) -> Result<Option<Value>, SinkError> {
        let experiment = self.experiment().await?;
        let filter = format!("tags.`{RUN}` = '{run}'");
        let search = json!({ "experiment_ids": [experiment], "filter": filter, "max_results": 1 });
        let found = self.post("runs/search", &search).await?;
        let Some(found) = found["runs"].get(0) else { return Ok(None) };
        let id = said("runs/search", &found["info"]["run_id"])?;
        self.runs.insert(run.clone(), id);
        Ok(Some(found.clone()))
    }

    async fn begin(&mut self, run: &RunId, begun: &Begun, at_ms: u64) -> Result<(), SinkError> {
        // It may have been created, and the answer lost.
        if self.runs.contains_key(run) || self.find(run).await?.is_some() {
            return Ok(());
        }
        let experiment = self.experiment().await?;
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
        let made = self.post("runs/create", &create).await?;
        let id = said("runs/create", &made["run"]["info"]["run_id"])?;
        self.runs.insert(run.clone(), id);
        Ok(())
    }

    async fn log(&self, id: &str, what: Value) -> Result<(), SinkError> {
        let mut batch = what;
        batch["run_id"] = id.into();
        self.post("runs/log-batch", &batch).await.map(drop)
    }

    async fn parameters(&self, id: &str, begun: &Begun) -> Result<(), SinkError> {
        let all: Vec<Value> = begun
            .settings
            .iter()
            // It is refused where it is empty, and names may have no other characters.
            .filter(|(_, value)| !value.is_empty())
            .map(|(key, value)| json!({ "key": key, "value": value }))
            .collect();
        for some in all.chunks(PARAMETERS_MAX) {
            self.log(id, json!({ "params": some })).await?;
        }
        Ok(())
    }

    async fn end(&self, id: &str, status: v1::done::Status, at_ms: u64) -> Result<(), SinkError> {
        use v1::done::Status;
        let status = match status {
            Status::Succeeded => "FINISHED",
            Status::Cancelled => "KILLED",
            Status::Failed | Status::Unspecified => "FAILED",
        };
        let update = json!({ "run_id": id, "status": status, "end_time": at_ms });
        self.post("runs/update", &update).await.map(drop)
    }
}

impl Sink for MlFlow {
    async fn cursor(&mut self, run: &RunId) -> Result<u64, SinkError> {
        let Some(found) = self.find(run).await? else { return Ok(0) };
        let tags = found["data"]["tags"].as_array().map(Vec::as_slice).unwrap_or_default();
        let cursor = tags.iter().find(|tag| tag["key"] == CURSOR);
        Ok(cursor.and_then(|tag| tag["value"].as_str()?.parse().ok()).unwrap_or(0))
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        for told in told {
            if let What::Begun(begun) = &told.what {
                self.begin(run, begun, told.record.time_ms).await?;
                self.parameters(&self.runs[run], begun).await?;
            }
        }
        let Some(id) = self.runs.get(run) else {
            let what = format!("MLflow's run of {run}");
            return Err(SinkError::Never { what, why: "it was removed while it was fed".into() });
        };
        // A point that comes again has the same time and step, and MLflow keeps it once.
        let metrics = told.iter().flat_map(|told| {
            let What::Figures(figures) = &told.what else { return vec![] };
            let at = told.record.time_ms;
            let metric = |figure: &crate::points::Figure| {
                json!({ "key": figure.key, "value": figure.value, "timestamp": at, "step": figure.step })
            };
            figures.iter().map(metric).collect()
        });
        let metrics: Vec<Value> = metrics.collect();
        for some in metrics.chunks(METRICS_MAX) {
            self.log(id, json!({ "metrics": some })).await?;
        }
        for told in told {
            if let What::Ended(status) = told.what {
                self.end(id, status, told.record.time_ms).await?;
            }
        }
        let last = told.last().map_or(0, |told| told.record.sequence);
        let cursor = json!({ "key": CURSOR, "value": last.to_string() });
        self.log(id, json!({ "tags": [cursor] })).await
    }
}

fn said(path: &str, value: &Value) -> Result<String, SinkError> {
    value.as_str().map(str::to_owned).ok_or_else(|| SinkError::Never {
        what: format!("MLflow's {path}"),
        why: "its answer has no id; is that an MLflow tracking server?".into(),
    })
}
