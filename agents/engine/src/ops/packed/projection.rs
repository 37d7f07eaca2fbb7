//! Projections `x wᵀ` with packed weights, or with weights as they lie in memory. Each weight is
//! read once, which dominates the time of decoding a few sequences. Beside weights that are not
//! packed, many rows of activations are, which costs little compared with what it saves.

mod by_packed;
mod by_rows;
mod by_tiles;

use super::factor_tile::{FactorTile, SIDE, STEP};
use super::kernel::MatmulKernel;
use super::left_right::LeftFactor;
use super::quantized::{QuantizedMatrix, QuantizedRows};
use super::strip_sums::StripSums;
use super::weights::PackedMatrix;
use super::{Bf16Rows, MatmulPhase, SharedOutput, tiles};
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
    /// For packed weights.
    Left(LeftFactor),
    /// For weights in 8 bits.
    Quantized(QuantizedRows),
}

impl ProjectionInputs {
    /// Narrows `x`, `[rows, width]`, for weights in rows; packs it if the kernel prefers that.
    pub(crate) fn new(kernel: MatmulKernel, phase: MatmulPhase, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let rows = x.len() / width;
        let form = if kernel.packs_activations(phase, rows) {
            let mut packed = vec![FactorTile::ZERO; rows.div_ceil(SIDE) * width.div_ceil(STEP)];
            tiles::pack_transposed(kernel, x, width, &mut packed);
            InputForm::Tiles(packed)
        } else {
            InputForm::Rows(tiles::narrow_to_bf16(x, width))
        };
        Self { form, rows, width, kernel }
    }

    /// Narrows `x`, `[rows, width]`, for packed weights.
    pub(crate) fn for_packed_weights(kernel: MatmulKernel, x: &[f32], width: usize) -> Self {
        let form = InputForm::Left(LeftFactor::new(kernel, x, width));
        Self { form, rows: x.len() / width, width, kernel }
    }

    /// Quantises `x`, `[rows, width]`, for weights in 8 bits. `kernel` multiplies the terms beside
    /// them.
    pub(crate) fn for_quantized_weights(kernel: MatmulKernel, x: &[f32], width: usize) -> Self {
        let form = InputForm::Quantized(QuantizedRows::quantize(x, width));
        Self { form, rows: x.len() / width, width, kernel }
    }
}

/// A weight `[columns, width]` in the form that the inputs were made for.
#[derive(Clone, Copy)]
pub(crate) enum ProjectionWeight<'a> {
    Rows(Bf16Rows<'a>),
    Packed(&'a PackedMatrix),
    Quantized(&'a QuantizedMatrix),
}

impl ProjectionWeight<'_> {
    /// Returns (columns, width).
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Rows(rows) => (rows.row_count(), rows.width),
            Self::Packed(packed) => packed.shape(),
            Self::Quantized(quantized) => quantized.shape(),
        }
    }
}

/// A projection `out = Σ x wᵀ + bias`: `out` is `[rows, columns]`, each weight `[columns, width]`.
pub(crate) struct PackedProjection<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) terms: Vec<(&'a ProjectionInputs, ProjectionWeight<'a>)>,
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
    Rows(Vec<by_rows::RowTerm<'a>>),
    Tiles(Vec<by_tiles::TileTerm<'a>>),
    Packed(Vec<by_packed::PackedTerm<'a>>),
}

#[derive(Default)]
struct TaskBuffers {
    by_rows: by_rows::RowBuffers,
    by_tiles: by_tiles::TileBuffers,
    by_packed: StripSums,
}

impl<'a> JobTerms<'a> {
    /// Panics if a weight has another form than the inputs it is multiplied with, or if forms
    /// differ.
    fn new(terms: Vec<(&'a ProjectionInputs, ProjectionWeight<'a>)>) -> Self {
        let (mut by_rows, mut by_tiles, mut by_packed) = (Vec::new(), Vec::new(), Vec::new());
        for (x, weight) in terms {
            match (&x.form, weight) {
                (InputForm::Rows(values), ProjectionWeight::Rows(weight)) => {
                    by_rows.push(by_rows::RowTerm { x: Bf16Rows::new(values, x.width), weight });
                }
                (InputForm::Tiles(tiles), ProjectionWeight::Rows(weight)) => {
                    by_tiles.push(by_tiles::TileTerm { tiles, weight });
                }
                (InputForm::Left(x), ProjectionWeight::Packed(weight)) => {
                    by_packed.push(by_packed::PackedTerm::Bf16 { x, weight });
                }
                (InputForm::Quantized(x), ProjectionWeight::Quantized(weight)) => {
                    by_packed.push(by_packed::PackedTerm::Quantized { x, weight });
                }
                _ => panic!("inputs and weights of different forms"),
            }
        }
        match (by_rows.is_empty(), by_tiles.is_empty(), by_packed.is_empty()) {
            (false, true, true) => Self::Rows(by_rows),
            (true, false, true) => Self::Tiles(by_tiles),
            (true, true, _) => Self::Packed(by_packed),
            _ => panic!("terms of different forms"),
        }
    }
}

impl<'a> ProjectionJob<'a> {
    /// Checks the sizes; `None` if there is nothing to compute.
    fn new(PackedProjection { out, terms, bias }: PackedProjection<'a>) -> Option<Self> {
        let (first, weight) = terms.first()?;
        let (rows, columns, kernel) = (first.rows, weight.shape().0, first.kernel);
        assert_eq!(out.len(), rows * columns);
        assert!(bias.is_none_or(|bias| bias.len() == columns));
        let fits = |(x, weight): &(&ProjectionInputs, ProjectionWeight<'_>)| {
            x.rows == rows && weight.shape() == (columns, x.width)
        };
        assert!(terms.iter().all(fits));
        let work = JobTerms::new(terms);
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
            JobTerms::Rows(terms) => by_rows::project_rows(self, terms, panel, &mut room.by_rows),
            JobTerms::Tiles(terms) => {
                by_tiles::project_tiles(self, terms, panel, &mut room.by_tiles);
            }
            JobTerms::Packed(terms) => {
                by_packed::project_packed_columns(self, terms, panel, &mut room.by_packed);
            }
        }
    }
}
