//! The error of merging A and B of adapters apart.

use super::TrainedAdapters;
use rayon::prelude::*;

/// Returns the drift over all modules; 0 if nothing was trained.
pub(super) fn measure_drift(trained: &TrainedAdapters) -> candle_core::Result<f64> {
    let Some((first, _)) = trained.first() else { return Ok(0.0) };
    let modules: Vec<&str> =
        first.keys().filter_map(|name| name.strip_suffix("lora_A.weight")).collect();
    let squares = modules
        .par_iter()
        .map(|module| module_drift(module, trained))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let sum = |index: usize| squares.iter().map(|square| square[index]).sum::<f64>();
    let (error, whole) = (sum(0).max(0.0), sum(1));
    Ok(if whole > 0.0 { (error / whole).sqrt() } else { 0.0 })
}

/// Returns the squared Frobenius norms of mean(BA) - mean(B) mean(A) and of mean(BA) of a module.
/// Both are sums over pairs of ranks: |sum_i b_i a_i|^2 = sum_ij (b_i . b_j)(a_i . a_j).
fn module_drift(module: &str, trained: &TrainedAdapters) -> candle_core::Result<[f64; 2]> {
    let total: f64 = trained.iter().map(|(_, weight)| weight).sum();
    // Rows of A, columns of B, and the factor of their product.
    let mut ranks: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
    let mut means: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
    for (tensors, weight) in trained {
        let share = weight / total;
        let rows = |name: &str| -> candle_core::Result<Option<Vec<Vec<f32>>>> {
            let tensor = tensors.get(&format!("{module}{name}"));
            let flip = name.starts_with("lora_B");
            let rows = tensor.map(|it| if flip { it.t()?.to_vec2() } else { it.to_vec2() });
            rows.transpose()
        };
        let (Some(a), Some(b)) = (rows("lora_A.weight")?, rows("lora_B.weight")?) else {
            return Ok([0.0, 0.0]);
        };
        let widen = |row: &[f32]| row.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        for (rank, (a, b)) in a.iter().zip(&b).enumerate() {
            let (a, b) = (widen(a), widen(b));
            if means.len() <= rank {
                means.push((vec![0.0; a.len()], vec![0.0; b.len()], -1.0));
            }
            let (mean_a, mean_b, _) = &mut means[rank];
            mean_a.iter_mut().zip(&a).for_each(|(sum, value)| *sum += share * value);
            mean_b.iter_mut().zip(&b).for_each(|(sum, value)| *sum += share * value);
            ranks.push((a, b, share));
        }
    }
    let whole = ranks.len();
    ranks.extend(means);
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let mut squares = [0.0, 0.0];
    for (i, (a, b, factor)) in ranks.iter().enumerate() {
        for (j, (other_a, other_b, other)) in ranks.iter().enumerate().take(i + 1) {
            let twice = if i == j { 1.0 } else { 2.0 };
            let term = twice * factor * other * dot(a, other_a) * dot(b, other_b);
            squares[0] += term;
            if i < whole {
                squares[1] += term;
            }
        }
    }
    Ok(squares)
}
