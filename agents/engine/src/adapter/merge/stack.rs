//! The mean of the products BA of adapters, as an adapter of the same rank.

use super::{TrainedAdapters, sum_weighted};
use crate::adapter::named_tensors::{NamedTensors, values};
use candle_core::{Device, Tensor};
use nalgebra::{DMatrix, SVD};
use rayon::prelude::*;

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Iterations of one decomposition, far more than any takes.
const ITERATIONS_MAX: usize = 100_000;

/// A reduced module: A, B, and the squared norms of what was lost and of the whole.
struct ReducedModule {
    a: Tensor,
    b: Tensor,
    lost: f64,
    whole: f64,
}

/// Returns the tensors of the stacked and reduced adapter, and the norm of what the reduction lost
/// as a share of the whole. One adapter alone keeps its tensors. Those that are no pair of A and B
/// become their mean.
///
/// # Errors
/// When a product cannot be decomposed because it has values that are not finite.
pub(super) fn stack_adapters(
    start: &NamedTensors,
    trained: &TrainedAdapters,
) -> candle_core::Result<(NamedTensors, f64)> {
    if let [] | [_] = trained {
        let kept = trained.first().map_or(start, |(tensors, _)| tensors);
        return Ok((kept.clone(), 0.0));
    }
    let mut merged = NamedTensors::new();
    let (mut lost, mut whole) = (0.0, 0.0);
    let modules: Vec<&str> = start.keys().filter_map(|name| name.strip_suffix(A)).collect();
    let reduced = modules.par_iter().map(|module| stack_module(module, trained));
    let reduced = reduced.collect::<candle_core::Result<Vec<_>>>()?;
    for (module, reduced) in modules.into_iter().zip(reduced) {
        let Some(ReducedModule { a, b, lost: part, whole: all }) = reduced else { continue };
        merged.extend([(format!("{module}{A}"), a), (format!("{module}{B}"), b)]);
        lost += part;
        whole += all;
    }
    for (name, tensor) in start {
        if !merged.contains_key(name) {
            let (sums, total) = sum_weighted(name, tensor, trained)?;
            let mean = sums.iter().map(|sum| (sum / total) as f32).collect();
            merged.insert(name.clone(), Tensor::from_vec(mean, tensor.shape(), &Device::Cpu)?);
        }
    }
    Ok((merged, if whole > 0.0 { (lost / whole).sqrt() } else { 0.0 }))
}

