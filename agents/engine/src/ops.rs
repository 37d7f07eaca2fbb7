//! The tensor operations of a decoder, forward and backward. Each has a CPU kernel over slices and
//! a composed form from candle's own operations: what other devices run, and what tests compare
//! the kernel with. Kernels split work over rows, never over sums: no result depends on threads.

pub(crate) mod attention;
pub(crate) mod loss;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod swiglu;

use candle_core::{Result, Storage, Tensor, bail};
use rayon::prelude::*;
use std::ops::{Deref, Range};

/// Read access to the elements of a contiguous f32 tensor in main memory.
struct Host<Guard> {
    storage: Guard,
    range: Range<usize>,
}

pub(crate) fn host(tensor: &Tensor) -> Result<impl Deref<Target = [f32]> + Sync> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, got strides {:?}", layout.stride());
    };
    match &*storage {
        Storage::Cpu(cpu) => cpu.as_slice::<f32>().map(|_| ())?,
        _ => bail!("expected a tensor in main memory"),
    }
    Ok(Host { storage, range: start..end })
}

impl<Guard: Deref<Target = Storage>> Deref for Host<Guard> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(cpu) => {
                &cpu.as_slice::<f32>().expect("the type was checked by host()")[self.range.clone()]
            }
            _ => &[],
        }
    }
}

/// Elements a task should have to be worth another thread.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Calls `kernel(first row, rows)` on blocks of rows, in parallel when there is enough to do.
/// `cost` is roughly how many elements are touched for each element written.
pub(crate) fn for_row_blocks<T: Send>(
    out: &mut [T],
    width: usize,
    cost: usize,
    kernel: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let rows = (TASK_ELEMENTS / (width * cost).max(1)).max(1);
    if out.len() <= rows * width {
        return pulp::Arch::new().dispatch(|| kernel(0, out));
    }
    let blocks = out.par_chunks_mut(rows * width).enumerate();
    blocks.for_each(|(block, out)| pulp::Arch::new().dispatch(|| kernel(block * rows, out)));
}

/// Runs `work` as a task of rayon's current pool, so that its many small parallel parts need no
/// hand-over from a thread outside.
pub(crate) fn on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::join(work, || ()).0
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::random::Random;
    use candle_core::{Device, Tensor};

    pub(crate) fn random(shape: &[usize], seed: u64) -> Tensor {
        let mut random = Random::new(seed);
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.normal() as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    #[track_caller]
    pub(crate) fn assert_close(ours: &Tensor, theirs: &Tensor, within: f32) {
        assert_eq!(ours.shape(), theirs.shape());
        let off = (ours - theirs).unwrap().abs().unwrap().flatten_all().unwrap();
        let off = off.max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(off < within, "off by {off}");
    }
}
