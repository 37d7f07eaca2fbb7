//! Matrix products. On the CPU they go straight to `gemm`, candle's own kernel, on rayon's current
//! pool: candle would size its thread count by itself.

use super::{for_row_blocks, host, math};
use candle_core::{Result, Storage, Tensor, bail};
use std::ops::Range;

/// Sum of `lhs * rhs` over the terms, plus a bias on every row. Transposed views are welcome.
pub(crate) fn sum_of_products(
    terms: &[(&Tensor, &Tensor)],
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let Some((first, rest)) = terms.split_first() else { bail!("no terms to sum") };
    if !first.0.device().is_cpu() {
        let mut sum = first.0.matmul(first.1)?;
        for (lhs, rhs) in rest {
            sum = (sum + lhs.matmul(rhs)?)?;
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
    let fewest = row_invariant_from(weight.dim(0)?, width);
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

/// A matrix in main memory as `gemm` sees it.
struct Matrix {
    range: Range<usize>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

fn matrix(tensor: &Tensor) -> Result<Matrix> {
    let (rows, columns) = tensor.dims2()?;
    let (row_stride, column_stride) = match tensor.stride() {
        [row, column] => (*row, *column),
        other => bail!("expected a matrix, got strides {other:?}"),
    };
    let start = tensor.layout().start_offset();
    let reach = match (rows, columns) {
        (0, _) | (_, 0) => 0,
        _ => (rows - 1) * row_stride + (columns - 1) * column_stride + 1,
    };
    Ok(Matrix { range: start..start + reach, rows, columns, row_stride, column_stride })
}

#[allow(unsafe_code, reason = "the gemm crate has only a raw pointer interface")]
fn multiply_onto(out: &mut [f32], lhs: &Tensor, rhs: &Tensor, accumulate: bool) -> Result<()> {
    let (left, right) = (matrix(lhs)?, matrix(rhs)?);
    let (lhs_storage, _) = lhs.storage_and_layout();
    let (rhs_storage, _) = rhs.storage_and_layout();
    let (Storage::Cpu(lhs_cpu), Storage::Cpu(rhs_cpu)) = (&*lhs_storage, &*rhs_storage) else {
        bail!("expected matrices in main memory");
    };
    let (lhs_all, rhs_all) = (lhs_cpu.as_slice::<f32>()?, rhs_cpu.as_slice::<f32>()?);
    let (Some(lhs_part), Some(rhs_part)) = (lhs_all.get(left.range), rhs_all.get(right.range))
    else {
        bail!("a matrix reaches beyond its storage");
    };
    if left.columns != right.rows || out.len() != left.rows * right.columns {
        bail!("cannot multiply {:?} by {:?}", lhs.shape(), rhs.shape());
    }
    // SAFETY: the three slices hold every element the sizes and strides reach (checked above and
    // in `matrix`), `out` is borrowed mutably and the others are locked for reading.
    unsafe {
        gemm::gemm(
            left.rows,
            right.columns,
            left.columns,
            out.as_mut_ptr(),
            1,
            right.columns as isize,
            accumulate,
            lhs_part.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            rhs_part.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1f32,
            1f32,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn a_row_has_the_same_bits_whatever_other_rows_there_are() {
        for (columns, inner) in
            [(64, 128), (128, 352), (260, 128), (64, 896), (4, 600), (896, 4864)]
        {
            let weight = random(&[columns, inner], 1);
            let x = random(&[150, inner], 2);
            let all = project(&x, &weight, None).unwrap().to_vec2::<f32>().unwrap();
            for rows in [1, 2, 3, 4, 5, 16, 31, 64, 65, 100] {
                let start = (rows * 7) % (150 - rows);
                let part = project(&x.narrow(0, start, rows).unwrap(), &weight, None).unwrap();
                let part = part.to_vec2::<f32>().unwrap();
                assert_eq!(part[..], all[start..start + rows], "{rows} rows, {columns}x{inner}");
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
}