/// Returns `None` if the module has no B. Rows of the new A are orthogonal, and as long as those of
/// the trained ones on average, so that training continues at the same pace.
fn stack_module(
    module: &str,
    trained: &TrainedAdapters,
) -> candle_core::Result<Option<ReducedModule>> {
    let total: f64 = trained.iter().map(|(_, weight)| weight).sum();
    // Columns are ranks.
    let (mut stacked_a, mut stacked_b) = (Vec::new(), Vec::new());
    let (mut rank, mut squares) = (0, 0.0);
    for (tensors, weight) in trained {
        let Some(b) = tensors.get(&format!("{module}{B}")) else { return Ok(None) };
        let a = &tensors[&format!("{module}{A}")];
        rank = a.dim(0)?;
        for value in values(a)? {
            squares += weight / total * f64::from(value).powi(2);
            stacked_a.push(f64::from(value));
        }
        let share = weight / total;
        stacked_b.extend(values(&b.t()?)?.into_iter().map(|value| share * f64::from(value)));
    }
    let ranks = rank * trained.len();
    let columns = |values: Vec<f64>| DMatrix::from_vec(values.len() / ranks.max(1), ranks, values);
    let (a_basis, a_rest) = columns(stacked_a).qr().unpack();
    let (b_basis, b_rest) = columns(stacked_b).qr().unpack();
    let core = b_rest * a_rest.transpose();
    let decomposed = SVD::try_new(core, true, true, f64::EPSILON, ITERATIONS_MAX);
    let Some(SVD { u: Some(u), v_t: Some(v_t), singular_values }) = decomposed else {
        candle_core::bail!("the product of {module} cannot be decomposed (X101)")
    };
    let length = (squares / rank.max(1) as f64).sqrt();
    let length = if length > 0.0 { length } else { 1.0 };
    let kept = rank.min(singular_values.len());
    let (left, right) = (b_basis * u.columns(0, kept), v_t.rows(0, kept) * a_basis.transpose());
    let mut a = vec![0f32; rank * right.ncols()];
    let mut b = vec![0f32; left.nrows() * rank];
    for (index, value) in singular_values.iter().take(kept).enumerate() {
        for (column, factor) in right.row(index).iter().enumerate() {
            a[index * right.ncols() + column] = (length * factor) as f32;
        }
        for (row, factor) in left.column(index).iter().enumerate() {
            b[row * rank + index] = (value * factor / length) as f32;
        }
    }
    let square = |value: &f64| value * value;
    Ok(Some(ReducedModule {
        a: Tensor::from_vec(a, (rank, right.ncols()), &Device::Cpu)?,
        b: Tensor::from_vec(b, (left.nrows(), rank), &Device::Cpu)?,
        lost: singular_values.iter().skip(kept).map(square).sum(),
        whole: singular_values.iter().map(square).sum(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random;

    const MODULE: &str = "model.layers.0.mlp.up_proj.";

    fn adapter(rank: usize, seed: u64) -> NamedTensors {
        let pair = [(A, [rank, 9], seed), (B, [7, rank], seed + 50), ("magnitude", [1, 7], seed)];
        pair.map(|(part, shape, seed)| (format!("{MODULE}{part}"), random(&shape, seed))).into()
    }

    fn product(tensors: &NamedTensors) -> DMatrix<f64> {
        let matrix = |part: &str| {
            let tensor = &tensors[&format!("{MODULE}{part}")];
            let flat = values(tensor).unwrap().into_iter().map(f64::from);
            DMatrix::from_row_iterator(tensor.dim(0).unwrap(), tensor.dim(1).unwrap(), flat)
        };
        matrix(B) * matrix(A)
    }

    #[test]
    fn the_product_is_the_mean_of_products_as_well_as_its_rank_allows() {
        let trained = [(adapter(2, 1), 1.0), (adapter(2, 2), 3.0)];
        let mean = product(&trained[0].0) * 0.25 + product(&trained[1].0) * 0.75;
        let (merged, residual) = stack_adapters(&trained[0].0, &trained).unwrap();
        let error = (product(&merged) - &mean).norm() / mean.norm();
        // Eckart and Young: no matrix of this rank is closer than the cut decomposition.
        let values_of = mean.singular_values();
        let best = values_of.rows(2, values_of.len() - 2).norm() / mean.norm();
        assert!(best > 0.1, "{best}");
        assert!((error - best).abs() < 1e-6 && (residual - best).abs() < 1e-6, "{error} {best}");
        let rows: Vec<f64> = (0..2)
            .map(|row| {
                let a = &merged[&format!("{MODULE}{A}")];
                values(&a.get(row).unwrap()).unwrap().iter().map(|v| f64::from(*v).powi(2)).sum()
            })
            .collect();
        assert!((rows[0] - rows[1]).abs() < 1e-6 * rows[0], "{rows:?}");
        let name = format!("{MODULE}magnitude");
        let of = |tensors: &NamedTensors| values(&tensors[&name]).unwrap()[0];
        let expected = 0.25 * of(&trained[0].0) + 0.75 * of(&trained[1].0);
        assert!((of(&merged) - expected).abs() < 1e-6);
    }

    #[test]
    fn adapters_of_one_subspace_lose_nothing_and_one_alone_stays_as_it_is() {
        let first = adapter(2, 1);
        let mut second = first.clone();
        second.insert(format!("{MODULE}{B}"), random(&[7, 2], 9));
        let trained = [(first.clone(), 5.0), (second.clone(), 5.0)];
        let (merged, residual) = stack_adapters(&first, &trained).unwrap();
        let mean = (product(&first) + product(&second)) * 0.5;
        assert!((product(&merged) - &mean).norm() < 1e-6 * mean.norm());
        assert!(residual < 1e-6, "{residual}");
        let (alone, residual) = stack_adapters(&second, &trained[..1]).unwrap();
        assert_eq!(residual, 0.0);
        for (name, tensor) in &first {
            assert_eq!(values(&alone[name]).unwrap(), values(tensor).unwrap());
        }
        let mut broken = second;
        broken.insert(format!("{MODULE}{B}"), (random(&[7, 2], 9) * f64::NAN).unwrap());
        assert!(stack_adapters(&first, &[(first.clone(), 1.0), (broken, 1.0)]).is_err());
    }
}
