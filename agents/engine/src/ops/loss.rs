//! The head and its next-token cross entropy. Of a large vocabulary there are logits of one block
//! at a time: sums of exponentials go on from block to block (as in arXiv:2411.09009), and so does
//! the gradient of the hidden states. That of the head's weights needs each logit once more.

use super::matmul::{Phase, Projection, Rows, project_all, project_back};
use super::matrix::Matrix;
use super::{for_row_blocks, host, math, sum_of};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// Bounds the elements of one block of logits, and the rows that it is of.
const LOGIT_ELEMENTS: usize = 1 << 22;
const ROWS_MAX: usize = 512;

/// Hidden states whose next tokens are known.
pub(crate) struct Scored<'a> {
    /// `[rows, hidden]`
    pub(crate) hidden: &'a Tensor,
    /// `[vocabulary, hidden]`
    pub(crate) head: &'a Matrix,
    /// One a row.
    pub(crate) targets: &'a [u32],
}

/// What a row's logits come to, so far.
#[derive(Debug, Clone, Copy)]
struct Row {
    most: f32,
    /// Of `e^(logit - most)`.
    total: f64,
    /// The target's logit, once it was seen.
    target: f32,
}

impl Row {
    const NEW: Self = Self { most: f32::NEG_INFINITY, total: 0.0, target: f32::NAN };

    /// Takes the logits of the vocabulary from `start` on.
    #[inline(always)]
    fn take(&mut self, logits: &[f32], start: usize, target: usize) {
        let most = math::max(logits).max(self.most);
        let before = if self.total > 0.0 { f64::from(self.most - most).exp() } else { 0.0 };
        self.total = self.total * before + sum_of_exponentials(logits, most);
        self.most = most;
        if let Some(logit) = target.checked_sub(start).and_then(|place| logits.get(place)) {
            self.target = *logit;
        }
    }

    fn nll(&self) -> f64 {
        self.total.ln() - f64::from(self.target - self.most)
    }
}

impl Scored<'_> {
    /// Of each row, in nats.
    pub(crate) fn negative_log_likelihoods(&self) -> Result<Vec<f64>> {
        let mut losses = Vec::with_capacity(self.targets.len());
        for part in self.parts()? {
            losses.extend(part.losses()?.0);
        }
        Ok(losses)
    }

    /// The summed loss, and the gradient of `scale` times it for each hidden state.
    pub(crate) fn gradient(&self, scale: f64) -> Result<(f64, Tensor)> {
        let (mut loss, mut gradients) = (0.0, Vec::new());
        for part in self.parts()? {
            let (rows, gradient) = part.gradient(scale)?;
            loss += rows.iter().map(Row::nll).sum::<f64>();
            gradients.push(gradient);
        }
        Ok((loss, self.joined(&gradients)?))
    }

    /// As [`Self::gradient`]; `each` hears the gradients of the logits of some rows and some of
    /// the vocabulary, and those rows.
    pub(crate) fn gradient_with_logits(
        &self,
        scale: f64,
        mut each: impl FnMut(&Tensor, Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<(f64, Tensor)> {
        let mut loss = 0.0;
        let mut gradients = Vec::new();
        for part in self.parts()? {
            let (losses, rows, logits) = part.losses()?;
            loss += losses.iter().sum::<f64>();
            let mut gradient: Option<Tensor> = None;
            for block in part.blocks() {
                let logits = match &logits {
                    Some(logits) => logits.clone(),
                    None => part.logits(&block)?,
                };
                let of_logits = loss_backward(&logits, &rows, part.targets, block.start, scale)?;
                let more = project_back(&[(&of_logits, part.head.part(&block)?)])?;
                gradient = Some(match gradient {
                    Some(sum) => sum_of(&sum, &more)?,
                    None => more,
                });
                each(&of_logits, block, &part.hidden)?;
            }
            gradients.extend(gradient);
        }
        Ok((loss, self.joined(&gradients)?))
    }

    /// The parts' gradients, one after the other.
    fn joined(&self, gradients: &[Tensor]) -> Result<Tensor> {
        match gradients {
            [] => self.hidden.zeros_like(),
            [one] => Ok(one.clone()),
            all => Tensor::cat(all, 0),
        }
    }

    fn parts(&self) -> Result<Vec<Part<'_>>> {
        if self.hidden.dim(0)? != self.targets.len() {
            bail!("{} targets for {:?} hidden states", self.targets.len(), self.hidden.shape());
        }
        let starts = (0..self.targets.len()).step_by(ROWS_MAX);
        let part = |(start, targets): (usize, _)| Part::new(self, start, targets);
        starts.zip(self.targets.chunks(ROWS_MAX)).map(part).collect()
    }
}

