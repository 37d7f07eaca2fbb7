//! Less at once, where a box ran out of memory.

/// So often a pass is halved; then the training is too large for the box.
const HALVINGS_MAX: u32 = 2;

/// The tokens of one pass after so many halvings; `None`: it is not halved again. What a step
/// learns from stays the same, in more passes.
pub fn halved(tokens: u32, halvings: u32) -> Option<u32> {
    (halvings <= HALVINGS_MAX).then(|| (tokens >> halvings).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_halved_twice_and_never_to_nothing() {
        let passes: Vec<u32> = (0..).map_while(|times| halved(4096, times)).collect();
        assert_eq!(passes, [4096, 2048, 1024]);
        assert_eq!(halved(1, 2), Some(1));
    }
}
