//! Whatever takes a POST: each fact as its line in an archive is, in order, one at a time.

use std::path::PathBuf;

use reqwest::{Client, Url, header::CONTENT_TYPE};
use wire::RunId;

use crate::{Sink, SinkError, http, points::Told, state::State};

/// An address, and a file that says how far it is. A fact may come again after a crash: its
/// `sequence` tells.
#[derive(Debug)]
pub struct Webhook {
    client: Client,
    url: Url,
    token: Option<String>,
    state: State,
}

impl Webhook {
    /// `token`: a bearer, where the address asks for one.
    ///
    /// # Errors
    /// When the state cannot be read, or is none.
    pub fn new(url: Url, token: Option<String>, state: PathBuf) -> Result<Self, SinkError> {
        Ok(Self { client: http::client()?, url, token, state: State::open(state)? })
    }

    async fn post(&self, told: &Told) -> Result<(), SinkError> {
        let request = self.client.post(self.url.clone());
        let request = request.header(CONTENT_TYPE, "application/json");
        let request = http::bearing(request, self.token.as_deref());
        http::answer("the webhook", request.body(told.record.to_line())).await.map(drop)
    }
}

impl Sink for Webhook {
    async fn cursor(&mut self, run: &RunId) -> Result<u64, SinkError> {
        Ok(self.state.of(run))
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        for told in told {
            // Those before it went well in a try that failed later on.
            if told.record.sequence > self.state.of(run) {
                self.post(told).await?;
                self.state.set(run, told.record.sequence);
                self.state.save()?;
            }
        }
        Ok(())
    }
}
