//! Matrix products by what they are for: projections, gradients of their inputs, gradients of
//! their weights. On the CPU, f32 weights go to `gemm`, candle's own kernel, on rayon's current
//! pool: candle would size its thread count by itself. For bf16 weights both factors are narrowed
//! and [`packed`] multiplies them. All sums are f32.

use super::matrix::Matrix;
pub(crate) use super::packed::Phase;
use super::packed::{self, Factors, Inputs, Kernel, Right};
use super::{for_row_blocks, host, math};
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Rows `[rows, width]` that weights of one type are multiplied with; made ready once for all.
pub(crate) struct Rows {
    x: Tensor,
    packed: Option<Inputs>,
}

impl Rows {
    pub(crate) fn new(phase: Phase, x: &Tensor, weights: DType) -> Result<Self> {
        let packed = match weights {
            DType::BF16 if x.device().is_cpu() => {
                Some(Inputs::new(Kernel::best(phase), phase, &host(x)?, x.dim(1)?))
            }
            _ => None,
        };
        Ok(Self { x: x.clone(), packed })
    }
}

/// `Σ x wᵀ + bias`; a weight is `[columns, width]`.
pub(crate) struct Projection<'a> {
    pub(crate) terms: Vec<(&'a Rows, Matrix)>,
    pub(crate) bias: Option<&'a Tensor>,
}

