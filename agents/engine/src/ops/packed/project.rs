//! `x wᵀ`: weights as they lie in memory. Each weight is read once, which is what decoding a few
//! sequences takes its time for; many rows are packed, which takes little beside what they save.

mod by_rows;
mod by_tiles;

use super::kernel::{Kernel, SIDE};
use super::tiles::{self, Tile};
use super::{Parts, Phase, Rows};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of activations, narrowed once for all weights that they are multiplied with.
pub(crate) struct Inputs {
    form: Form,
    rows: usize,
    width: usize,
    kernel: Kernel,
}

/// As the kernel takes them.
enum Form {
    Rows(Vec<bf16>),
    Tiles(Vec<Tile>),
}

impl Inputs {
    /// `x` is `[rows, width]`.
    pub(crate) fn new(kernel: Kernel, phase: Phase, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let form = if kernel.takes_tiles(phase, x.len() / width) {
            Form::Tiles(tiles::of_columns(kernel, x, width))
        } else {
            Form::Rows(tiles::narrow(x, width))
        };
        Self { form, rows: x.len() / width, width, kernel }
    }
}

/// `out = Σ x wᵀ + bias` over the terms: `[rows, columns]`, with a weight `[columns, width]` each.
pub(crate) struct Projection<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) terms: Vec<(&'a Inputs, Rows<'a>)>,
    pub(crate) bias: Option<&'a [f32]>,
}

/// Rows of weights that one task takes at once where activations are many, so that they are in its
/// cache for all of them.
const PANEL: usize = 128;

/// Several at once: their weights make one list of work for the threads.
pub(crate) fn project(projections: Vec<Projection<'_>>) {
    let jobs: Vec<Job<'_>> = projections.into_iter().filter_map(Job::new).collect();
    let panels = jobs.iter().enumerate();
    let panels: Vec<_> = panels.flat_map(|(at, job)| job.panels().map(move |p| (at, p))).collect();
    let Some(kernel) = jobs.first().map(|job| job.kernel) else { return };
    let work = |panels: &[(usize, Range<usize>)]| {
        let _session = kernel.session();
        let mut room = Room::default();
        for (job, panel) in panels {
            jobs[*job].project(panel, &mut room);
        }
    };
    // Small enough that none is waited for long at the end.
    let tasks = 32 * rayon::current_num_threads();
    match panels.len() {
        0 | 1 => work(&panels),
        count => panels.par_chunks(count.div_ceil(tasks)).with_max_len(1).for_each(work),
    }
}

struct Job<'a> {
    out: Parts<'a>,
    work: Work<'a>,
    bias: Option<&'a [f32]>,
    rows: usize,
    columns: usize,
    kernel: Kernel,
}

/// All terms of a job are of one form, that of their kernel.
enum Work<'a> {
    ByRows(Vec<by_rows::Term<'a>>),
    ByTiles(Vec<by_tiles::Term<'a>>),
}

/// What a task uses again for each panel.
#[derive(Default)]
struct Room {
    by_rows: by_rows::Room,
    by_tiles: by_tiles::Room,
}

impl<'a> Job<'a> {
    /// `None` where there is nothing to compute.
    fn new(Projection { out, terms, bias }: Projection<'a>) -> Option<Self> {
        let (first, weight) = terms.first()?;
        let (rows, columns, kernel) = (first.rows, weight.count(), first.kernel);
        assert_eq!(out.len(), rows * columns);
        assert!(bias.is_none_or(|bias| bias.len() == columns));
        let (mut by_rows, mut by_tiles) = (Vec::new(), Vec::new());
        for (x, weight) in terms {
            assert!(x.rows == rows && weight.count() == columns && x.width == weight.width);
            match &x.form {
                Form::Rows(values) => {
                    by_rows.push(by_rows::Term { x: Rows::new(values, x.width), weight });
                }
                Form::Tiles(tiles) => by_tiles.push(by_tiles::Term { tiles, weight }),
            }
        }
        assert!(by_rows.is_empty() || by_tiles.is_empty());
        let work =
            if by_tiles.is_empty() { Work::ByRows(by_rows) } else { Work::ByTiles(by_tiles) };
        let out = (columns > 0).then(|| Parts::new(out, columns))?;
        Some(Self { out, work, bias, rows, columns, kernel })
    }

    fn panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let columns = self.columns;
        let panel = if self.rows > 2 * SIDE { PANEL } else { 2 * SIDE };
        (0..columns).step_by(panel).map(move |from| from..columns.min(from + panel))
    }

    fn project(&self, panel: &Range<usize>, room: &mut Room) {
        match &self.work {
            Work::ByRows(terms) => by_rows::project(self, terms, panel, &mut room.by_rows),
            Work::ByTiles(terms) => by_tiles::project(self, terms, panel, &mut room.by_tiles),
        }
    }
}
