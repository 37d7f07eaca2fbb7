//! The tensor operations of a decoder, forward and backward.
//!
//! Each operation has a CPU kernel over slices, and a composed form of candle's own operations for
//! other devices and for tests of the kernel. Kernels split work over rows, never over sums, so no
//! result depends on the number of threads.

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

/// Read access to a contiguous tensor in main memory.
struct HostSlice<Guard, T> {
    storage: Guard,
    range: Range<usize>,
    element: PhantomData<T>,
}

/// Fails if the tensor is on another device, not contiguous or not f32.
pub(crate) fn host_f32(tensor: &Tensor) -> Result<impl Deref<Target = [f32]> + Sync> {
    host_slice::<f32>(tensor)
}

/// Fails if the tensor is on another device, not contiguous or of another type.
pub(crate) fn host_slice<T: WithDType>(tensor: &Tensor) -> Result<impl Deref<Target = [T]> + Sync> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, got strides {:?}", layout.stride());
    };
    match &*storage {
        Storage::Cpu(cpu) => cpu.as_slice::<T>().map(|_| ())?,
        _ => bail!("expected a tensor in main memory"),
    }
    Ok(HostSlice { storage, range: start..end, element: PhantomData })
}

impl<Guard: Deref<Target = Storage>, T: WithDType> Deref for HostSlice<Guard, T> {
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

/// The number of elements that a task should touch to be worth another thread.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Calls `kernel(first row, rows)` on blocks of rows, in parallel if there is enough work. `cost`
/// is roughly the number of elements touched for each element written.
pub(crate) fn for_row_blocks<T: Send>(
    out: &mut [T],
    width: usize,
    cost: usize,
    kernel: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let rows = (TASK_ELEMENTS / (width * cost).max(1)).max(1);
    for_sized_blocks(rows, out, width, kernel);
}

/// Calls `kernel(first row, rows)` on blocks of `rows` rows, in parallel if there is more than one
/// block.
pub(crate) fn for_sized_blocks<T: Send>(
    rows: usize,
    out: &mut [T],
    width: usize,
    kernel: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if out.len() <= rows * width {
        return run_vectorised(
            #[inline(always)]
            || kernel(0, out),
        );
    }
    let blocks = out.par_chunks_mut(rows * width).enumerate();
    blocks.for_each(|(block, out)| {
        run_vectorised(
            #[inline(always)]
            || kernel(block * rows, out),
        );
    });
}

/// Compiles `work` for each vector width and runs the widest one that the processor supports.
/// Functions that are not inlined into `work` keep the narrow width, so closures are
/// `#[inline(always)]`.
pub(crate) fn run_vectorised<R>(work: impl FnMut() -> R) -> R {
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

pub(crate) fn add_tensors(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !a.device().is_cpu() || a.shape() != b.shape() {
        return a + b;
    }
    let (left, right) = (host_f32(a)?, host_f32(b)?);
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

/// Runs `work` as a task of rayon's current pool, so that its many small parallel parts are not
/// handed over from an outside thread.
pub(crate) fn run_on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::join(work, || ()).0
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::random::RandomStream;
    use candle_core::{Device, Tensor};

    pub(crate) fn random(shape: &[usize], seed: u64) -> Tensor {
        let mut random = RandomStream::new(seed);
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.next_normal() as f32).collect();
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
