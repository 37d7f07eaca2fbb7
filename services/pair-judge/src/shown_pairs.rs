//! The order in which a judge sees the answers of a pair.

use comparison::PromptAnswers;
use wire::derive_seed;

/// Two answers to a prompt, in the order in which the judge sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShownPair {
    /// Number of the prompt, from 0.
    pub prompt_number: usize,
    pub prompt: String,
    pub first: String,
    pub second: String,
    /// True if the answer of the model A is the first one.
    pub is_a_first: bool,
}

/// Returns all pairs of the prompts, in their order. The order of a prompt's first pair is random
/// and follows from the seed and the prompt's id; then it alternates, so that a judge's bias for a
/// position cancels out.
pub(crate) fn order_pairs(
    prompts: impl Iterator<Item = PromptAnswers>,
    seed: u64,
) -> impl Iterator<Item = ShownPair> {
    prompts.enumerate().flat_map(move |(prompt_number, prompt)| {
        let PromptAnswers { prompt_id, prompt, answers } = prompt;
        let mut is_a_first = derive_seed(seed, &["judge", &prompt_id]) & 1 == 0;
        answers.into_iter().map(move |[a, b]| {
            let shown_first = is_a_first;
            is_a_first = !is_a_first;
            let (first, second) = if shown_first { (a, b) } else { (b, a) };
            let prompt = prompt.clone();
            ShownPair { prompt_number, prompt, first, second, is_a_first: shown_first }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(count: usize, seed: u64) -> Vec<ShownPair> {
        let prompt = |number: usize| PromptAnswers {
            prompt_id: format!("p{number}"),
            prompt: format!("{number}?"),
            answers: vec![["a0".into(), "b0".into()], ["a1".into(), "b1".into()]],
        };
        order_pairs((0..count).map(prompt), seed).collect()
    }

    #[test]
    fn a_repetition_shows_the_same_order_and_another_seed_another() {
        assert_eq!(shown(50, 1), shown(50, 1));
        assert_ne!(shown(50, 1), shown(50, 2));
    }

    #[test]
    fn each_model_is_first_as_often_and_answers_of_an_index_stay_together() {
        let pairs = shown(400, 3);
        assert_eq!(pairs.len(), 800);
        for (place, pair) in pairs.iter().enumerate() {
            let index = place % 2;
            assert_eq!(pair.prompt_number, place / 2);
            let (a, b) = (format!("a{index}"), format!("b{index}"));
            let expected = if pair.is_a_first { (&a, &b) } else { (&b, &a) };
            assert_eq!((&pair.first, &pair.second), expected);
        }
        let of_first_pairs = pairs.iter().step_by(2).filter(|it| it.is_a_first).count();
        assert!((150..250).contains(&of_first_pairs), "{of_first_pairs} of 400");
        assert_eq!(pairs.iter().filter(|it| it.is_a_first).count(), 400, "it alternates");
    }
}
