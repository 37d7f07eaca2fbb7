//! Derives all random seeds from the seed of the run, so that a plan does not depend on which host
//! ran a job or crashed.

/// Derives the seed for one purpose from a parent seed. Different `path`s give unrelated seeds. The
/// result is stable across versions.
pub fn derive_seed(seed: u64, path: &[&str]) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("flotilla 2026 seed");
    hasher.update(&seed.to_le_bytes());
    for part in path {
        // Hash the length first, so that ["ab"] and ["a", "b"] differ.
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// Derives the seed of one sample of a generate order; `index` counts the samples of the prompt.
pub fn derive_sample_seed(order_seed: u64, prompt_id: &str, index: u32) -> u64 {
    derive_seed(order_seed, &["sample", prompt_id, &index.to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_stable_across_versions_and_differ_by_path() {
        assert_eq!(derive_seed(1, &["a", "b"]), derive_seed(1, &["a", "b"]));
        assert_ne!(derive_seed(1, &["a", "b"]), derive_seed(1, &["ab"]));
        assert_ne!(derive_seed(1, &["a"]), derive_seed(2, &["a"]));
        assert_ne!(derive_sample_seed(7, "p1", 1), derive_sample_seed(7, "p1", 2));
        assert_ne!(derive_sample_seed(7, "p1", 1), derive_sample_seed(7, "p11", 0));
    }
}
