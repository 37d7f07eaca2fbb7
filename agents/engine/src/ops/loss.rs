//! The head and its next-token cross entropy. The logits of a large vocabulary are computed one
//! block at a time: sums of exponentials are carried from block to block (as in arXiv:2411.09009),
//! and so is the gradient of the hidden states. The gradient of the head's weights computes each
//! logit a second time.

use super::matmul::{MatmulPhase, PreparedRows, ProjectionSum, project_all, project_back};
use super::matrix::WeightMatrix;
use super::{add_tensors, for_row_blocks, host_f32, math};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// The largest number of elements of one block of logits.
const LOGIT_ELEMENTS: usize = 1 << 22;
const ROWS_MAX: usize = 512;

/// Hidden states whose next tokens are known.
pub(crate) struct ScoredRows<'a> {
    /// `[rows, hidden]`
    pub(crate) hidden: &'a Tensor,
    /// `[vocabulary, hidden]`
    pub(crate) head: &'a WeightMatrix,
    pub(crate) targets: &'a [u32],
}

/// The statistics of the logits of a row that were seen so far.
#[derive(Debug, Clone, Copy)]
struct RowStatistics {
    /// The largest logit.
    most: f32,
    /// The sum of `e^(logit - most)`.
    total: f64,
    /// The target's logit, after its block; NaN before.
    target: f32,
}

impl RowStatistics {
    const NEW: Self = Self { most: f32::NEG_INFINITY, total: 0.0, target: f32::NAN };

    #[inline(always)]
    fn add_logits(&mut self, logits: &[f32], start: usize, target: usize) {
        let most = math::max_value(logits).max(self.most);
        let before = if self.total > 0.0 { f64::from(self.most - most).exp() } else { 0.0 };
        self.total = self.total * before + sum_exponentials(logits, most);
        self.most = most;
        if let Some(logit) = target.checked_sub(start).and_then(|place| logits.get(place)) {
            self.target = *logit;
        }
    }

    /// Returns the loss in nats, after all blocks.
    fn negative_log_likelihood(&self) -> f64 {
        self.total.ln() - f64::from(self.target - self.most)
    }
}

impl ScoredRows<'_> {
    /// Returns the loss of each row in nats.
    pub(crate) fn negative_log_likelihoods(&self) -> Result<Vec<f64>> {
        let mut losses = Vec::with_capacity(self.targets.len());
        for part in self.split_rows()? {
            losses.extend(part.row_losses()?.0);
        }
        Ok(losses)
    }

    /// Returns the summed loss, and the gradient of the weighted sum of losses for each hidden
    /// state. `weigh` gets the losses of all rows, and returns a weight for each.
    pub(crate) fn loss_gradient(
        &self,
        weigh: impl FnOnce(&[f64]) -> Result<Vec<f64>>,
    ) -> Result<(f64, Tensor)> {
        let (mut losses, mut expected) = (Vec::new(), Vec::new());
        let parts = self.split_rows()?;
        for part in &parts {
            let (rows, sum) = part.sum_head_rows()?;
            losses.extend(rows.iter().map(RowStatistics::negative_log_likelihood));
            expected.push((rows, sum));
        }
        let weights = weigh(&losses)?;
        let parts = parts.iter().zip(expected).zip(weights.chunks(ROWS_MAX));
        let gradients =
            parts.map(|((part, (rows, sum)), weights)| part.hidden_gradient(&rows, &sum, weights));
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        Ok((losses.iter().sum(), self.join_gradients(&gradients)?))
    }

    /// Returns the same as `loss_gradient`. Calls `each` with the logit gradients of some rows and
    /// a range of the vocabulary, that range, and the hidden states of those rows.
    pub(crate) fn gradient_with_logits(
        &self,
        weigh: impl FnOnce(&[f64]) -> Result<Vec<f64>>,
        mut each: impl FnMut(&Tensor, Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<(f64, Tensor)> {
        let (mut losses, mut seen) = (Vec::new(), Vec::new());
        for part in self.split_rows()? {
            let (of_part, rows, logits) = part.row_losses()?;
            losses.extend(of_part);
            seen.push((part, rows, logits));
        }
        let weights = weigh(&losses)?;
        let mut gradients = Vec::new();
        for ((part, rows, logits), weights) in seen.into_iter().zip(weights.chunks(ROWS_MAX)) {
            let mut gradient: Option<Tensor> = None;
            for block in part.vocabulary_blocks() {
                let logits = match &logits {
                    Some(logits) => logits.clone(),
                    None => part.block_logits(&block)?,
                };
                let of_logits = logit_gradient(&logits, &rows, part.targets, block.start, weights)?;
                let more = project_back(&[(&of_logits, part.head.slice_rows(&block)?)])?;
                gradient = Some(match gradient {
                    Some(sum) => add_tensors(&sum, &more)?,
                    None => more,
                });
                each(&of_logits, block, &part.hidden)?;
            }
            gradients.extend(gradient);
        }
        Ok((losses.iter().sum(), self.join_gradients(&gradients)?))
    }

    fn join_gradients(&self, gradients: &[Tensor]) -> Result<Tensor> {
        match gradients {
            [] => self.hidden.zeros_like(),
            [one] => Ok(one.clone()),
            all => Tensor::cat(all, 0),
        }
    }

    /// Splits into parts of at most `ROWS_MAX` rows.
    fn split_rows(&self) -> Result<Vec<ScoredPart<'_>>> {
        if self.hidden.dim(0)? != self.targets.len() {
            bail!("{} targets for {:?} hidden states", self.targets.len(), self.hidden.shape());
        }
        let starts = (0..self.targets.len()).step_by(ROWS_MAX);
        let part = |(start, targets): (usize, _)| ScoredPart::new(self, start, targets);
        starts.zip(self.targets.chunks(ROWS_MAX)).map(part).collect()
    }
}

