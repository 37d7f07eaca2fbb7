//! A request that a peer sends again until its reply arrives.

use crate::peer::{Command, Request};

const REPLY_MS: u64 = 1_500;

/// The token of the first request. Those of timers are below.
const FIRST_ID: u64 = 16;

/// The one request of a peer that waits for its reply.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    last_id: u64,
    request: Option<Request>,
}

impl PendingRequest {
    /// Starts the ids of a process that was restarted so often.
    pub(crate) fn new(incarnation: u64) -> Self {
        Self { last_id: FIRST_ID + (incarnation << 32), request: None }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.request.is_none()
    }

    /// Sends a request; its reply replaces that of the one before.
    pub(crate) fn send(&mut self, request: Request) -> Vec<Command> {
        self.last_id += 1;
        self.request = Some(request);
        self.send_again(self.last_id)
    }

    /// Handles the timer of a request.
    pub(crate) fn send_again(&self, id: u64) -> Vec<Command> {
        match &self.request {
            Some(request) if id == self.last_id => {
                vec![Command::Send(id, request.clone()), Command::SetTimer(REPLY_MS, id)]
            }
            _ => Vec::new(),
        }
    }

    /// Returns true for the first reply to the last request.
    pub(crate) fn accept_reply(&mut self, id: u64) -> bool {
        id == self.last_id && self.request.take().is_some()
    }
}
