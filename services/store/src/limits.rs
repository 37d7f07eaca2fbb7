//! Size limits that several modules share.

/// Smallest size of a part, and largest size of an object that is sent in one request, in bytes.
pub(crate) const PART_BYTES: u64 = 16 << 20;
/// Largest part of an upload in bytes, and largest object that is sent in one piece.
pub const PIECE_BYTES_MAX: u64 = 64 << 20;
/// Largest object in bytes; no file of a model is larger.
pub const OBJECT_BYTES_MAX: u64 = 1 << 40;
/// Largest number of parts of an upload; S3 allows 10 000.
pub const PARTS_MAX: usize = 10_000;
