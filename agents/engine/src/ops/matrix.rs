//! Weights of a product: a tensor, or rows of bf16 where a file is mapped into memory. Processes
//! that map one file share its memory, and none waits until it is read.

use super::host_of;
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use memmap2::Mmap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// `[rows, width]`. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) enum Matrix {
    Tensor(Tensor),
    Mapped(Mapped),
}

/// Rows of a file.
#[derive(Debug, Clone)]
pub(crate) struct Mapped {
    file: Arc<Mmap>,
    /// Bytes before the first row.
    start: usize,
    rows: usize,
    width: usize,
}

impl From<Tensor> for Matrix {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<&Tensor> for Matrix {
    fn from(tensor: &Tensor) -> Self {
        Self::Tensor(tensor.clone())
    }
}

impl Mapped {
    /// `None` where the file does not have them as the processor reads them.
    pub(crate) fn new(file: Arc<Mmap>, start: usize, shape: &[usize]) -> Option<Self> {
        let [rows, width] = *shape else { return None };
        let bytes = rows.checked_mul(width)?.checked_mul(size_of::<bf16>())?;
        let found = file.get(start..start.checked_add(bytes)?)?;
        let aligned = found.as_ptr().cast::<u16>().is_aligned();
        let fits = cfg!(target_endian = "little") && aligned && width > 0;
        fits.then_some(Self { file, start, rows, width })
    }

    fn values(&self) -> &[bf16] {
        let bytes = &self.file[self.start..][..self.rows * self.width * size_of::<bf16>()];
        let bits: &[u16] = pulp::bytemuck::cast_slice(bytes);
        bits.reinterpret_cast()
    }
}

impl Matrix {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Tensor(tensor) => tensor.dtype(),
            Self::Mapped(_) => DType::BF16,
        }
    }

    pub(crate) fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Self::Tensor(tensor) => tensor.dims2(),
            Self::Mapped(mapped) => Ok((mapped.rows, mapped.width)),
        }
    }

    /// Some of its rows.
    pub(crate) fn part(&self, rows: &Range<usize>) -> Result<Self> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.narrow(0, rows.start, rows.len())?.into()),
            Self::Mapped(mapped) if rows.end <= mapped.rows => {
                let start = mapped.start + rows.start * mapped.width * size_of::<bf16>();
                Ok(Self::Mapped(Mapped { start, rows: rows.len(), ..mapped.clone() }))
            }
            Self::Mapped(mapped) => bail!("rows {rows:?} of {}", mapped.rows),
        }
    }

    /// The rows of so many tokens, as f32.
    pub(crate) fn select(&self, tokens: &[u32], device: &Device) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => {
                tensor.index_select(&Tensor::new(tokens, device)?, 0)?.to_dtype(DType::F32)
            }
            Self::Mapped(mapped) => {
                let (values, width) = (mapped.values(), mapped.width);
                let mut rows = vec![0f32; tokens.len() * width];
                for (out, token) in rows.chunks_exact_mut(width).zip(tokens) {
                    let start = *token as usize * width;
                    let Some(row) = values.get(start..start + width) else {
                        bail!("token {token} of {}", mapped.rows);
                    };
                    row.convert_to_f32_slice(out);
                }
                Tensor::from_vec(rows, (tokens.len(), width), device)
            }
        }
    }

    /// A copy, if it is mapped.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Mapped(mapped) => {
                let shape = (mapped.rows, mapped.width);
                Tensor::from_slice(mapped.values(), shape, &Device::Cpu)
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.elem_count(),
            Self::Mapped(mapped) => mapped.rows * mapped.width,
        }
    }

    /// Of bf16, in main memory.
    pub(crate) fn values(&self) -> Result<Box<dyn Deref<Target = [bf16]> + Sync + '_>> {
        match self {
            Self::Tensor(tensor) => Ok(Box::new(host_of::<bf16>(tensor)?)),
            Self::Mapped(mapped) => Ok(Box::new(mapped.values())),
        }
    }
}
