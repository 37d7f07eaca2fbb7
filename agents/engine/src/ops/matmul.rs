//! Matrix products by purpose: projections, gradients of their inputs, gradients of their weights.
//!
//! On the CPU, f32 weights go to `gemm`, candle's own kernel, on rayon's current pool; candle would
//! choose its number of threads by itself. For bf16 weights both factors are narrowed to bf16 and
//! multiplied by the packed kernels. All sums are f32.

use super::matrix::{MatrixForm, WeightMatrix};
pub(crate) use super::packed::MatmulPhase;
use super::packed::{self, LeftFactor, MatmulKernel, ProjectionInputs, RightFactor};
use super::{for_row_blocks, host_f32, math};
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Rows `[rows, width]`, prepared once for products with weights of one type.
pub(crate) struct PreparedRows {
    x: Tensor,
    /// Only for bf16 weights on the CPU.
    packed: Option<ProjectionInputs>,
}

impl PreparedRows {
    pub(crate) fn new(phase: MatmulPhase, x: &Tensor, weights: MatrixForm) -> Result<Self> {
        let kernel = MatmulKernel::select_best(phase);
        let packed = match weights {
            MatrixForm::Tensor => None,
            _ if !x.device().is_cpu() => None,
            MatrixForm::Bf16Rows => {
                Some(ProjectionInputs::new(kernel, phase, &host_f32(x)?, x.dim(1)?))
            }
            MatrixForm::Packed => {
                Some(ProjectionInputs::for_packed_weights(kernel, &host_f32(x)?, x.dim(1)?))
            }
            MatrixForm::Quantized => {
                Some(ProjectionInputs::for_quantized_weights(kernel, &host_f32(x)?, x.dim(1)?))
            }
        };
        Ok(Self { x: x.clone(), packed })
    }
}

/// A projection `Σ x wᵀ + bias`; each weight is `[columns, width]`.
pub(crate) struct ProjectionSum<'a> {
    pub(crate) terms: Vec<(&'a PreparedRows, WeightMatrix)>,
    pub(crate) bias: Option<&'a Tensor>,
}

