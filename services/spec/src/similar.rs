//! Suggestions for misspelled names.

/// Least similarity, from 0 to 1, of a name and its likely misspelling.
const SIMILARITY_MIN: f64 = 0.8;

/// Longer names are no misspellings, and would take long to compare.
const NAME_BYTES_MAX: usize = 64;

/// Returns the known name that is most similar to a misspelled one; `None` if none is similar.
pub fn find_similar<'a>(
    misspelled: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if misspelled.len() > NAME_BYTES_MAX {
        return None;
    }
    let similarity = |known: &'a str| (strsim::jaro_winkler(misspelled, known), known);
    let nearest = known.into_iter().map(similarity).max_by(|a, b| a.0.total_cmp(&b.0));
    nearest.filter(|(similarity, _)| *similarity >= SIMILARITY_MIN).map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_similar_name_is_suggested() {
        let known = ["prompts", "heldout", "cycles", "exact", "learning_rate"];
        let of = |misspelled| find_similar(misspelled, known);
        assert_eq!(of("promts"), Some("prompts"));
        assert_eq!(of("cycels"), Some("cycles"));
        assert_eq!(of("exakt"), Some("exact"));
        assert_eq!(of("learningrate"), Some("learning_rate"));
        assert_eq!(of("seed"), None);
        assert_eq!(of("x"), None);
        assert_eq!(of(&"prompts".repeat(100_000)), None);
    }
}