/// Some of the rows.
struct Part<'a> {
    hidden: Tensor,
    rows: Rows,
    head: &'a Matrix,
    targets: &'a [u32],
    vocabulary: usize,
}

impl<'a> Part<'a> {
    fn new(scored: &Scored<'a>, start: usize, targets: &'a [u32]) -> Result<Self> {
        let hidden = scored.hidden.narrow(0, start, targets.len())?;
        let rows = Rows::new(Phase::Prefill, &hidden, scored.head.dtype())?;
        let vocabulary = scored.head.dims()?.0;
        Ok(Self { hidden, rows, head: scored.head, targets, vocabulary })
    }

    /// Of the vocabulary.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        const COLUMNS: usize = 256;
        let vocabulary = self.vocabulary;
        let width = LOGIT_ELEMENTS / self.targets.len().max(1) / COLUMNS * COLUMNS;
        let block = move |start| start..vocabulary.min(start + width.max(COLUMNS));
        (0..vocabulary).step_by(width.max(COLUMNS)).map(block)
    }

    fn logits(&self, block: &Range<usize>) -> Result<Tensor> {
        let terms = vec![(&self.rows, self.head.part(block)?)];
        let all = project_all(&[Projection { terms, bias: None }])?;
        all.into_iter().next().ok_or_else(|| candle_core::Error::msg("one projection"))
    }

    /// What rows came to, and the gradient of `scale` times their loss: the mean of the head's rows
    /// by their probability, less the target's. A sum by `e^(logit - most)` of the blocks so far is
    /// scaled when a block has a larger logit, as attention's is in arXiv:2205.14135.
    fn gradient(&self, scale: f64) -> Result<(Vec<Row>, Tensor)> {
        let device = self.hidden.device();
        let column = |values: Vec<f32>| Tensor::from_vec(values, (self.targets.len(), 1), device);
        let mut rows = vec![Row::NEW; self.targets.len()];
        let mut sum = self.hidden.zeros_like()?;
        for block in self.blocks() {
            let logits = self.logits(&block)?;
            let before: Vec<f32> = rows.iter().map(|row| row.most).collect();
            take(&mut rows, &logits, self.targets, block.start)?;
            let weights = exponentials(&logits, &rows, |_| 1.0)?;
            let weights = Tensor::from_vec(weights, logits.shape(), device)?;
            let shrunk = rows.iter().zip(before).map(|(row, before)| (before - row.most).exp());
            let more = project_back(&[(&weights, self.head.part(&block)?)])?;
            sum = sum_of(&sum.broadcast_mul(&column(shrunk.collect())?)?, &more)?;
        }
        let factors = rows.iter().map(|row| (scale / row.total) as f32);
        let mean = sum.broadcast_mul(&column(factors.collect())?)?;
        let targets = self.head.select(self.targets, device)?;
        Ok((rows, (mean - (targets * scale)?)?))
    }

    /// Also what rows came to, and the logits where there is but one block.
    fn losses(&self) -> Result<(Vec<f64>, Vec<Row>, Option<Tensor>)> {
        let mut rows = vec![Row::NEW; self.targets.len()];
        let mut only = None;
        for block in self.blocks() {
            let logits = self.logits(&block)?;
            take(&mut rows, &logits, self.targets, block.start)?;
            only = (block.len() == self.vocabulary).then_some(logits);
        }
        Ok((rows.iter().map(Row::nll).collect(), rows, only))
    }
}

