//! The weights of a product: a tensor, bf16 rows of a file that is mapped into memory, or 8-bit
//! tiles. Processes that map one file share its memory, and a mapped model is usable before it is
//! read. A model that draws for long also has its weights packed, which is faster and not shared.

use super::host_slice;
use super::packed::{Bf16Rows, MatmulKernel, PackedMatrix, ProjectionWeight, QuantizedMatrix};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use memmap2::Mmap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A matrix `[rows, width]`. A clone shares the elements.
#[derive(Debug, Clone)]
pub(crate) struct WeightMatrix {
    rows: MatrixRows,
    /// The same elements, packed for products with rows of activations.
    packed: Option<PackedMatrix>,
}

#[derive(Debug, Clone)]
enum MatrixRows {
    Tensor(Tensor),
    Mapped(MappedMatrix),
    Quantized(QuantizedMatrix),
}

/// The form of a matrix, which decides how the rows that it is multiplied with are prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatrixForm {
    /// A tensor of candle's.
    Tensor,
    /// Rows of bf16 in main memory.
    Bf16Rows,
    /// Packed bf16 in main memory.
    Packed,
    /// 8-bit tiles in main memory.
    Quantized,
}

impl MatrixForm {
    /// Returns the form of an adapter's matrices beside weights of this form.
    pub(crate) fn for_adapter(self) -> Self {
        match self {
            Self::Quantized => Self::Packed,
            other => other,
        }
    }
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

/// The elements of a matrix in main memory.
pub(crate) enum HostElements<'a> {
    /// Rows and their width.
    Rows(Box<dyn Deref<Target = [bf16]> + Sync + 'a>, usize),
    Packed(&'a PackedMatrix),
    Quantized(&'a QuantizedMatrix),
}

impl HostElements<'_> {
    pub(crate) fn projection_weight(&self) -> ProjectionWeight<'_> {
        match self {
            Self::Rows(elements, width) => ProjectionWeight::Rows(Bf16Rows::new(elements, *width)),
            Self::Packed(packed) => ProjectionWeight::Packed(packed),
            Self::Quantized(quantized) => ProjectionWeight::Quantized(quantized),
        }
    }
}

impl From<Tensor> for WeightMatrix {
    fn from(tensor: Tensor) -> Self {
        Self { rows: MatrixRows::Tensor(tensor), packed: None }
    }
}

impl From<&Tensor> for WeightMatrix {
    fn from(tensor: &Tensor) -> Self {
        tensor.clone().into()
    }
}

impl From<MappedMatrix> for WeightMatrix {
    fn from(mapped: MappedMatrix) -> Self {
        Self { rows: MatrixRows::Mapped(mapped), packed: None }
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

    /// Lets the system forget what this process has read. It is read again if it is needed.
    fn release_pages(&self) {
        #[cfg(unix)]
        #[expect(unsafe_code, reason = "this advice may discard content, but not that of a file")]
        // SAFETY: the map is of a file and nobody writes through it, so the pages read the same
        // later. If the system refuses, they only stay in memory.
        let _ = unsafe {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            self.file.unchecked_advise_range(advice, self.start, self.byte_count())
        };
    }

    fn byte_count(&self) -> usize {
        self.rows * self.width * size_of::<bf16>()
    }

    fn row_elements(&self) -> &[bf16] {
        let bytes = &self.file[self.start..][..self.byte_count()];
        let bits: &[u16] = pulp::bytemuck::cast_slice(bytes);
        bits.reinterpret_cast()
    }
}

impl WeightMatrix {
    /// Returns the type of the tensor that this matrix is or converts to.
    pub(crate) fn element_type(&self) -> DType {
        match &self.rows {
            MatrixRows::Tensor(tensor) => tensor.dtype(),
            MatrixRows::Mapped(_) => DType::BF16,
            MatrixRows::Quantized(_) => DType::F32,
        }
    }

    pub(crate) fn matrix_form(&self) -> MatrixForm {
        match &self.rows {
            _ if self.packed.is_some() => MatrixForm::Packed,
            MatrixRows::Quantized(_) => MatrixForm::Quantized,
            MatrixRows::Tensor(tensor)
                if tensor.dtype() != DType::BF16 || !tensor.device().is_cpu() =>
            {
                MatrixForm::Tensor
            }
            _ => MatrixForm::Bf16Rows,
        }
    }

    /// Returns the elements for a projection. Fails for a tensor that is not bf16 in main memory.
    pub(crate) fn host_elements(&self) -> Result<HostElements<'_>> {
        match (&self.packed, &self.rows) {
            (Some(packed), _) => Ok(HostElements::Packed(packed)),
            (None, MatrixRows::Quantized(quantized)) => Ok(HostElements::Quantized(quantized)),
            (None, _) => Ok(HostElements::Rows(self.bf16_elements()?, self.matrix_shape()?.1)),
        }
    }

    pub(crate) fn drop_packed(&mut self) {
        self.packed = None;
    }

    /// Converts to 8 bits. Fails for a tensor that is neither f32 nor bf16 in main memory.
    pub(crate) fn into_quantized(self) -> Result<Self> {
        let width = self.matrix_shape()?.1;
        let quantized = match &self.rows {
            MatrixRows::Quantized(_) => return Ok(self),
            MatrixRows::Tensor(tensor) if tensor.dtype() == DType::F32 => {
                QuantizedMatrix::quantize::<f32>(&host_slice(tensor)?, width)?
            }
            _ => QuantizedMatrix::quantize::<bf16>(&self.bf16_elements()?, width)?,
        };
        if let MatrixRows::Mapped(mapped) = &self.rows {
            mapped.release_pages();
        }
        Ok(Self { rows: MatrixRows::Quantized(quantized), packed: None })
    }

