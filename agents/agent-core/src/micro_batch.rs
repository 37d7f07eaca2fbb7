//! Smaller training passes after an out-of-memory failure.

/// After more halvings, the training is too large for the host.
const HALVINGS_MAX: u32 = 2;

/// Returns the tokens of one training pass after `halvings` retries for lack of memory: `tokens`
/// halved that many times, at least 1. `None` after more than 2 halvings. A step still processes
/// the same tokens, in more passes.
pub fn halve_micro_batch(tokens: u32, halvings: u32) -> Option<u32> {
    (halvings <= HALVINGS_MAX).then(|| (tokens >> halvings).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_halved_twice_and_never_to_nothing() {
        let passes: Vec<u32> = (0..9).map_while(|times| halve_micro_batch(4096, times)).collect();
        assert_eq!(passes, [4096, 2048, 1024]);
        assert_eq!(halve_micro_batch(1, 2), Some(1));
    }
}