struct ScoredPart<'a> {
    hidden: Tensor,
    rows: PreparedRows,
    head: &'a WeightMatrix,
    targets: &'a [u32],
    vocabulary: usize,
}

impl<'a> ScoredPart<'a> {
    fn new(scored: &ScoredRows<'a>, start: usize, targets: &'a [u32]) -> Result<Self> {
        let hidden = scored.hidden.narrow(0, start, targets.len())?;
        let rows = PreparedRows::new(MatmulPhase::Prefill, &hidden, scored.head.matrix_form())?;
        let vocabulary = scored.head.matrix_shape()?.0;
        Ok(Self { hidden, rows, head: scored.head, targets, vocabulary })
    }

    fn vocabulary_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        const COLUMNS: usize = 256;
        let vocabulary = self.vocabulary;
        let width = LOGIT_ELEMENTS / self.targets.len().max(1) / COLUMNS * COLUMNS;
        let block = move |start| start..vocabulary.min(start + width.max(COLUMNS));
        (0..vocabulary).step_by(width.max(COLUMNS)).map(block)
    }

    fn block_logits(&self, block: &Range<usize>) -> Result<Tensor> {
        let terms = vec![(&self.rows, self.head.slice_rows(block)?)];
        let all = project_all(&[ProjectionSum { terms, bias: None }])?;
        all.into_iter().next().ok_or_else(|| candle_core::Error::msg("one projection"))
    }

    fn column(&self, values: Vec<f32>) -> Result<Tensor> {
        Tensor::from_vec(values, (self.targets.len(), 1), self.hidden.device())
    }

    /// Returns the statistics of the rows, and the sum of the head's rows times
    /// `e^(logit - most)`. It is rescaled when a block has a larger logit, as in attention
    /// (arXiv:2205.14135).
    fn sum_head_rows(&self) -> Result<(Vec<RowStatistics>, Tensor)> {
        let device = self.hidden.device();
        let mut rows = vec![RowStatistics::NEW; self.targets.len()];
        let mut sum = self.hidden.zeros_like()?;
        for block in self.vocabulary_blocks() {
            let logits = self.block_logits(&block)?;
            let before: Vec<f32> = rows.iter().map(|row| row.most).collect();
            add_block_logits(&mut rows, &logits, self.targets, block.start)?;
            let weights = scaled_exponentials(&logits, &rows, |_| 1.0)?;
            let weights = Tensor::from_vec(weights, logits.shape(), device)?;
            let shrunk = rows.iter().zip(before).map(|(row, before)| (before - row.most).exp());
            let more = project_back(&[(&weights, self.head.slice_rows(&block)?)])?;
            sum = add_tensors(&sum.broadcast_mul(&self.column(shrunk.collect())?)?, &more)?;
        }
        Ok((rows, sum))
    }

    /// Returns the gradient of the weighted sum of losses: the mean of the head's rows by their
    /// probability, minus the target's row.
    fn hidden_gradient(
        &self,
        rows: &[RowStatistics],
        sum: &Tensor,
        weights: &[f64],
    ) -> Result<Tensor> {
        let factors = rows.iter().zip(weights).map(|(row, weight)| (weight / row.total) as f32);
        let mean = sum.broadcast_mul(&self.column(factors.collect())?)?;
        let targets = self.head.select_rows(self.targets, self.hidden.device())?;
        let weights = self.column(weights.iter().map(|weight| *weight as f32).collect())?;
        mean - targets.broadcast_mul(&weights)?
    }

    /// Returns losses and statistics, and the logits if they are one block.
    fn row_losses(&self) -> Result<(Vec<f64>, Vec<RowStatistics>, Option<Tensor>)> {
        let mut rows = vec![RowStatistics::NEW; self.targets.len()];
        let mut only = None;
        for block in self.vocabulary_blocks() {
            let logits = self.block_logits(&block)?;
            add_block_logits(&mut rows, &logits, self.targets, block.start)?;
            only = (block.len() == self.vocabulary).then_some(logits);
        }
        Ok((rows.iter().map(RowStatistics::negative_log_likelihood).collect(), rows, only))
    }
}