    /// Packs matrices for products with rows of activations, and releases the pages of mapped ones.
    /// Leaves them as they are if they are not bf16 in main memory.
    pub(crate) fn pack_all(kernel: MatmulKernel, matrices: &mut [&mut Self]) -> Result<()> {
        if matrices.iter().any(|matrix| matrix.matrix_form() != MatrixForm::Bf16Rows) {
            return Ok(());
        }
        let elements =
            matrices.iter().map(|matrix| matrix.bf16_elements()).collect::<Result<Vec<_>>>()?;
        let mut rows = Vec::with_capacity(matrices.len());
        for (matrix, elements) in matrices.iter().zip(&elements) {
            rows.push(Bf16Rows::new(elements, matrix.matrix_shape()?.1));
        }
        let release = |index: usize| {
            if let MatrixRows::Mapped(mapped) = &matrices[index].rows {
                mapped.release_pages();
            }
        };
        let packed = PackedMatrix::pack_all(kernel, &rows, release)?;
        drop(rows);
        drop(elements);
        for (matrix, packed) in matrices.iter_mut().zip(packed) {
            matrix.packed = Some(packed);
        }
        Ok(())
    }

    /// Returns (rows, width).
    pub(crate) fn matrix_shape(&self) -> Result<(usize, usize)> {
        match &self.rows {
            MatrixRows::Tensor(tensor) => tensor.dims2(),
            MatrixRows::Mapped(mapped) => Ok((mapped.rows, mapped.width)),
            MatrixRows::Quantized(quantized) => Ok(quantized.shape()),
        }
    }

    pub(crate) fn slice_rows(&self, rows: &Range<usize>) -> Result<Self> {
        let packed = self.packed.as_ref().and_then(|packed| packed.slice_columns(rows));
        let rows = match &self.rows {
            MatrixRows::Tensor(tensor) => {
                MatrixRows::Tensor(tensor.narrow(0, rows.start, rows.len())?)
            }
            MatrixRows::Mapped(mapped) if rows.end <= mapped.rows => {
                let start = mapped.start + rows.start * mapped.width * size_of::<bf16>();
                MatrixRows::Mapped(MappedMatrix { start, rows: rows.len(), ..mapped.clone() })
            }
            MatrixRows::Mapped(mapped) => bail!("rows {rows:?} of {}", mapped.rows),
            MatrixRows::Quantized(quantized) => {
                let Some(sliced) = quantized.slice_columns(rows) else {
                    bail!("rows {rows:?} of {:?} are not whole tiles", quantized.shape());
                };
                MatrixRows::Quantized(sliced)
            }
        };
        Ok(Self { rows, packed })
    }

    pub(crate) fn select_rows(&self, tokens: &[u32], device: &Device) -> Result<Tensor> {
        match &self.rows {
            MatrixRows::Tensor(tensor) => {
                tensor.index_select(&Tensor::new(tokens, device)?, 0)?.to_dtype(DType::F32)
            }
            MatrixRows::Mapped(mapped) => {
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
            MatrixRows::Quantized(quantized) => {
                let (count, width) = quantized.shape();
                let mut rows = vec![0f32; tokens.len() * width];
                for (out, token) in rows.chunks_exact_mut(width).zip(tokens) {
                    if quantized.copy_column(*token as usize, out).is_none() {
                        bail!("token {token} of {count}");
                    }
                }
                Tensor::from_vec(rows, (tokens.len(), width), device)
            }
        }
    }

    /// Copies a mapped matrix; a quantised one is converted to the values that it represents.
    pub(crate) fn to_tensor(&self) -> Result<Tensor> {
        match &self.rows {
            MatrixRows::Tensor(tensor) => Ok(tensor.clone()),
            MatrixRows::Mapped(mapped) => {
                let shape = (mapped.rows, mapped.width);
                Tensor::from_slice(mapped.row_elements(), shape, &Device::Cpu)
            }
            MatrixRows::Quantized(quantized) => {
                let rows =
                    0..u32::try_from(quantized.shape().0).map_err(candle_core::Error::wrap)?;
                self.select_rows(&rows.collect::<Vec<_>>(), &Device::Cpu)
            }
        }
    }

    pub(crate) fn element_count(&self) -> usize {
        match &self.rows {
            MatrixRows::Tensor(tensor) => tensor.elem_count(),
            MatrixRows::Mapped(mapped) => mapped.rows * mapped.width,
            MatrixRows::Quantized(quantized) => quantized.shape().0 * quantized.shape().1,
        }
    }

    pub(crate) fn bf16_elements(&self) -> Result<Box<dyn Deref<Target = [bf16]> + Sync + '_>> {
        match &self.rows {
            MatrixRows::Tensor(tensor) => Ok(Box::new(host_slice::<bf16>(tensor)?)),
            MatrixRows::Mapped(mapped) => Ok(Box::new(mapped.row_elements())),
            MatrixRows::Quantized(_) => bail!("a matrix in 8 bits has no bf16 rows"),
        }
    }
}
