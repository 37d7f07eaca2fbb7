//! The sandbox and its reusable cells.

use std::{
    path::PathBuf,
    sync::{Mutex, OnceLock},
    time::Duration,
};

use line_programs::LineProgramError;
use sandbox::{PathVisibility, Sandbox, SandboxCell, SandboxError, SandboxRoom};
use serde_json::{Map, Value};

use crate::{
    judge_result::JudgeResult,
    served_commands::{ServedCommand, ServedCommands},
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
    /// Commands that keep running have cells of their own.
    served: ServedCommands,
}

/// Specs may name different paths, and each set of paths needs its own cells.
const IDLE_CELLS_MAX: usize = 64;

/// The paths are shown in addition to the system and the tools.
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
    /// The number of threads that judge at the same time.
    threads: usize,
}

impl SandboxPool {
    pub(crate) fn new(toolchain: Toolchain) -> Self {
        Self {
            toolchain,
            sandbox: OnceLock::new(),
            idle_cells: Mutex::default(),
            served: ServedCommands::default(),
        }
    }

    #[cfg(test)]
    pub(crate) fn without_programs() -> Self {
        Self::new(Toolchain::without_programs())
    }

    /// Opens the slot of one of the threads that judge at the same time.
    pub(crate) fn open_slot(&self, threads: usize) -> SandboxSlot<'_> {
        SandboxSlot { pool: self, cell: None, threads }
    }

    fn open_sandbox(&self) -> Result<&Sandbox, String> {
        let open = || {
            let policy = PathVisibility {
                read_only: self.toolchain.tools.sandbox_directories(),
                hidden: self.toolchain.hidden.clone(),
            };
            Sandbox::open(self.toolchain.cell_launch.clone(), policy)
                .map_err(|unfit| unfit.to_string())
        };
        self.sandbox.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn take_cell(&self, shown: &[PathBuf]) -> Result<PooledCell, JudgeResult> {
        let take = |idle: &mut Vec<PooledCell>| {
            let place = idle.iter().rposition(|idle| idle.shown_paths == shown)?;
            Some(idle.remove(place))
        };
        if let Some(cell) = self.idle_cells.lock().ok().and_then(|mut idle| take(&mut idle)) {
            return Ok(cell);
        }
        let sandbox = self.open_sandbox().map_err(JudgeResult::host_error)?;
        let cell = if shown.is_empty() {
            sandbox.start_cell()
        } else {
            sandbox.with_read_only(shown).start_cell()
        };
        let cell = cell.map_err(|broken| JudgeResult::host_error(broken.to_string()))?;
        Ok(PooledCell { shown_paths: shown.to_owned(), cell })
    }

    /// Drops the cell that has been idle the longest above `IDLE_CELLS_MAX`.
    fn return_cell(&self, cell: PooledCell) {
        let Ok(mut idle) = self.idle_cells.lock() else { return };
        idle.push(cell);
        if idle.len() > IDLE_CELLS_MAX {
            idle.remove(0);
        }
    }
}

impl<'a> SandboxSlot<'a> {
    /// Returns a host error if the tool is missing.
    pub(crate) fn find_tool(&self, need: &ToolNeed) -> Result<&'a VerifierTool, JudgeResult> {
        let lacking =
            || JudgeResult::host_error(format!("this box lacks {}", need.describe_missing()));
        self.pool.toolchain.tools.get(need).ok_or_else(lacking)
    }

    pub(crate) fn toolchain(&self) -> &'a Toolchain {
        &self.pool.toolchain
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Sends a request to a command that keeps running.
    pub(crate) fn ask_served(
        &self,
        command: ServedCommand,
        request: &Map<String, Value>,
        timeout: Duration,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let open = || self.pool.open_sandbox().cloned();
        self.pool.served.request_answer(command, open, request, timeout)
    }

    /// Drops the cell and returns a host error if the sandbox fails.
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

impl Drop for SandboxSlot<'_> {
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.pool.return_cell(cell);
        }
    }
}
