//! Matrix products. On the CPU they go straight to `gemm`, candle's own kernel, on rayon's current
//! pool: candle would size its thread count by itself. The right side may be bf16; it is widened
//! to f32 a block of its rows at a time, and all sums are f32.

use super::{for_row_blocks, host, math};
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, bail};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Sum of `lhs * rhs` over the terms, plus a bias on every row. Transposed views are welcome.
pub(crate) fn sum_of_products(
    terms: &[(&Tensor, &Tensor)],
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let Some((first, rest)) = terms.split_first() else { bail!("no terms to sum") };
    if !first.0.device().is_cpu() {
        let product = |(lhs, rhs): &(&Tensor, &Tensor)| lhs.matmul(&rhs.to_dtype(DType::F32)?);
        let mut sum = product(first)?;
        for term in rest {
            sum = (sum + product(term)?)?;
        }
        return bias.map_or(Ok(sum.clone()), |bias| sum.broadcast_add(bias));
    }
    let (rows, columns) = (first.0.dim(0)?, first.1.dim(1)?);
    let mut out = match bias {
        Some(bias) => host(bias)?.repeat(rows),
        None => vec![0f32; rows * columns],
    };
    for (index, (lhs, rhs)) in terms.iter().enumerate() {
        multiply_onto(&mut out, lhs, rhs, bias.is_some() || index > 0)?;
    }
    Tensor::from_vec(out, (rows, columns), first.0.device())
}

pub(crate) fn product(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    sum_of_products(&[(lhs, rhs)], None)
}

/// `x wᵀ + bias`, each row of which has the same bits whatever other rows there are.
pub(crate) fn project(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let columns = match weight.dtype() {
        DType::BF16 => blocks(weight.dim(0)?, width).map(|block| block.len()).min().unwrap_or(1),
        _ => weight.dim(0)?,
    };
    let fewest = row_invariant_from(columns, width);
    if rows >= fewest || !x.device().is_cpu() {
        return sum_of_products(&[(x, &weight.t()?)], bias);
    }
    let padded = x.pad_with_zeros(0, 0, fewest - rows)?;
    sum_of_products(&[(&padded, &weight.t()?)], bias)?.narrow(0, 0, rows)
}

/// From how many rows on `gemm` 0.19 sums each element of a product in one and the same order. It
/// has other kernels for single rows and for at most 256 elements, and cuts the inner dimension
/// differently (only above 512) when both outer ones are at most 64.
fn row_invariant_from(columns: usize, inner: usize) -> usize {
    let small = if columns <= 64 && inner > 512 { 65 } else { 2 };
    small.max(256 / columns + 1)
}

/// Sum of the rows.
pub(crate) fn sum_rows(x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return x.sum(0);
    }
    let width = x.dim(1)?;
    let x_rows = host(x)?;
    let mut out = vec![0f32; width];
    for_row_blocks(&mut out, width, 1, |_, out| {
        for row in x_rows.chunks_exact(width) {
            math::add_scaled(out, 1.0, row);
        }
    });
    Tensor::from_vec(out, width, x.device())
}

/// Where a matrix lies in its storage.
struct Place {
    range: Range<usize>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

fn place(tensor: &Tensor) -> Result<Place> {
    let (rows, columns) = tensor.dims2()?;
    let (row_stride, column_stride) = match tensor.stride() {
        [row, column] => (*row, *column),
        other => bail!("expected a matrix, got strides {other:?}"),
    };
    let start = tensor.layout().start_offset();
    let reach = reach(rows, columns, row_stride, column_stride);
    Ok(Place { range: start..start + reach, rows, columns, row_stride, column_stride })
}

/// Elements from a matrix's first to its last.
fn reach(rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> usize {
    match (rows, columns) {
        (0, _) | (_, 0) => 0,
        _ => (rows - 1) * row_stride + (columns - 1) * column_stride + 1,
    }
}

impl Place {
    fn of<'a, T>(&self, storage: &'a [T]) -> Result<&'a [T]> {
        match storage.get(self.range.clone()) {
            Some(values) => Ok(values),
            None => bail!("a matrix reaches beyond its storage"),
        }
    }