/// Several projections at once. Each row has the same bits whatever other rows of its phase there
/// are.
pub(crate) fn project_all(projections: &[Projection<'_>]) -> Result<Vec<Tensor>> {
    let packed = |(rows, _): &(&Rows, Matrix)| rows.packed.is_some();
    if !projections.iter().flat_map(|projection| &projection.terms).all(packed) {
        return projections.iter().map(project_wide).collect();
    }
    let (mut outs, mut weights, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for Projection { terms, bias } in projections {
        let Some((rows, weight)) = terms.first() else { bail!("no terms to sum") };
        let columns = weight.dims()?.0;
        outs.push((vec![0f32; rows.x.dim(0)? * columns], columns));
        weights.push(terms.iter().map(|(_, w)| w.values()).collect::<Result<Vec<_>>>()?);
        biases.push(bias.map(host).transpose()?);
    }
    let mut work = Vec::with_capacity(projections.len());
    for (index, (out, _)) in outs.iter_mut().enumerate() {
        let mut terms = Vec::new();
        for ((rows, weight), values) in projections[index].terms.iter().zip(&weights[index]) {
            let Some(inputs) = &rows.packed else { bail!("rows that are not packed") };
            let (columns, width) = weight.dims()?;
            if rows.x.dim(1)? != width {
                bail!("cannot project {:?} by [{columns}, {width}]", rows.x.shape());
            }
            terms.push((inputs, packed::Rows::new(values, width)));
        }
        work.push(packed::Projection { out, terms, bias: biases[index].as_deref() });
    }
    packed::project(work);
    let tensor = |(values, columns): (Vec<f32>, usize)| {
        let rows = values.len() / columns.max(1);
        Tensor::from_vec(values, (rows, columns), &candle_core::Device::Cpu)
    };
    outs.into_iter().map(tensor).collect()
}

/// One projection of rows that nothing else reads.
pub(crate) fn project(
    phase: Phase,
    x: &Tensor,
    weight: &Matrix,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let rows = Rows::new(phase, x, weight.dtype())?;
    let projections = project_all(&[Projection { terms: vec![(&rows, weight.clone())], bias }])?;
    projections.into_iter().next().ok_or_else(|| candle_core::Error::msg("one projection"))
}

/// Without packing.
fn project_wide(Projection { terms, bias }: &Projection<'_>) -> Result<Tensor> {
    let (mut fewest, mut found) = (0, 0);
    for (Rows { x, .. }, weight) in terms {
        let (columns, inner) = weight.dims()?;
        fewest = fewest.max(row_invariant_from(columns, inner));
        found = x.dim(0)?;
    }
    let lacking = match terms.first() {
        Some((rows, _)) if rows.x.device().is_cpu() => fewest.saturating_sub(found),
        _ => 0,
    };
    let mut padded = Vec::with_capacity(terms.len());
    for (Rows { x, .. }, weight) in terms {
        let x = if lacking > 0 { x.pad_with_zeros(0, 0, lacking)? } else { x.clone() };
        padded.push((x, weight.tensor()?.t()?));
    }
    let terms: Vec<_> = padded.iter().map(|(x, weight)| (x, weight)).collect();
    let out = sum_of_products(&terms, *bias)?;
    if lacking > 0 { out.narrow(0, 0, found) } else { Ok(out) }
}

/// `Σ grad w`, the gradient of what was projected: `grad` is `[rows, columns]`.
pub(crate) fn project_back(terms: &[(&Tensor, Matrix)]) -> Result<Tensor> {
    let packs = |(grad, weight): &(&Tensor, Matrix)| {
        grad.device().is_cpu() && weight.dtype() == DType::BF16
    };
    let Some((first, weight)) = terms.first() else { bail!("no terms to sum") };
    if !terms.iter().all(packs) {
        let tensor = |(grad, weight): &(&Tensor, Matrix)| Ok(((*grad).clone(), weight.tensor()?));
        let terms = terms.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let terms: Vec<_> = terms.iter().map(|(grad, weight)| (grad, weight)).collect();
        return sum_of_products(&terms, None);
    }
    let (rows, width) = (first.dim(0)?, weight.dims()?.1);
    let (mut lefts, mut weights) = (Vec::new(), Vec::new());
    for (grad, weight) in terms {
        let (columns, found) = weight.dims()?;
        if grad.dims2()? != (rows, columns) || found != width {
            bail!("cannot multiply {:?} by [{columns}, {found}]", grad.shape());
        }
        lefts.push(Factors::new(Kernel::best(Phase::Prefill), &host(grad)?, grad.dim(1)?));
        weights.push(weight.values()?);
    }
    let rights = weights.iter().map(|values| Right::Bf16(packed::Rows::new(values, width)));
    let mut out = vec![0f32; rows * width];
    packed::mix(&mut out, width, &lefts.iter().zip(rights).collect::<Vec<_>>());
    Tensor::from_vec(out, (rows, width), first.device())
}

/// `leftᵀ right`, `[rows, m]` and `[rows, n]` to `[m, n]`: the gradient of a weight. With bf16 both
/// are narrowed, and `left` should be the narrower one.
pub(crate) fn product_of_rows(left: &Tensor, right: &Tensor, precision: DType) -> Result<Tensor> {
    if precision != DType::BF16 || !left.device().is_cpu() {
        return sum_of_products(&[(&left.t()?, right)], None);
    }
    let (m, n) = (left.dim(1)?, right.dim(1)?);
    if left.dim(0)? != right.dim(0)? {
        bail!("cannot multiply {:?} by {:?}", left.shape(), right.shape());
    }
    let factors = Factors::transposed(Kernel::best(Phase::Prefill), &host(left)?, m);
    let mut out = vec![0f32; m * n];
    packed::mix(&mut out, n, &[(&factors, Right::F32(&host(right)?))]);
    Tensor::from_vec(out, (m, n), left.device())
}

/// Sum of `lhs * rhs` over the terms, plus a bias on every row. Transposed views are welcome.
fn sum_of_products(terms: &[(&Tensor, &Tensor)], bias: Option<&Tensor>) -> Result<Tensor> {
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

/// Of f32.
pub(crate) fn product(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    sum_of_products(&[(lhs, rhs)], None)
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
    for_row_blocks(
        &mut out,
        width,
        1,
        #[inline(always)]
        |_, out| {
            for row in x_rows.chunks_exact(width) {
                math::add_scaled(out, 1.0, row);
            }
        },
    );
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
    fn operand<'a>(&self, storage: &'a [f32]) -> Result<Operand<'a>> {
        let Self { rows, columns, row_stride, column_stride, .. } = *self;
        let Some(values) = storage.get(self.range.clone()) else {
            bail!("a matrix reaches beyond its storage");
        };
        Ok(Operand { values, rows, columns, row_stride, column_stride })
    }
}

/// A matrix in main memory as `gemm` sees it.
#[derive(Clone, Copy)]
struct Operand<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
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
    let left = left.operand(in_memory(&lhs_storage)?.as_slice::<f32>()?)?;
    let right = right.operand(in_memory(&rhs_storage)?.as_slice::<f32>()?)?;
    gemm_onto(out, left, right, accumulate);
    Ok(())
}

