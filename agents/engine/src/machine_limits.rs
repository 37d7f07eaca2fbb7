//! The speed of this machine that no engine can exceed: reading its memory, and multiplying without
//! reading anything.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

use crate::{huge_pages::map_huge_pages, ops::packed::MatmulKernel};

/// Larger than any cache.
const READ_BYTES: usize = 1 << 30;
/// Vectors that a task multiplies in a round.
const PRODUCT_ROUNDS: usize = 4_000_000;
/// Rounds, of which the fastest counts.
const ROUNDS: usize = 5;

/// The limits of this machine with the threads of rayon's current pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineLimits {
    /// Bytes per second that are read from memory, in order and in huge pages.
    pub read_bytes_per_s: f64,
    /// Multiplications with additions per second, of bf16 pairs where the engine uses such
    /// instructions, else of f32, with all operands in registers.
    pub multiply_adds_per_s: f64,
}

impl MachineLimits {
    /// Measures this machine for some seconds, which should be idle.
    ///
    /// # Errors
    /// When the system refuses 1 GiB of memory.
    pub fn measure() -> std::io::Result<Self> {
        Ok(Self {
            read_bytes_per_s: measure_reading()?,
            multiply_adds_per_s: measure_multiplying(),
        })
    }
}

fn measure_reading() -> std::io::Result<f64> {
    let mut memory = map_huge_pages(READ_BYTES)?;
    let words: &mut [u64] = pulp::bytemuck::cast_slice_mut(&mut memory);
    let share = words.len().div_ceil(rayon::current_num_threads());
    words.par_chunks_mut(share).for_each(|words| words.fill(1));
    let best = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        let sum: u64 = words.par_chunks(share).with_max_len(1).map(sum_words).sum();
        black_box(sum);
        READ_BYTES as f64 / began.elapsed().as_secs_f64()
    });
    Ok(best.fold(0.0, f64::max))
}

/// Returns the sum, in lanes that the compiler turns into vectors.
fn sum_words(words: &[u64]) -> u64 {
    const LANES: usize = 32;
    let mut sums = [0_u64; LANES];
    for part in words.chunks_exact(LANES) {
        for (sum, word) in sums.iter_mut().zip(part) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

fn measure_multiplying() -> f64 {
    let kernel = MatmulKernel::fastest();
    let best = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        let done: usize =
            rayon::broadcast(|_| kernel.multiply_registers(PRODUCT_ROUNDS)).iter().sum();
        done as f64 / began.elapsed().as_secs_f64()
    });
    best.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_counts_its_products() {
        for kernel in MatmulKernel::available_kernels() {
            let (few, more) = (kernel.multiply_registers(10), kernel.multiply_registers(20));
            assert!(few > 0 && more == 2 * few, "{kernel:?}: {few} {more}");
        }
    }

    #[test]
    fn words_are_summed() {
        assert_eq!(sum_words(&[3; 64]), 192);
    }
}