    fn matrix<'a>(&self, storage: &'a [f32]) -> Result<Matrix<'a>> {
        let Self { rows, columns, row_stride, column_stride, .. } = *self;
        Ok(Matrix { values: self.of(storage)?, rows, columns, row_stride, column_stride })
    }
}

/// A matrix in main memory as `gemm` sees it.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl Matrix<'_> {
    fn columns(self, part: &Range<usize>) -> Self {
        let values = self.values.get(part.start * self.column_stride..).unwrap_or_default();
        Self { values, columns: part.len(), ..self }
    }
}

fn in_memory(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(cpu) => Ok(cpu),
        _ => bail!("expected matrices in main memory"),
    }
}

fn multiply_onto(out: &mut [f32], lhs: &Tensor, rhs: &Tensor, accumulate: bool) -> Result<()> {
    let (left, right) = (place(lhs)?, place(rhs)?);
    if left.columns != right.rows || out.len() != left.rows * right.columns {
        bail!("cannot multiply {:?} by {:?}", lhs.shape(), rhs.shape());
    }
    let (lhs_storage, _) = lhs.storage_and_layout();
    let (rhs_storage, _) = rhs.storage_and_layout();
    let left = left.matrix(in_memory(&lhs_storage)?.as_slice::<f32>()?)?;
    let rhs_cpu = in_memory(&rhs_storage)?;
    match rhs.dtype() {
        DType::BF16 => multiply_widened(out, left, &right, rhs_cpu.as_slice::<bf16>()?, accumulate),
        _ => {
            let right = right.matrix(rhs_cpu.as_slice::<f32>()?)?;
            gemm_onto(out, right.columns, left, right, accumulate);
            Ok(())
        }
    }
}

/// `right` is a weight as it lies in memory or its transposed view. A block of the weight's rows
/// is a part of the product's columns if it is transposed, else a part of the sum.
fn multiply_widened(
    out: &mut [f32],
    left: Matrix<'_>,
    right: &Place,
    storage: &[bf16],
    accumulate: bool,
) -> Result<()> {
    let (is_transposed, stored_rows, width) = match (right.row_stride, right.column_stride) {
        (1, width) if width == right.rows => (true, right.columns, width),
        (width, 1) if width == right.columns => (false, right.rows, width),
        other => bail!("expected a bf16 matrix whole or transposed, got strides {other:?}"),
    };
    let stored = right.of(storage)?;
    let row_stride = right.columns;
    let mut wide = Vec::new();
    for block in blocks(stored_rows, width) {
        widen(&stored[block.start * width..block.end * width], &mut wide);
        let (rows, values) = (block.len(), wide.as_slice());
        if is_transposed {
            let right =
                Matrix { values, rows: width, columns: rows, row_stride: 1, column_stride: width };
            gemm_onto(&mut out[block.start..], row_stride, left, right, accumulate);
        } else {
            let right =
                Matrix { values, rows, columns: width, row_stride: width, column_stride: 1 };
            let onto = accumulate || block.start > 0;
            gemm_onto(out, row_stride, left.columns(&block), right, onto);
        }
    }
    Ok(())
}

/// About as many f32 as a core's cache holds.
const BLOCK_ELEMENTS: usize = 1 << 20;
/// Fewer columns at once make `gemm` slow, and [`row_invariant_from`] large.
const BLOCK_ROWS_MIN: usize = 128;

/// Cuts a weight's rows into parts of about the same length, by its shape alone.
fn blocks(rows: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let least = (BLOCK_ELEMENTS / width.max(1)).max(BLOCK_ROWS_MIN);
    let count = (rows / least).max(1);
    (0..count).map(move |block| block * rows / count..(block + 1) * rows / count)
}

