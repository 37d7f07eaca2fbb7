//! A set of steps, as ranges.

use std::ops::Range;

/// A set of steps of a training, counted from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StepRanges {
    /// Ascending; no two touch.
    ranges: Vec<Range<u32>>,
}

impl StepRanges {
    /// Adds the steps of a range. Returns false if one of them is in the set already; then the set
    /// still contains all of them, once.
    pub(crate) fn add_range(&mut self, added: Range<u32>) -> bool {
        if added.is_empty() {
            return true;
        }
        let before = self.step_count();
        let (touching, mut kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.ranges)
            .into_iter()
            .partition(|range| range.start <= added.end && added.start <= range.end);
        let start = touching.iter().map(|range| range.start).min();
        let end = touching.iter().map(|range| range.end).max();
        let whole = added.start.min(start.unwrap_or(u32::MAX))..added.end.max(end.unwrap_or(0));
        let position = kept.partition_point(|range| range.start < whole.start);
        kept.insert(position, whole);
        self.ranges = kept;
        self.step_count() == before.saturating_add(added.end - added.start)
    }

    pub(crate) fn step_count(&self) -> u32 {
        self.ranges.iter().fold(0, |sum, range| sum.saturating_add(range.end - range.start))
    }

    /// Returns the first steps below `end` that are not in the set; `None` if all are.
    pub(crate) fn next_gap(&self, end: u32) -> Option<Range<u32>> {
        let (start, until) = match self.ranges.as_slice() {
            [first, rest @ ..] if first.start == 0 => {
                (first.end, rest.first().map_or(end, |next| next.start))
            }
            [first, ..] => (0, first.start),
            [] => (0, end),
        };
        Some(start..until.min(end)).filter(|gap| !gap.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_added_once_and_the_first_missing_ones_are_known() {
        let mut set = StepRanges::default();
        assert_eq!(set.next_gap(9), Some(0..9));
        assert!(set.add_range(3..5) && set.add_range(7..7) && set.add_range(8..9));
        assert_eq!(
            (set.next_gap(9), set.next_gap(2), set.step_count()),
            (Some(0..3), Some(0..2), 3)
        );
        assert!(set.add_range(0..3));
        assert_eq!((set.next_gap(9), set.next_gap(6)), (Some(5..8), Some(5..6)));
        assert!(set.add_range(5..8));
        assert_eq!((set.next_gap(9), set.next_gap(10)), (None, Some(9..10)));
        assert_eq!(set.ranges.len(), 1, "touching ranges become one");
        assert!(!set.add_range(8..12));
        assert_eq!((set.step_count(), set.next_gap(20)), (12, Some(12..20)));
    }
}
