//! What a box runs programs with: its tools, and cells that are kept warm.

use std::sync::{Mutex, OnceLock};

use sandbox::{Broken, Cell, Policy, Room, Sandbox};

use crate::{
    kit::Kit,
    opinion::Opinion,
    tools::{Need, Tool},
};

/// Shared by all that judge at the same time.
#[derive(Debug)]
pub(crate) struct Shop {
    kit: Kit,
    /// Opened when the first program is run.
    sandbox: OnceLock<Result<Sandbox, String>>,
    idle: Mutex<Vec<Cell>>,
}

/// One place to judge at, with at most one cell of its own.
#[derive(Debug)]
pub(crate) struct Desk<'a> {
    shop: &'a Shop,
    cell: Option<Cell>,
}

impl Shop {
    pub(crate) fn new(kit: Kit) -> Self {
        Self { kit, sandbox: OnceLock::new(), idle: Mutex::default() }
    }

    /// One that runs no programs.
    #[cfg(test)]
    pub(crate) fn closed() -> Self {
        Self::new(Kit::none())
    }

    pub(crate) fn desk(&self) -> Desk<'_> {
        Desk { shop: self, cell: None }
    }

    fn cell(&self) -> Result<Cell, Opinion> {
        if let Some(cell) = self.idle.lock().ok().and_then(|mut idle| idle.pop()) {
            return Ok(cell);
        }
        let open = || {
            let policy =
                Policy { read_only: self.kit.tools.directories(), hidden: self.kit.hidden.clone() };
            Sandbox::open(self.kit.cell.clone(), policy).map_err(|unfit| unfit.to_string())
        };
        let sandbox = self.sandbox.get_or_init(open).as_ref().map_err(Opinion::trouble)?;
        sandbox.cell().map_err(|broken| Opinion::trouble(broken.to_string()))
    }
}

impl<'a> Desk<'a> {
    /// A tool of this box. Without it, another box has to judge.
    pub(crate) fn tool(&self, need: &Need) -> Result<&'a Tool, Opinion> {
        let lacking = || Opinion::trouble(format!("this box lacks {}", need.lacking()));
        self.shop.kit.tools.get(need).ok_or_else(lacking)
    }

    /// Runs programs in a fresh room. When the sandbox fails, nothing is known of the sample, and
    /// the cell is given up.
    pub(crate) fn in_room<P: AsRef<str>, C: AsRef<[u8]>, T>(
        &mut self,
        files: &[(P, C)],
        run: impl FnOnce(&mut Room<'_>) -> Result<T, Broken>,
    ) -> Result<T, Opinion> {
        let mut cell = match self.cell.take() {
            Some(cell) => cell,
            None => self.shop.cell()?,
        };
        let ran = cell.room(files).and_then(|mut room| run(&mut room));
        match ran {
            Ok(ran) => {
                self.cell = Some(cell);
                Ok(ran)
            }
            Err(broken) => Err(Opinion::trouble(broken.to_string())),
        }
    }
}

/// The next to judge finds the cell warm.
impl Drop for Desk<'_> {
    fn drop(&mut self) {
        if let (Some(cell), Ok(mut idle)) = (self.cell.take(), self.shop.idle.lock()) {
            idle.push(cell);
        }
    }
}
