//! The weights of a product: a tensor, or bf16 rows of a file that is mapped into memory. Processes
//! that map one file share its memory, and a mapped model is usable before it is read.

use super::host_slice;
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use memmap2::Mmap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A matrix `[rows, width]`. A clone shares the elements.
#[derive(Debug, Clone)]
pub(crate) enum WeightMatrix {
    Tensor(Tensor),
    Mapped(MappedMatrix),
}

/// Consecutive bf16 rows of a mapped file.
#[derive(Debug, Clone)]
pub(crate) struct MappedMatrix {
    file: Arc<Mmap>,
    /// In bytes.
    start: usize,
    rows: usize,
    width: usize,
}

impl From<Tensor> for WeightMatrix {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<&Tensor> for WeightMatrix {
    fn from(tensor: &Tensor) -> Self {
        Self::Tensor(tensor.clone())
    }
}

impl MappedMatrix {
    /// Returns `None` if the file is too short, or its byte order or alignment differs from the
    /// processor's.
    pub(crate) fn new(file: Arc<Mmap>, start: usize, shape: &[usize]) -> Option<Self> {
        let [rows, width] = *shape else { return None };
        let bytes = rows.checked_mul(width)?.checked_mul(size_of::<bf16>())?;
        let found = file.get(start..start.checked_add(bytes)?)?;
        let aligned = found.as_ptr().cast::<u16>().is_aligned();
        let fits = cfg!(target_endian = "little") && aligned && width > 0;
        fits.then_some(Self { file, start, rows, width })
    }

    fn row_elements(&self) -> &[bf16] {
        let bytes = &self.file[self.start..][..self.rows * self.width * size_of::<bf16>()];
        let bits: &[u16] = pulp::bytemuck::cast_slice(bytes);
        bits.reinterpret_cast()
    }
}

impl WeightMatrix {
    pub(crate) fn element_type(&self) -> DType {
        match self {
            Self::Tensor(tensor) => tensor.dtype(),
            Self::Mapped(_) => DType::BF16,
        }
    }

    /// Returns (rows, width).
    pub(crate) fn matrix_shape(&self) -> Result<(usize, usize)> {
        match self {
            Self::Tensor(tensor) => tensor.dims2(),
            Self::Mapped(mapped) => Ok((mapped.rows, mapped.width)),
        }
    }

    pub(crate) fn slice_rows(&self, rows: &Range<usize>) -> Result<Self> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.narrow(0, rows.start, rows.len())?.into()),
            Self::Mapped(mapped) if rows.end <= mapped.rows => {
                let start = mapped.start + rows.start * mapped.width * size_of::<bf16>();
                Ok(Self::Mapped(MappedMatrix { start, rows: rows.len(), ..mapped.clone() }))
            }
            Self::Mapped(mapped) => bail!("rows {rows:?} of {}", mapped.rows),
        }
    }

    pub(crate) fn select_rows(&self, tokens: &[u32], device: &Device) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => {
                tensor.index_select(&Tensor::new(tokens, device)?, 0)?.to_dtype(DType::F32)
            }
            Self::Mapped(mapped) => {
                let (values, width) = (mapped.row_elements(), mapped.width);
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

    /// Copies a mapped matrix.
    pub(crate) fn to_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Mapped(mapped) => {
                let shape = (mapped.rows, mapped.width);
                Tensor::from_slice(mapped.row_elements(), shape, &Device::Cpu)
            }
        }
    }

    pub(crate) fn element_count(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.elem_count(),
            Self::Mapped(mapped) => mapped.rows * mapped.width,
        }
    }

    pub(crate) fn bf16_elements(&self) -> Result<Box<dyn Deref<Target = [bf16]> + Sync + '_>> {
        match self {
            Self::Tensor(tensor) => Ok(Box::new(host_slice::<bf16>(tensor)?)),
            Self::Mapped(mapped) => Ok(Box::new(mapped.row_elements())),
        }
    }
}
