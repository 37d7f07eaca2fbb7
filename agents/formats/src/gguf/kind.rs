//! Kinds of tensors: how many values a block has, and how many bytes.

/// As ggml numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorKind {
    pub(super) id: u32,
    pub name: &'static str,
    block: u64,
    bytes: u64,
}

impl TensorKind {
    pub const F32: Self = Self::new(0, "F32", 1, 4);
    pub const F16: Self = Self::new(1, "F16", 1, 2);
    pub const Q8_0: Self = Self::new(8, "Q8_0", 32, 34);
    pub const BF16: Self = Self::new(30, "BF16", 1, 2);

    const fn new(id: u32, name: &'static str, block: u64, bytes: u64) -> Self {
        Self { id, name, block, bytes }
    }

    pub(super) fn from_id(id: u32) -> Option<Self> {
        ALL.into_iter().find(|kind| kind.id == id)
    }

    /// Values that share a scale.
    pub fn block(self) -> u64 {
        self.block
    }

    /// Of a tensor of this shape; none when rows are not whole blocks or it is absurdly large.
    pub fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        let row = shape.last().copied().unwrap_or(1);
        if row % self.block != 0 {
            return None;
        }
        let values = shape.iter().try_fold(1_u64, |values, size| values.checked_mul(*size))?;
        (values / self.block).checked_mul(self.bytes)
    }
}

const ALL: [TensorKind; 34] = [
    TensorKind::F32,
    TensorKind::F16,
    TensorKind::new(2, "Q4_0", 32, 18),
    TensorKind::new(3, "Q4_1", 32, 20),
    TensorKind::new(6, "Q5_0", 32, 22),
    TensorKind::new(7, "Q5_1", 32, 24),
    TensorKind::Q8_0,
    TensorKind::new(9, "Q8_1", 32, 40),
    TensorKind::new(10, "Q2_K", 256, 84),
    TensorKind::new(11, "Q3_K", 256, 110),
    TensorKind::new(12, "Q4_K", 256, 144),
    TensorKind::new(13, "Q5_K", 256, 176),
    TensorKind::new(14, "Q6_K", 256, 210),
    TensorKind::new(15, "Q8_K", 256, 292),
    TensorKind::new(16, "IQ2_XXS", 256, 66),
    TensorKind::new(17, "IQ2_XS", 256, 74),
    TensorKind::new(18, "IQ3_XXS", 256, 98),
    TensorKind::new(19, "IQ1_S", 256, 50),
    TensorKind::new(20, "IQ4_NL", 32, 18),
    TensorKind::new(21, "IQ3_S", 256, 110),
    TensorKind::new(22, "IQ2_S", 256, 82),
    TensorKind::new(23, "IQ4_XS", 256, 136),
    TensorKind::new(24, "I8", 1, 1),
    TensorKind::new(25, "I16", 1, 2),
    TensorKind::new(26, "I32", 1, 4),
    TensorKind::new(27, "I64", 1, 8),
    TensorKind::new(28, "F64", 1, 8),
    TensorKind::new(29, "IQ1_M", 256, 56),
    TensorKind::BF16,
    TensorKind::new(34, "TQ1_0", 256, 54),
    TensorKind::new(35, "TQ2_0", 256, 66),
    TensorKind::new(39, "MXFP4", 32, 17),
    TensorKind::new(40, "NVFP4", 64, 36),
    TensorKind::new(41, "Q1_0", 128, 18),
];
