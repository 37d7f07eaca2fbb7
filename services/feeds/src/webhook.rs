//! Whatever takes a POST: each fact as its line in an archive is, in order, one at a time.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
};

use reqwest::{Client, Url, header::CONTENT_TYPE};
use wire::RunId;

use crate::{Sink, SinkError, http, points::Told};

/// An address, and a file that says how far it is. A fact may come again after a crash: its
/// `sequence` tells.
#[derive(Debug)]
pub struct Webhook {
    client: Client,
    url: Url,
    token: Option<String>,
    state: PathBuf,
    cursors: BTreeMap<RunId, u64>,
}

impl Webhook {
    /// `token`: a bearer, where the address asks for one.
    ///
    /// # Errors
    /// When the state cannot be read, or is none.
    pub fn new(url: Url, token: Option<String>, state: PathBuf) -> Result<Self, SinkError> {
        let cursors = match std::fs::read(&state) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                refused(
                    &state,
                    &format!("it is no state of a feed ({error}); remove it to begin anew"),
                )
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(refused(&state, &error.to_string())),
        };
        Ok(Self { client: http::client()?, url, token, state, cursors })
    }

    /// Whole, or as it was.
    fn save(&self) -> Result<(), SinkError> {
        let text = serde_json::to_vec(&self.cursors).expect("names and numbers are JSON");
        let beside = self.state.with_extension("new");
        let write = || {
            let mut file = std::fs::File::create(&beside)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&beside, &self.state)
        };
        write().map_err(|error| refused(&self.state, &error.to_string()))
    }
}

fn refused(state: &Path, why: &str) -> SinkError {
    SinkError::Never { what: format!("keep in {} how far it is", state.display()), why: why.into() }
}

impl Sink for Webhook {
    async fn cursor(&mut self, run: &RunId) -> Result<u64, SinkError> {
        Ok(self.cursors.get(run).copied().unwrap_or(0))
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        let taken = self.cursors.get(run).copied().unwrap_or(0);
        // Those before it went well in a try that failed later on.
        for told in told.iter().filter(|told| told.record.sequence > taken) {
            let request = self.client.post(self.url.clone());
            let request = request.header(CONTENT_TYPE, "application/json");
            let request = match &self.token {
                Some(token) => request.bearer_auth(token),
                None => request,
            };
            let posted = http::answer("the webhook", request.body(told.record.to_line())).await;
            if posted.is_ok() {
                self.cursors.insert(run.clone(), told.record.sequence);
            }
            if posted.is_err() {
                self.save()?;
            }
            posted?;
        }
        self.save()
    }
}