/// Computes several projections at once. The bits of a row do not depend on the other rows of its
/// phase.
pub(crate) fn project_all(projections: &[ProjectionSum<'_>]) -> Result<Vec<Tensor>> {
    let packed = |(rows, _): &(&PreparedRows, WeightMatrix)| rows.packed.is_some();
    if !projections.iter().flat_map(|projection| &projection.terms).all(packed) {
        return projections.iter().map(project_unpacked).collect();
    }
    let (mut outs, mut weights, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for ProjectionSum { terms, bias } in projections {
        let Some((rows, weight)) = terms.first() else { bail!("no terms to sum") };
        let columns = weight.matrix_shape()?.0;
        outs.push((vec![0f32; rows.x.dim(0)? * columns], columns));
        weights.push(terms.iter().map(|(_, w)| w.host_elements()).collect::<Result<Vec<_>>>()?);
        biases.push(bias.map(host_f32).transpose()?);
    }
    let mut work = Vec::with_capacity(projections.len());
    for (index, (out, _)) in outs.iter_mut().enumerate() {
        let mut terms = Vec::new();
        for ((rows, weight), elements) in projections[index].terms.iter().zip(&weights[index]) {
            let Some(inputs) = &rows.packed else { bail!("rows that are not packed") };
            let (columns, width) = weight.matrix_shape()?;
            if rows.x.dim(1)? != width {
                bail!("cannot project {:?} by [{columns}, {width}]", rows.x.shape());
            }
            terms.push((inputs, elements.projection_weight()));
        }
        work.push(packed::PackedProjection { out, terms, bias: biases[index].as_deref() });
    }
    packed::project_packed(work);
    let tensor = |(values, columns): (Vec<f32>, usize)| {
        let rows = values.len() / columns.max(1);
        Tensor::from_vec(values, (rows, columns), &candle_core::Device::Cpu)
    };
    outs.into_iter().map(tensor).collect()
}

pub(crate) fn project_rows(
    phase: MatmulPhase,
    x: &Tensor,
    weight: &WeightMatrix,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let rows = PreparedRows::new(phase, x, weight.matrix_form())?;
    let projections = project_all(&[ProjectionSum { terms: vec![(&rows, weight.clone())], bias }])?;
    projections.into_iter().next().ok_or_else(|| candle_core::Error::msg("one projection"))
}

/// Pads the rows with zeros if there are too few for a fixed order of sums.
fn project_unpacked(ProjectionSum { terms, bias }: &ProjectionSum<'_>) -> Result<Tensor> {
    let (mut fewest, mut found) = (0, 0);
    for (PreparedRows { x, .. }, weight) in terms {
        let (columns, inner) = weight.matrix_shape()?;
        fewest = fewest.max(min_invariant_rows(columns, inner));
        found = x.dim(0)?;
    }
    let lacking = match terms.first() {
        Some((rows, _)) if rows.x.device().is_cpu() => fewest.saturating_sub(found),
        _ => 0,
    };
    let mut padded = Vec::with_capacity(terms.len());
    for (PreparedRows { x, .. }, weight) in terms {
        let x = if lacking > 0 { x.pad_with_zeros(0, 0, lacking)? } else { x.clone() };
        padded.push((x, weight.to_tensor()?.t()?));
    }
    let terms: Vec<_> = padded.iter().map(|(x, weight)| (x, weight)).collect();
    let out = sum_products(&terms, *bias)?;
    if lacking > 0 { out.narrow(0, 0, found) } else { Ok(out) }
}

/// Computes `Σ grad w`, the gradient of the input of projections; `grad` is `[rows, columns]`.
pub(crate) fn project_back(terms: &[(&Tensor, WeightMatrix)]) -> Result<Tensor> {
    let packs = |(grad, weight): &(&Tensor, WeightMatrix)| {
        grad.device().is_cpu() && weight.element_type() == DType::BF16
    };
    let Some((first, weight)) = terms.first() else { bail!("no terms to sum") };
    if !terms.iter().all(packs) {
        let tensor =
            |(grad, weight): &(&Tensor, WeightMatrix)| Ok(((*grad).clone(), weight.to_tensor()?));
        let terms = terms.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let terms: Vec<_> = terms.iter().map(|(grad, weight)| (grad, weight)).collect();
        return sum_products(&terms, None);
    }
    let (rows, width) = (first.dim(0)?, weight.matrix_shape()?.1);
    let (mut lefts, mut weights) = (Vec::new(), Vec::new());
    for (grad, weight) in terms {
        let (columns, found) = weight.matrix_shape()?;
        if grad.dims2()? != (rows, columns) || found != width {
            bail!("cannot multiply {:?} by [{columns}, {found}]", grad.shape());
        }
        lefts.push(LeftFactor::new(
            MatmulKernel::select_best(MatmulPhase::Prefill),
            &host_f32(grad)?,
            grad.dim(1)?,
        ));
        weights.push(weight.bf16_elements()?);
    }
    let rights =
        weights.iter().map(|values| RightFactor::Bf16(packed::Bf16Rows::new(values, width)));
    let mut out = vec![0f32; rows * width];
    packed::multiply_packed(&mut out, width, &lefts.iter().zip(rights).collect::<Vec<_>>());
    Tensor::from_vec(out, (rows, width), first.device())
}

/// Computes `leftᵀ right`, the gradient of a weight: `[rows, m]` and `[rows, n]` give `[m, n]`. For
/// bf16 both are narrowed, and `left` should be the narrower one.
pub(crate) fn multiply_transposed(
    left: &Tensor,
    right: &Tensor,
    precision: DType,
) -> Result<Tensor> {
    if precision != DType::BF16 || !left.device().is_cpu() {
        return sum_products(&[(&left.t()?, right)], None);
    }
    let (m, n) = (left.dim(1)?, right.dim(1)?);
    if left.dim(0)? != right.dim(0)? {
        bail!("cannot multiply {:?} by {:?}", left.shape(), right.shape());
    }
    let factors = LeftFactor::from_transposed(
        MatmulKernel::select_best(MatmulPhase::Prefill),
        &host_f32(left)?,
        m,
    );
    let mut out = vec![0f32; m * n];
    packed::multiply_packed(&mut out, n, &[(&factors, RightFactor::F32(&host_f32(right)?))]);
    Tensor::from_vec(out, (m, n), left.device())
}

/// Sums `lhs * rhs` over the terms, plus a bias on every row. Transposed views are allowed.
fn sum_products(terms: &[(&Tensor, &Tensor)], bias: Option<&Tensor>) -> Result<Tensor> {
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
        Some(bias) => host_f32(bias)?.repeat(rows),
        None => vec![0f32; rows * columns],
    };
    for (index, (lhs, rhs)) in terms.iter().enumerate() {
        multiply_onto(&mut out, lhs, rhs, bias.is_some() || index > 0)?;
    }
    Tensor::from_vec(out, (rows, columns), first.0.device())
}

pub(crate) fn multiply_f32(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    sum_products(&[(lhs, rhs)], None)
}

/// Returns the smallest number of rows from which `gemm` 0.19 sums each element of a product in one
/// fixed order. It has other kernels for single rows and for at most 256 elements, and splits the
/// inner dimension differently (only above 512) if both outer dimensions are at most 64.
fn min_invariant_rows(columns: usize, inner: usize) -> usize {
    let small = if columns <= 64 && inner > 512 { 65 } else { 2 };
    small.max(256 / columns + 1)
}

pub(crate) fn sum_rows(x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return x.sum(0);
    }
    let width = x.dim(1)?;
    let x_rows = host_f32(x)?;
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

struct MatrixLayout {
    range: Range<usize>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

fn matrix_layout(tensor: &Tensor) -> Result<MatrixLayout> {
    let (rows, columns) = tensor.dims2()?;
    let (row_stride, column_stride) = match tensor.stride() {
        [row, column] => (*row, *column),
        other => bail!("expected a matrix, got strides {other:?}"),
    };
    let start = tensor.layout().start_offset();
    let reach = element_span(rows, columns, row_stride, column_stride);
    Ok(MatrixLayout { range: start..start + reach, rows, columns, row_stride, column_stride })
}

/// Counts the elements from the first to the last, both included.
fn element_span(rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> usize {
    match (rows, columns) {
        (0, _) | (_, 0) => 0,
        _ => (rows - 1) * row_stride + (columns - 1) * column_stride + 1,
    }
}

impl MatrixLayout {
    fn to_operand<'a>(&self, storage: &'a [f32]) -> Result<GemmOperand<'a>> {
        let Self { rows, columns, row_stride, column_stride, .. } = *self;
        let Some(values) = storage.get(self.range.clone()) else {
            bail!("a matrix reaches beyond its storage");
        };
        Ok(GemmOperand { values, rows, columns, row_stride, column_stride })
    }
}

#[derive(Clone, Copy)]
struct GemmOperand<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(cpu) => Ok(cpu),
        _ => bail!("expected matrices in main memory"),
    }
}