fn take(rows: &mut [Row], logits: &Tensor, targets: &[u32], start: usize) -> Result<()> {
    let width = logits.dim(1)?;
    let on_cpu = logits.to_device(&candle_core::Device::Cpu)?;
    let values = host(&on_cpu)?;
    for_row_blocks(
        rows,
        1,
        width,
        #[inline(always)]
        |first, rows| {
            for (index, row) in (first..).zip(rows) {
                row.take(&values[index * width..][..width], start, targets[index] as usize);
            }
        },
    );
    Ok(())
}

/// In nats, of one row of logits.
#[inline(always)]
pub(crate) fn row_nll(row: &[f32], target: usize) -> f64 {
    let most = math::max(row);
    sum_of_exponentials(row, most).ln() - f64::from(row[target] - most)
}

/// Of `e^(logit - most)`; the sum is f64.
#[inline(always)]
fn sum_of_exponentials(logits: &[f32], most: f32) -> f64 {
    let mut total = 0f64;
    for part in logits.chunks(256) {
        let mut exponentials = [0f32; 256];
        for (out, logit) in exponentials.iter_mut().zip(part) {
            *out = math::exp(logit - most);
        }
        total += exponentials[..part.len()].iter().map(|e| f64::from(*e)).sum::<f64>();
    }
    total
}

/// Gradient of `scale` times the summed loss, for the logits of the vocabulary from `start` on:
/// `scale * (softmax - one hot)`.
fn loss_backward(
    logits: &Tensor,
    rows: &[Row],
    targets: &[u32],
    start: usize,
    scale: f64,
) -> Result<Tensor> {
    let width = logits.dim(1)?;
    let mut out = exponentials(logits, rows, |row| (scale / row.total) as f32)?;
    for (row, target) in out.chunks_exact_mut(width).zip(targets) {
        let place = (*target as usize).checked_sub(start);
        if let Some(of_target) = place.and_then(|place| row.get_mut(place)) {
            *of_target -= scale as f32;
        }
    }
    Tensor::from_vec(out, logits.shape(), logits.device())
}

/// `factor * e^(logit - most)`, by what each row came to.
fn exponentials(
    logits: &Tensor,
    rows: &[Row],
    factor: impl Fn(&Row) -> f32 + Sync + Send,
) -> Result<Vec<f32>> {
    let width = logits.dim(1)?;
    let on_cpu = logits.to_device(&candle_core::Device::Cpu)?;
    let values = host(&on_cpu)?;
    let mut out = vec![0f32; values.len()];
    for_row_blocks(
        &mut out,
        width,
        4,
        #[inline(always)]
        |first, out| {
            for (index, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (most, factor) = (rows[index].most, factor(&rows[index]));
                for (out, logit) in out.iter_mut().zip(&values[index * width..]) {
                    *out = math::exp(logit - most) * factor;
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
            let scored = Scored { hidden: &hidden, head: &(&head).into(), targets: &targets };
            let logits = hidden.matmul(&head.t().unwrap()).unwrap();
            let places = Tensor::new(targets.as_slice(), logits.device()).unwrap();
            let naive = log_softmax(&logits, D::Minus1).unwrap();
            let naive = naive.gather(&places.unsqueeze(1).unwrap(), 1).unwrap().neg().unwrap();
            let ours: Vec<f32> =
                scored.negative_log_likelihoods().unwrap().iter().map(|nll| *nll as f32).collect();
            let ours = Tensor::from_vec(ours, (rows, 1), logits.device()).unwrap();
            assert_close(&ours, &naive, 2e-5);
            let total = (naive.sum_all().unwrap() * 0.25).unwrap();
            let mut width = 0;
            let with_logits = scored
                .gradient_with_logits(0.25, |of_logits, block, hidden| {
                    assert_eq!(of_logits.dims(), [hidden.dim(0)?, block.len()]);
                    width += block.len() * hidden.dim(0)?;
                    Ok(())
                })
                .unwrap();
            assert_eq!(width, rows * vocabulary, "every logit has its gradient");
            let exact = f64::from(total.to_scalar::<f32>().unwrap());
            let theirs = total.backward().unwrap();
            for (loss, gradient) in [with_logits, scored.gradient(0.25).unwrap()] {
                assert!((0.25 * loss - exact).abs() < 0.01);
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
