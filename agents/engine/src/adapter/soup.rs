//! The choice of the adapters in a greedy soup (arXiv:2203.05482).

/// A choice in progress: asks for the score of one mean after the other. First come the adapters
/// alone; then each joins the mean, the best first, unless the mean becomes less likely.
#[derive(Debug, Clone, Default)]
pub struct SoupChoice {
    count: usize,
    /// Of each adapter alone.
    scores: Vec<f64>,
    /// Those that have not been tried in the mean, the worst first.
    untried: Vec<usize>,
    kept: Vec<usize>,
    best: f64,
}

impl SoupChoice {
    /// Begins the choice among `count` adapters.
    pub fn new(count: usize) -> Self {
        Self { count, ..Self::default() }
    }

    /// Returns the adapters, ascending, whose mean is to be scored next; `None` at the end.
    pub fn next_candidate(&self) -> Option<Vec<usize>> {
        if self.scores.len() < self.count {
            return Some(vec![self.scores.len()]);
        }
        let mut candidate = self.kept.clone();
        candidate.push(*self.untried.last()?);
        candidate.sort_unstable();
        Some(candidate)
    }

    /// Records the negative log-likelihood of the mean that [`Self::next_candidate`] names.
    pub fn record_score(&mut self, nll: f64) {
        let Some(candidate) = self.next_candidate() else { return };
        if self.scores.len() < self.count {
            self.scores.push(nll);
            if self.scores.len() == self.count {
                self.untried = (0..self.count).collect();
                self.untried
                    .sort_by(|one, other| self.scores[*other].total_cmp(&self.scores[*one]));
                self.kept.extend(self.untried.pop());
                self.best = self.kept.first().map_or(0.0, |best| self.scores[*best]);
            }
            return;
        }
        self.untried.pop();
        if nll <= self.best {
            (self.kept, self.best) = (candidate, nll);
        }
    }

    /// Returns the chosen adapters, ascending, and the score of their mean.
    pub fn chosen(&self) -> (&[usize], f64) {
        (&self.kept, self.best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_join_the_mean_while_it_does_not_become_less_likely() {
        let score = |mean: &[usize]| match mean {
            [0] => 2.0,
            [1] => 1.0,
            [2] => 3.0,
            [3] => 1.5,
            [1, 3] => 1.2,
            [0, 1] => 0.9,
            [0, 1, 2] => 0.9,
            other => panic!("{other:?}"),
        };
        let mut choice = SoupChoice::new(4);
        while let Some(mean) = choice.next_candidate() {
            choice.record_score(score(&mean));
        }
        assert_eq!(choice.chosen(), (&[0, 1, 2][..], 0.9), "3 made it worse, 2 did not");
        assert_eq!(SoupChoice::new(0).next_candidate(), None);
        let mut alone = SoupChoice::new(1);
        alone.record_score(0.5);
        assert_eq!((alone.next_candidate(), alone.chosen()), (None, (&[0][..], 0.5)));
    }
}