fn add_block_logits(
    rows: &mut [RowStatistics],
    logits: &Tensor,
    targets: &[u32],
    start: usize,
) -> Result<()> {
    let width = logits.dim(1)?;
    let on_cpu = logits.to_device(&candle_core::Device::Cpu)?;
    let values = host_f32(&on_cpu)?;
    for_row_blocks(
        rows,
        1,
        width,
        #[inline(always)]
        |first, rows| {
            for (index, row) in (first..).zip(rows) {
                row.add_logits(&values[index * width..][..width], start, targets[index] as usize);
            }
        },
    );
    Ok(())
}

/// Returns the loss of one row of logits in nats.
#[inline(always)]
pub(crate) fn row_nll(row: &[f32], target: usize) -> f64 {
    let most = math::max_value(row);
    sum_exponentials(row, most).ln() - f64::from(row[target] - most)
}

/// Returns the log-probabilities of tokens by one row of logits.
#[inline(always)]
pub(crate) fn row_logprobs(row: &[f32], targets: &[u32]) -> Vec<f64> {
    let most = math::max_value(row);
    let total = sum_exponentials(row, most).ln();
    targets.iter().map(|target| f64::from(row[*target as usize] - most) - total).collect()
}

/// Returns the f64 sum of `e^(logit - most)`.
#[inline(always)]
fn sum_exponentials(logits: &[f32], most: f32) -> f64 {
    let mut total = 0f64;
    for part in logits.chunks(256) {
        let mut exponentials = [0f32; 256];
        for (out, logit) in exponentials.iter_mut().zip(part) {
            *out = math::fast_exp(logit - most);
        }
        total += exponentials[..part.len()].iter().map(|e| f64::from(*e)).sum::<f64>();
    }
    total
}

/// Returns the gradient of the weighted sum of losses for the logits of the vocabulary from `start`
/// on: `weight * (softmax - one hot)`.
fn logit_gradient(
    logits: &Tensor,
    rows: &[RowStatistics],
    targets: &[u32],
    start: usize,
    weights: &[f64],
) -> Result<Tensor> {
    let width = logits.dim(1)?;
    let factor = |index: usize| (weights[index] / rows[index].total) as f32;
    let mut out = scaled_exponentials(logits, rows, factor)?;
    for ((row, target), weight) in out.chunks_exact_mut(width).zip(targets).zip(weights) {
        let place = (*target as usize).checked_sub(start);
        if let Some(of_target) = place.and_then(|place| row.get_mut(place)) {
            *of_target -= *weight as f32;
        }
    }
    Tensor::from_vec(out, logits.shape(), logits.device())
}

