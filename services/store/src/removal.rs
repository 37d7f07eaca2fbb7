//! The record of a removed tree, and the objects that a tree has.

use serde::{Deserialize, Serialize};

/// The file that records the removal of a tree, beside the place of its manifest.
pub const REMOVAL_FILE: &str = "REMOVED.json";

/// The record of a tree's removal. It is written before the first file is removed and stays in the
/// tree's directory. While the manifest exists, the removal has not begun and the tree is readable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRemoval {
    /// The time in the format of RFC 3339.
    pub at: String,
    /// The user or program that removed the tree.
    pub by: String,
    /// The rules that did not keep the tree.
    pub rules: String,
}

/// The objects in a tree's directory, without a removal record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeUsage {
    pub objects: u64,
    pub bytes: u64,
    /// True if the tree has a manifest, without which it does not exist.
    pub is_readable: bool,
    /// True if the directory has a removal record.
    pub is_marked: bool,
}