/// Computes `out = lhs rhs`, or `out += lhs rhs` if `accumulate`.
fn multiply_onto(out: &mut [f32], lhs: &Tensor, rhs: &Tensor, accumulate: bool) -> Result<()> {
    let (left, right) = (matrix_layout(lhs)?, matrix_layout(rhs)?);
    if left.columns != right.rows || out.len() != left.rows * right.columns {
        bail!("cannot multiply {:?} by {:?}", lhs.shape(), rhs.shape());
    }
    let (lhs_storage, _) = lhs.storage_and_layout();
    let (rhs_storage, _) = rhs.storage_and_layout();
    let left = left.to_operand(cpu_storage(&lhs_storage)?.as_slice::<f32>()?)?;
    let right = right.to_operand(cpu_storage(&rhs_storage)?.as_slice::<f32>()?)?;
    gemm_onto(out, left, right, accumulate);
    Ok(())
}

/// Calls `gemm` after checking all bounds.
#[allow(unsafe_code, reason = "the gemm crate has only a raw pointer interface")]
fn gemm_onto(out: &mut [f32], lhs: GemmOperand<'_>, rhs: GemmOperand<'_>, accumulate: bool) {
    let fits = |m: &GemmOperand<'_>| {
        element_span(m.rows, m.columns, m.row_stride, m.column_stride) <= m.values.len()
    };
    assert!(lhs.columns == rhs.rows && out.len() == lhs.rows * rhs.columns);
    assert!(fits(&lhs) && fits(&rhs));
    // SAFETY: the three slices hold every element that the sizes and strides reach (checked above),
    // the rows of `out` do not overlap, and it is borrowed mutably.
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

    const PREFILL: MatmulPhase = MatmulPhase::Prefill;

    #[test]
    fn a_row_has_the_same_bits_whatever_other_rows_there_are() {
        let shapes = [(64, 128), (128, 352), (260, 128), (64, 896), (4, 600), (896, 4864)];
        let types = |shape| [(shape, DType::F32), (shape, DType::BF16)];
        for ((columns, inner), dtype) in shapes.into_iter().flat_map(types) {
            let weight = random(&[columns, inner], 1).to_dtype(dtype).unwrap();
            let x = random(&[150, inner], 2);
            let weight = WeightMatrix::from(weight);
            let all = project_rows(PREFILL, &x, &weight, None).unwrap().to_vec2::<f32>().unwrap();
            for rows in [1, 2, 3, 4, 5, 16, 31, 64, 65, 100] {
                let start = (rows * 7) % (150 - rows);
                let part = project_rows(PREFILL, &x.narrow(0, start, rows).unwrap(), &weight, None)
                    .unwrap();
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
        let ours = sum_products(&[(&a, &b.t().unwrap()), (&d, &c.t().unwrap())], Some(&bias));
        let theirs = a.matmul(&b.t().unwrap()).unwrap() + d.matmul(&c.t().unwrap()).unwrap();
        let theirs = theirs.unwrap().broadcast_add(&bias).unwrap();
        assert_close(&ours.unwrap(), &theirs, 1e-5);
        assert!(multiply_f32(&a, &a).is_err());
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
                &project_rows(PREFILL, &x, &narrow(&weight).into(), Some(&bias)).unwrap(),
                &project_rows(PREFILL, &x, &WeightMatrix::from(&weight), Some(&bias)).unwrap(),
                near,
            );
            let back = |weight: &Tensor| {
                project_back(&[(&grad, weight.into()), (&grad, weight.into())]).unwrap()
            };
            assert_close(&back(&narrow(&weight)), &back(&weight), near);
            let of_weight = |dtype| multiply_transposed(&grad, &x, dtype).unwrap();
            assert_close(&of_weight(DType::BF16), &of_weight(DType::F32), near);
        }
        assert!(
            project_rows(PREFILL, &random(&[2, 8], 1), &narrow(&random(&[4, 9], 2)).into(), None)
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
                WeightMatrix::from(random(&[columns, 70], seed).to_dtype(dtype).unwrap())
            };
            let (first, second, bias) = (weight(1, 50), weight(2, 33), random(&[50], 3));
            let x = random(&[21, 70], 4);
            let rows = PreparedRows::new(PREFILL, &x, first.matrix_form()).unwrap();
            let all = project_all(&[
                ProjectionSum { terms: vec![(&rows, first.clone())], bias: Some(&bias) },
                ProjectionSum { terms: vec![(&rows, second.clone())], bias: None },
            ]);
            let all = all.unwrap();
            assert_close(&all[0], &project_rows(PREFILL, &x, &first, Some(&bias)).unwrap(), 1e-30);
            assert_close(&all[1], &project_rows(PREFILL, &x, &second, None).unwrap(), 1e-30);
        }
    }
}