/// Returns `factor * e^(logit - most)` for each logit, with the statistics of its row.
fn scaled_exponentials(
    logits: &Tensor,
    rows: &[RowStatistics],
    factor: impl Fn(usize) -> f32 + Sync + Send,
) -> Result<Vec<f32>> {
    let width = logits.dim(1)?;
    let on_cpu = logits.to_device(&candle_core::Device::Cpu)?;
    let values = host_f32(&on_cpu)?;
    let mut out = vec![0f32; values.len()];
    for_row_blocks(
        &mut out,
        width,
        4,
        #[inline(always)]
        |first, out| {
            for (index, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (most, factor) = (rows[index].most, factor(index));
                for (out, logit) in out.iter_mut().zip(&values[index * width..]) {
                    *out = math::fast_exp(logit - most) * factor;
                }
            }
        },
    );
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};
    use candle_core::{D, Var};
    use candle_nn::ops::log_softmax;

    /// One block, and many of a vocabulary that is no multiple of them.
    const SHAPES: [(usize, usize); 2] = [(50, 300), (600, 9000)];

    #[test]
    fn loss_and_gradient_agree_with_candle_s() {
        for (rows, vocabulary) in SHAPES {
            let hidden = Var::from_tensor(&random(&[rows, 24], 1)).unwrap();
            let head = random(&[vocabulary, 24], 2);
            let targets: Vec<u32> = (0..rows).map(|row| (row * 14 % vocabulary) as u32).collect();
            let scored = ScoredRows { hidden: &hidden, head: &(&head).into(), targets: &targets };
            let logits = hidden.matmul(&head.t().unwrap()).unwrap();
            let places = Tensor::new(targets.as_slice(), logits.device()).unwrap();
            let naive = log_softmax(&logits, D::Minus1).unwrap();
            let naive = naive.gather(&places.unsqueeze(1).unwrap(), 1).unwrap().neg().unwrap();
            let ours: Vec<f32> =
                scored.negative_log_likelihoods().unwrap().iter().map(|nll| *nll as f32).collect();
            let ours = Tensor::from_vec(ours, (rows, 1), logits.device()).unwrap();
            assert_close(&ours, &naive, 2e-5);
            let row_weights: Vec<f64> = (0..rows).map(|row| row as f64 * 0.01 - 0.2).collect();
            let weigh = |losses: &[f64]| {
                assert_eq!(losses.len(), rows);
                Ok(row_weights.clone())
            };
            let of_rows: Vec<f32> = row_weights.iter().map(|weight| *weight as f32).collect();
            let of_rows = Tensor::from_vec(of_rows, (rows, 1), logits.device()).unwrap();
            let total = (&naive * of_rows).unwrap().sum_all().unwrap();
            let mut width = 0;
            let with_logits = scored
                .gradient_with_logits(weigh, |of_logits, block, hidden| {
                    assert_eq!(of_logits.dims(), [hidden.dim(0)?, block.len()]);
                    width += block.len() * hidden.dim(0)?;
                    Ok(())
                })
                .unwrap();
            assert_eq!(width, rows * vocabulary, "every logit has its gradient");
            let exact = f64::from(naive.sum_all().unwrap().to_scalar::<f32>().unwrap());
            let theirs = total.backward().unwrap();
            for (loss, gradient) in [with_logits, scored.loss_gradient(weigh).unwrap()] {
                assert!((loss - exact).abs() < 0.04);
                assert_close(&gradient, theirs.get(&hidden).unwrap(), 1e-4);
            }
        }
    }

    #[test]
    fn a_row_s_loss_is_what_the_definition_says() {
        let logits = (random(&[50, 300], 1) * 3.0).unwrap();
        for (row, target) in logits.to_vec2::<f32>().unwrap().iter().zip((0..).step_by(6)) {
            let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            let exact = total.ln() - f64::from(row[target]);
            assert!((row_nll(row, target) - exact).abs() < 1e-6, "{exact}");
        }
    }
}