#[allow(unsafe_code, reason = "the gemm crate has only a raw pointer interface")]
fn gemm_onto(out: &mut [f32], lhs: Operand<'_>, rhs: Operand<'_>, accumulate: bool) {
    let fits =
        |m: &Operand<'_>| reach(m.rows, m.columns, m.row_stride, m.column_stride) <= m.values.len();
    assert!(lhs.columns == rhs.rows && out.len() == lhs.rows * rhs.columns);
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
            rhs.columns as isize,
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

    const PREFILL: Phase = Phase::Prefill;

    #[test]
    fn a_row_has_the_same_bits_whatever_other_rows_there_are() {
        let shapes = [(64, 128), (128, 352), (260, 128), (64, 896), (4, 600), (896, 4864)];
        let types = |shape| [(shape, DType::F32), (shape, DType::BF16)];
        for ((columns, inner), dtype) in shapes.into_iter().flat_map(types) {
            let weight = random(&[columns, inner], 1).to_dtype(dtype).unwrap();
            let x = random(&[150, inner], 2);
            let weight = Matrix::from(weight);
            let all = project(PREFILL, &x, &weight, None).unwrap().to_vec2::<f32>().unwrap();
            for rows in [1, 2, 3, 4, 5, 16, 31, 64, 65, 100] {
                let start = (rows * 7) % (150 - rows);
                let part =
                    project(PREFILL, &x.narrow(0, start, rows).unwrap(), &weight, None).unwrap();
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
    fn bf16_weights_give_what_f32_ones_do_but_for_rounding() {
        let narrow = |x: &Tensor| x.to_dtype(DType::BF16).unwrap();
        let rounded = |x: &Tensor| narrow(x).to_dtype(DType::F32).unwrap();
        for (rows, columns, width) in [(5, 9, 30), (40, 300, 1300), (1, 2100, 600), (3, 128, 1)] {
            let (x, weight) = (random(&[rows, width], 1), random(&[columns, width], 2));
            let (grad, bias) = (random(&[rows, columns], 3), random(&[columns], 4));
            let (x, weight, grad) = (rounded(&x), rounded(&weight), rounded(&grad));
            let near = 1e-5 * width.max(columns) as f32;
            assert_close(
                &project(PREFILL, &x, &narrow(&weight).into(), Some(&bias)).unwrap(),
                &project(PREFILL, &x, &Matrix::from(&weight), Some(&bias)).unwrap(),
                near,
            );
            let back = |weight: &Tensor| {
                project_back(&[(&grad, weight.into()), (&grad, weight.into())]).unwrap()
            };
            assert_close(&back(&narrow(&weight)), &back(&weight), near);
            let of_weight = |dtype| product_of_rows(&grad, &x, dtype).unwrap();
            assert_close(&of_weight(DType::BF16), &of_weight(DType::F32), near);
        }
        assert!(
            project(PREFILL, &random(&[2, 8], 1), &narrow(&random(&[4, 9], 2)).into(), None)
                .is_err()
        );
        assert!(
            project_back(&[(&random(&[2, 8], 1), narrow(&random(&[9, 8], 2)).into())]).is_err()
        );
    }

    #[test]
    fn projections_made_at_once_are_those_made_one_by_one() {
        for dtype in [DType::F32, DType::BF16] {
            let weight = |seed, columns: usize| {
                Matrix::from(random(&[columns, 70], seed).to_dtype(dtype).unwrap())
            };
            let (first, second, bias) = (weight(1, 50), weight(2, 33), random(&[50], 3));
            let x = random(&[21, 70], 4);
            let rows = Rows::new(PREFILL, &x, dtype).unwrap();
            let all = project_all(&[
                Projection { terms: vec![(&rows, first.clone())], bias: Some(&bias) },
                Projection { terms: vec![(&rows, second.clone())], bias: None },
            ]);
            let all = all.unwrap();
            assert_close(&all[0], &project(PREFILL, &x, &first, Some(&bias)).unwrap(), 1e-30);
            assert_close(&all[1], &project(PREFILL, &x, &second, None).unwrap(), 1e-30);
        }
    }
}
