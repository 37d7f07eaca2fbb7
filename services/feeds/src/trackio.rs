//! trackio, by the API that its own client uses (`POST /api/bulk_log`). It keeps an entry once,
//! whoever sends it how often, by the entry's id; so everything is sent again after a start, and
//! nothing has to be remembered.

use std::collections::BTreeMap;

use reqwest::{Client, Url};
use serde_json::{Map, Value, json};
use wire::RunId;

use crate::{
    Sink, SinkError, http,
    points::{Told, What},
};

/// Entries of one request.
const ENTRIES_MAX: usize = 200;

/// A self-hosted server.
#[derive(Debug)]
pub struct Trackio {
    client: Client,
    url: Url,
    token: Option<String>,
    project: String,
    /// What runs are called there.
    names: BTreeMap<RunId, String>,
}

impl Trackio {
    /// `token`: the server's write token.
    ///
    /// # Errors
    /// When this machine cannot speak TLS.
    pub fn new(url: Url, project: String, token: Option<String>) -> Result<Self, SinkError> {
        Ok(Self { client: http::client()?, url, token, project, names: BTreeMap::new() })
    }

    async fn send(&self, entries: &[Value]) -> Result<(), SinkError> {
        let mut url = http::below(&self.url, "api/bulk_log");
        url.set_query(None);
        let request = self.client.post(url).json(&json!({ "logs": entries, "hf_token": null }));
        let request = match &self.token {
            Some(token) => request.header("x-trackio-write-token", token),
            None => request,
        };
        http::json("trackio's bulk_log", request).await.map(drop)
    }

    /// What is asked of it has no place for anything but figures and settings.
    fn entry(&self, run: &RunId, told: &Told) -> Option<Value> {
        let name = self.names.get(run).map_or(run.as_str(), String::as_str);
        let sequence = told.record.sequence;
        let mut entry = json!({
            "project": self.project,
            "run": name,
            "run_id": run.as_str(),
            "log_id": format!("flotilla-{run}-{sequence}"),
        });
        match &told.what {
            What::Begun(begun) => {
                entry["config"] = json!(begun.settings);
                // An entry without figures is none.
                entry["metrics"] = json!({ "flotilla/begun": 1 });
                entry["step"] = json!(0);
            }
            What::Figures(figures) => {
                let first = figures.first()?;
                let metrics = figures.iter().map(|it| (it.key.clone(), json!(it.value)));
                entry["metrics"] = Value::Object(metrics.collect::<Map<_, _>>());
                entry["step"] = json!(first.step);
            }
            What::Ended(_) => return None,
        }
        Some(entry)
    }
}

impl Sink for Trackio {
    async fn cursor(&mut self, _: &RunId) -> Result<u64, SinkError> {
        Ok(0)
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        if let Some(What::Begun(begun)) = told.first().map(|told| &told.what) {
            self.names.insert(run.clone(), format!("{} ({run})", begun.name));
        }
        let entries: Vec<Value> = told.iter().filter_map(|told| self.entry(run, told)).collect();
        for some in entries.chunks(ENTRIES_MAX) {
            self.send(some).await?;
        }
        Ok(())
    }
}