fn widen(values: &[bf16], out: &mut Vec<f32>) {
    const TASK: usize = 1 << 16;
    out.resize(values.len(), 0.0);
    out.par_chunks_mut(TASK).zip(values.par_chunks(TASK)).for_each(|(out, values)| {
        for (out, value) in out.iter_mut().zip(values) {
            *out = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    });
}

#[allow(unsafe_code, reason = "the gemm crate has only a raw pointer interface")]
fn gemm_onto(
    out: &mut [f32],
    out_stride: usize,
    lhs: Matrix<'_>,
    rhs: Matrix<'_>,
    accumulate: bool,
) {
    let fits =
        |m: &Matrix<'_>| reach(m.rows, m.columns, m.row_stride, m.column_stride) <= m.values.len();
    let out_reach = reach(lhs.rows, rhs.columns, out_stride, 1);
    assert!(lhs.columns == rhs.rows && out_reach <= out.len() && rhs.columns <= out_stride);
    assert!(fits(&lhs) && fits(&rhs));
    // SAFETY: the three slices hold every element the sizes and strides reach (checked above), the
    // rows of `out` do not overlap, and it is borrowed mutably.
    unsafe {
        gemm::gemm(
            lhs.rows,
            rhs.columns,
            lhs.columns,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            accumulate,
            lhs.values.as_ptr(),
            lhs.column_stride as isize,
            lhs.row_stride as isize,
            rhs.values.as_ptr(),
            rhs.column_stride as isize,
            rhs.row_stride as isize,
            1f32,
            1f32,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn a_row_has_the_same_bits_whatever_other_rows_there_are() {
        let shapes = [(64, 128), (128, 352), (260, 128), (64, 896), (4, 600), (896, 4864)];
        for ((columns, inner), dtype) in
            shapes.into_iter().flat_map(|shape| [(shape, DType::F32), (shape, DType::BF16)])
        {
            let weight = random(&[columns, inner], 1).to_dtype(dtype).unwrap();
            let x = random(&[150, inner], 2);
            let all = project(&x, &weight, None).unwrap().to_vec2::<f32>().unwrap();
            for rows in [1, 2, 3, 4, 5, 16, 31, 64, 65, 100] {
                let start = (rows * 7) % (150 - rows);
                let part = project(&x.narrow(0, start, rows).unwrap(), &weight, None).unwrap();
                let part = part.to_vec2::<f32>().unwrap();
                assert_eq!(
                    part[..],
                    all[start..start + rows],
                    "{rows} rows, {columns}x{inner} {dtype:?}"
                );
            }
        }
    }

    #[test]
    fn products_add_up_as_candle_s_do() {
        let (a, b, c) = (random(&[7, 30], 1), random(&[9, 30], 2), random(&[9, 12], 4));
        let d = random(&[7, 12], 3);
        let bias = random(&[9], 5);
        let ours = sum_of_products(&[(&a, &b.t().unwrap()), (&d, &c.t().unwrap())], Some(&bias));
        let theirs = a.matmul(&b.t().unwrap()).unwrap() + d.matmul(&c.t().unwrap()).unwrap();
        let theirs = theirs.unwrap().broadcast_add(&bias).unwrap();
        assert_close(&ours.unwrap(), &theirs, 1e-5);
        assert!(product(&a, &a).is_err());
    }

    #[test]
    fn a_bf16_weight_counts_as_the_numbers_it_holds() {
        for (rows, width) in [(9, 30), (300, 7000), (2100, 600), (128, 1), (1, 8200)] {
            let narrow = random(&[rows, width], 1).to_dtype(DType::BF16).unwrap();
            let wide = narrow.to_dtype(DType::F32).unwrap();
            let (x, grad, bias) =
                (random(&[5, width], 2), random(&[5, rows], 3), random(&[rows], 4));
            let near = 1e-4 * (width.max(rows) as f32).sqrt();
            assert_close(
                &project(&x, &narrow, Some(&bias)).unwrap(),
                &project(&x, &wide, Some(&bias)).unwrap(),
                near,
            );
            let with = |weight: &Tensor| sum_of_products(&[(&grad, weight), (&grad, weight)], None);
            assert_close(&with(&narrow).unwrap(), &with(&wide).unwrap(), near);
        }
        let skewed = random(&[8, 9], 1).to_dtype(DType::BF16).unwrap().narrow(1, 2, 4).unwrap();
        assert!(product(&random(&[3, 8], 2), &skewed).is_err());
    }
}
