//! What a box brings to judge with, found out once.

use std::path::PathBuf;

use sandbox::{Launch, Policy, Sandbox};

use crate::tools::{Need, Tools};

#[derive(Debug, Clone)]
pub struct Kit {
    pub tools: Tools,
    /// How a cell for programs is started.
    pub cell: Launch,
    /// What no program sees, wherever it is: the agent's own files.
    pub hidden: Vec<PathBuf>,
}

impl Kit {
    /// One that runs no programs.
    pub(crate) fn none() -> Self {
        let cell = Launch { program: PathBuf::new(), arguments: Vec::new() };
        Self { tools: Tools::default(), cell, hidden: Vec::new() }
    }

    /// Leaves out what needs a sandbox when this box has none. The answer says what contains
    /// programs here, or why nothing does.
    pub fn tested(mut self) -> (Self, Result<String, String>) {
        let policy = Policy { read_only: self.tools.directories(), hidden: self.hidden.clone() };
        let found = match Sandbox::open(self.cell.clone(), policy) {
            Ok(sandbox) => Ok(sandbox.layers().to_string()),
            Err(unfit) => {
                self.tools = Tools::default();
                Err(unfit.to_string())
            }
        };
        (self, found)
    }

    /// What is missing here of what is needed.
    pub(crate) fn lacking<'a>(&self, needs: impl IntoIterator<Item = &'a Need>) -> Vec<&'a Need> {
        needs.into_iter().filter(|need| !self.tools.has(need)).collect()
    }
}
