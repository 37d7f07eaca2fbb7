//! Products of rows of activations with rows of weights. Both lie along the inner dimension, and
//! neither is packed.

pub(super) use super::super::kernel::RowTerm;
use super::ProjectionJob;
use std::ops::Range;

#[derive(Default)]
pub(super) struct RowBuffers {
    sums: Vec<f32>,
    kernel: Vec<f32>,
}

pub(super) fn project_rows(
    job: &ProjectionJob<'_>,
    terms: &[RowTerm<'_>],
    panel: &Range<usize>,
    room: &mut RowBuffers,
) {
    let RowBuffers { sums, kernel } = room;
    let at_once = job.kernel.rows_at_once();
    sums.resize(at_once * panel.len(), 0.0);
    for from in (0..job.rows).step_by(at_once) {
        let rows = from..job.rows.min(from + at_once);
        let sums = &mut sums[..rows.len() * panel.len()];
        match job.bias {
            Some(bias) => {
                for sums in sums.chunks_exact_mut(panel.len()) {
                    sums.copy_from_slice(&bias[panel.clone()]);
                }
            }
            None => sums.fill(0.0),
        }
        job.kernel.add_dot_products(terms, rows.clone(), panel.clone(), sums, kernel);
        for (row, sums) in rows.zip(sums.chunks_exact(panel.len())) {
            #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
            // SAFETY: the columns of a panel are written by its task only.
            unsafe {
                job.out.write_row(sums, row, panel.start);
            }
        }
    }
}
