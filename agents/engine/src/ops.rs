//! The tensor operations of a decoder, forward and backward. Each has a CPU kernel over slices and
//! a composed form from candle's own operations: what other devices run, and what tests compare
//! the kernel with. Kernels split work over rows, never over sums: no result depends on threads.

pub(crate) mod attention;
pub(crate) mod loss;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod matrix;
pub(crate) mod norm;
pub(crate) mod packed;
pub(crate) mod rope;
pub(crate) mod swiglu;

use candle_core::{Result, Storage, Tensor, WithDType, bail};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// Read access to the elements of a contiguous tensor in main memory.
struct Host<Guard, T> {
    storage: Guard,
    range: Range<usize>,
    element: PhantomData<T>,
}

pub(crate) fn host(tensor: &Tensor) -> Result<impl Deref<Target = [f32]> + Sync> {
    host_of::<f32>(tensor)
}

pub(crate) fn host_of<T: WithDType>(tensor: &Tensor) -> Result<impl Deref<Target = [T]> + Sync> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, got strides {:?}", layout.stride());
    };
    match &*storage {
        Storage::Cpu(cpu) => cpu.as_slice::<T>().map(|_| ())?,
        _ => bail!("expected a tensor in main memory"),
    }
    Ok(Host { storage, range: start..end, element: PhantomData })
}

impl<Guard: Deref<Target = Storage>, T: WithDType> Deref for Host<Guard, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(cpu) => {
                &cpu.as_slice::<T>().expect("the type was checked by host()")[self.range.clone()]
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
    for_blocks_of(rows, out, width, kernel);
}

/// As [`for_row_blocks`], with so many rows in a block.
pub(crate) fn for_blocks_of<T: Send>(
    rows: usize,
    out: &mut [T],
    width: usize,
    kernel: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if out.len() <= rows * width {
        return wide(
            #[inline(always)]
            || kernel(0, out),
        );
    }
    let blocks = out.par_chunks_mut(rows * width).enumerate();
    blocks.for_each(|(block, out)| {
        wide(
            #[inline(always)]
            || kernel(block * rows, out),
        );
    });
}

/// Compiles the work for the widest vectors there may be, and runs it with those there are. What
/// is not inlined into the work stays narrow: closures are `#[inline(always)]`.
pub(crate) fn wide<R>(work: impl FnMut() -> R) -> R {
    /// A closure itself would be called by a shim that is not inlined.
    struct Work<F>(F);

    impl<R, F: FnMut() -> R> pulp::WithSimd for Work<F> {
        type Output = R;

        #[inline(always)]
        fn with_simd<S: pulp::Simd>(mut self, _: S) -> R {
            (self.0)()
        }
    }

    pulp::Arch::new().dispatch(Work(work))
}

/// Of two tensors of one shape.
pub(crate) fn sum_of(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !a.device().is_cpu() || a.shape() != b.shape() {
        return a + b;
    }
    let (left, right) = (host(a)?, host(b)?);
    let mut out = vec![0f32; left.len()];
    for_row_blocks(
        &mut out,
        1,
        1,
        #[inline(always)]
        |first, out| {
            for (out, (left, right)) in
                out.iter_mut().zip(left[first..].iter().zip(&right[first..]))
            {
                *out = left + right;
            }
        },
    );
    Tensor::from_vec(out, a.shape(), a.device())
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
