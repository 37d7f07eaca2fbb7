//! The sandbox and its reusable cells.

use std::{
    path::PathBuf,
    sync::{Mutex, OnceLock},
};

use sandbox::{PathVisibility, Sandbox, SandboxCell, SandboxError, SandboxRoom};

use crate::{
    judge_result::JudgeResult,
    toolchain::Toolchain,
    tools::{ToolNeed, VerifierTool},
};

/// A pool of idle sandbox cells, shared by all threads of the pipeline.
///
/// A thread takes a [`SandboxSlot`]; the slot takes a cell from the pool when the first program
/// runs, and returns it when it is dropped. A cell is reused only for the same set of visible
/// paths, so that paths opened for a command are never visible to programs that models wrote. A
/// cell whose sandbox failed is dropped.
#[derive(Debug)]
pub(crate) struct SandboxPool {
    toolchain: Toolchain,
    /// Opened when the first program runs; the error is kept as well.
    sandbox: OnceLock<Result<Sandbox, String>>,
    idle_cells: Mutex<Vec<PooledCell>>,
}

/// The limit of idle cells. Specs may name different paths, and each set of paths needs its own
/// cells.
const IDLE_CELLS_MAX: usize = 64;

/// A cell and the paths that it shows in addition to the system and the tools.
#[derive(Debug)]
struct PooledCell {
    shown_paths: Vec<PathBuf>,
    cell: SandboxCell,
}

/// The slot of one judging thread, with at most one cell.
#[derive(Debug)]
pub(crate) struct SandboxSlot<'a> {
    pool: &'a SandboxPool,
    cell: Option<PooledCell>,
}

impl SandboxPool {
    /// Creates a pool without a sandbox; it is opened on first use.
    pub(crate) fn new(toolchain: Toolchain) -> Self {
        Self { toolchain, sandbox: OnceLock::new(), idle_cells: Mutex::default() }
    }

    /// Returns a pool that runs no programs, for tests.
    #[cfg(test)]
    pub(crate) fn without_programs() -> Self {
        Self::new(Toolchain::without_programs())
    }

    /// Returns a slot for one thread.
    pub(crate) fn open_slot(&self) -> SandboxSlot<'_> {
        SandboxSlot { pool: self, cell: None }
    }

    /// Takes an idle cell that shows exactly these paths, or starts one.
    fn take_cell(&self, shown: &[PathBuf]) -> Result<PooledCell, JudgeResult> {
        let take = |idle: &mut Vec<PooledCell>| {
            let place = idle.iter().rposition(|idle| idle.shown_paths == shown)?;
            Some(idle.remove(place))
        };
        if let Some(cell) = self.idle_cells.lock().ok().and_then(|mut idle| take(&mut idle)) {
            return Ok(cell);
        }
        let open = || {
            let policy = PathVisibility {
                read_only: self.toolchain.tools.sandbox_directories(),
                hidden: self.toolchain.hidden.clone(),
            };
            Sandbox::open(self.toolchain.cell_launch.clone(), policy)
                .map_err(|unfit| unfit.to_string())
        };
        let sandbox = self.sandbox.get_or_init(open).as_ref().map_err(JudgeResult::host_error)?;
        let cell = if shown.is_empty() {
            sandbox.start_cell()
        } else {
            sandbox.with_read_only(shown).start_cell()
        };
        let cell = cell.map_err(|broken| JudgeResult::host_error(broken.to_string()))?;
        Ok(PooledCell { shown_paths: shown.to_owned(), cell })
    }

    /// Returns a cell to the pool; drops the least recently used cell above `IDLE_CELLS_MAX`.
    fn return_cell(&self, cell: PooledCell) {
        let Ok(mut idle) = self.idle_cells.lock() else { return };
        idle.push(cell);
        if idle.len() > IDLE_CELLS_MAX {
            // The cell that has been idle the longest.
            idle.remove(0);
        }
    }
}

impl<'a> SandboxSlot<'a> {
    /// Returns a tool of this host, or a host error if it is missing.
    pub(crate) fn find_tool(&self, need: &ToolNeed) -> Result<&'a VerifierTool, JudgeResult> {
        let lacking =
            || JudgeResult::host_error(format!("this box lacks {}", need.describe_missing()));
        self.pool.toolchain.tools.get(need).ok_or_else(lacking)
    }

    /// Returns the toolchain of this host.
    pub(crate) fn toolchain(&self) -> &'a Toolchain {
        &self.pool.toolchain
    }

    /// Runs programs in a new room. If the sandbox fails, returns a host error and drops the cell.
    pub(crate) fn run_in_room<P: AsRef<str>, C: AsRef<[u8]>, T>(
        &mut self,
        files: &[(P, C)],
        run: impl FnOnce(&mut SandboxRoom<'_>) -> Result<T, SandboxError>,
    ) -> Result<T, JudgeResult> {
        self.run_in_room_with(&[], files, run)
    }

    /// Runs programs in a new room of a cell that also shows these paths.
    pub(crate) fn run_in_room_with<P: AsRef<str>, C: AsRef<[u8]>, T>(
        &mut self,
        shown: &[PathBuf],
        files: &[(P, C)],
        run: impl FnOnce(&mut SandboxRoom<'_>) -> Result<T, SandboxError>,
    ) -> Result<T, JudgeResult> {
        let mut cell = match self.cell.take() {
            Some(cell) if cell.shown_paths == shown => cell,
            other => {
                other.into_iter().for_each(|cell| self.pool.return_cell(cell));
                self.pool.take_cell(shown)?
            }
        };
        let ran = cell.cell.create_room(files).and_then(|mut room| run(&mut room));
        match ran {
            Ok(ran) => {
                self.cell = Some(cell);
                Ok(ran)
            }
            Err(broken) => Err(JudgeResult::host_error(broken.to_string())),
        }
    }
}

/// The next to judge finds the cell warm.
impl Drop for SandboxSlot<'_> {
    /// Returns the cell to the pool for the next slot.
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.pool.return_cell(cell);
        }
    }
}
