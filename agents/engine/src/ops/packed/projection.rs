//! Projections `x wᵀ` with weights as they lie in memory. Each weight is read once, which dominates
//! the time of decoding a few sequences. Many rows of activations are packed, which costs little
//! compared with what it saves.

mod by_rows;
mod by_tiles;

use super::factor_tile::{FactorTile, SIDE};
use super::kernel::MatmulKernel;
use super::tiles;
use super::{Bf16Rows, MatmulPhase, SharedOutput};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of activations, narrowed once for all weights they are multiplied with.
pub(crate) struct ProjectionInputs {
    form: InputForm,
    rows: usize,
    width: usize,
    kernel: MatmulKernel,
}

enum InputForm {
    Rows(Vec<bf16>),
    Tiles(Vec<FactorTile>),
}

impl ProjectionInputs {
    /// Narrows `x`, `[rows, width]`, and packs it if the kernel prefers that.
    pub(crate) fn new(kernel: MatmulKernel, phase: MatmulPhase, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let form = if kernel.packs_activations(phase, x.len() / width) {
            InputForm::Tiles(tiles::pack_transposed(kernel, x, width))
        } else {
            InputForm::Rows(tiles::narrow_to_bf16(x, width))
        };
        Self { form, rows: x.len() / width, width, kernel }
    }
}

/// A projection `out = Σ x wᵀ + bias`: `out` is `[rows, columns]`, each weight `[columns, width]`.
pub(crate) struct PackedProjection<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) terms: Vec<(&'a ProjectionInputs, Bf16Rows<'a>)>,
    pub(crate) bias: Option<&'a [f32]>,
}

/// The rows of weights that a task takes at once, few enough to stay in its cache.
const PANEL_ROWS: usize = 128;

/// Computes several projections at once, so that the threads share one list of work.
pub(crate) fn project_packed(projections: Vec<PackedProjection<'_>>) {
    let jobs: Vec<ProjectionJob<'_>> =
        projections.into_iter().filter_map(ProjectionJob::new).collect();
    let panels = jobs.iter().enumerate();
    let panels: Vec<_> =
        panels.flat_map(|(at, job)| job.split_panels().map(move |p| (at, p))).collect();
    let Some(kernel) = jobs.first().map(|job| job.kernel) else { return };
    let work = |panels: &[(usize, Range<usize>)]| {
        let _session = kernel.start_session();
        let mut room = TaskBuffers::default();
        for (job, panel) in panels {
            jobs[*job].project_panel(panel, &mut room);
        }
    };
    // Tasks are small, so that the threads finish at nearly the same time.
    let tasks = 32 * rayon::current_num_threads();
    match panels.len() {
        0 | 1 => work(&panels),
        count => panels.par_chunks(count.div_ceil(tasks)).with_max_len(1).for_each(work),
    }
}

struct ProjectionJob<'a> {
    out: SharedOutput<'a>,
    work: JobTerms<'a>,
    bias: Option<&'a [f32]>,
    rows: usize,
    columns: usize,
    kernel: MatmulKernel,
}

enum JobTerms<'a> {
    ByRows(Vec<by_rows::RowTerm<'a>>),
    ByTiles(Vec<by_tiles::TileTerm<'a>>),
}

#[derive(Default)]
struct TaskBuffers {
    by_rows: by_rows::RowBuffers,
    by_tiles: by_tiles::TileBuffers,
}

impl<'a> ProjectionJob<'a> {
    /// Checks the sizes; `None` if there is nothing to compute.
    fn new(PackedProjection { out, terms, bias }: PackedProjection<'a>) -> Option<Self> {
        let (first, weight) = terms.first()?;
        let (rows, columns, kernel) = (first.rows, weight.row_count(), first.kernel);
        assert_eq!(out.len(), rows * columns);
        assert!(bias.is_none_or(|bias| bias.len() == columns));
        let (mut by_rows, mut by_tiles) = (Vec::new(), Vec::new());
        for (x, weight) in terms {
            assert!(x.rows == rows && weight.row_count() == columns && x.width == weight.width);
            match &x.form {
                InputForm::Rows(values) => {
                    by_rows.push(by_rows::RowTerm { x: Bf16Rows::new(values, x.width), weight });
                }
                InputForm::Tiles(tiles) => by_tiles.push(by_tiles::TileTerm { tiles, weight }),
            }
        }
        assert!(by_rows.is_empty() || by_tiles.is_empty());
        let work = if by_tiles.is_empty() {
            JobTerms::ByRows(by_rows)
        } else {
            JobTerms::ByTiles(by_tiles)
        };
        let out = (columns > 0).then(|| SharedOutput::new(out, columns))?;
        Some(Self { out, work, bias, rows, columns, kernel })
    }

    fn split_panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let columns = self.columns;
        let panel = if self.rows > 2 * SIDE { PANEL_ROWS } else { 2 * SIDE };
        (0..columns).step_by(panel).map(move |from| from..columns.min(from + panel))
    }

    fn project_panel(&self, panel: &Range<usize>, room: &mut TaskBuffers) {
        match &self.work {
            JobTerms::ByRows(terms) => by_rows::project_rows(self, terms, panel, &mut room.by_rows),
            JobTerms::ByTiles(terms) => {
                by_tiles::project_tiles(self, terms, panel, &mut room.by_tiles);
            }
        }
    }
}
