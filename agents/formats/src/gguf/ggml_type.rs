//! The tensor types of ggml: the number of values in a block and its size in bytes.

/// A tensor type of ggml. Values are stored in blocks that share a scale; plain types have blocks
/// of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgmlType {
    pub(super) id: u32,
    /// ggml's name, as in `Q8_0`.
    pub name: &'static str,
    /// Values in a block.
    block: u64,
    /// Bytes of a block.
    bytes: u64,
}

impl GgmlType {
    pub const F32: Self = Self::new(0, "F32", 1, 4);
    pub const F16: Self = Self::new(1, "F16", 1, 2);
    pub const Q8_0: Self = Self::new(8, "Q8_0", 32, 34);
    pub const BF16: Self = Self::new(30, "BF16", 1, 2);

    const fn new(id: u32, name: &'static str, block: u64, bytes: u64) -> Self {
        Self { id, name, block, bytes }
    }

    /// Expects ggml's number.
    pub(super) fn from_id(id: u32) -> Option<Self> {
        ALL_TYPES.into_iter().find(|kind| kind.id == id)
    }

    /// Returns the bytes of a tensor; `None` if its rows are not whole blocks, or on overflow.
    pub(crate) fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let row = shape.last().copied().unwrap_or(1);
        if row % self.block != 0 {
            return None;
        }
        let values = shape.iter().try_fold(1_u64, |values, size| values.checked_mul(*size))?;
        (values / self.block).checked_mul(self.bytes)
    }
}

const ALL_TYPES: [GgmlType; 34] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::new(2, "Q4_0", 32, 18),
    GgmlType::new(3, "Q4_1", 32, 20),
    GgmlType::new(6, "Q5_0", 32, 22),
    GgmlType::new(7, "Q5_1", 32, 24),
    GgmlType::Q8_0,
    GgmlType::new(9, "Q8_1", 32, 40),
    GgmlType::new(10, "Q2_K", 256, 84),
    GgmlType::new(11, "Q3_K", 256, 110),
    GgmlType::new(12, "Q4_K", 256, 144),
    GgmlType::new(13, "Q5_K", 256, 176),
    GgmlType::new(14, "Q6_K", 256, 210),
    GgmlType::new(15, "Q8_K", 256, 292),
    GgmlType::new(16, "IQ2_XXS", 256, 66),
    GgmlType::new(17, "IQ2_XS", 256, 74),
    GgmlType::new(18, "IQ3_XXS", 256, 98),
    GgmlType::new(19, "IQ1_S", 256, 50),
    GgmlType::new(20, "IQ4_NL", 32, 18),
    GgmlType::new(21, "IQ3_S", 256, 110),
    GgmlType::new(22, "IQ2_S", 256, 82),
    GgmlType::new(23, "IQ4_XS", 256, 136),
    GgmlType::new(24, "I8", 1, 1),
    GgmlType::new(25, "I16", 1, 2),
    GgmlType::new(26, "I32", 1, 4),
    GgmlType::new(27, "I64", 1, 8),
    GgmlType::new(28, "F64", 1, 8),
    GgmlType::new(29, "IQ1_M", 256, 56),
    GgmlType::BF16,
    GgmlType::new(34, "TQ1_0", 256, 54),
    GgmlType::new(35, "TQ2_0", 256, 66),
    GgmlType::new(39, "MXFP4", 32, 17),
    GgmlType::new(40, "NVFP4", 64, 36),
    GgmlType::new(41, "Q1_0", 128, 18),
];
