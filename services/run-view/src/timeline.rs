//! Working times of agents as bars of a timeline. Bars that are close together are merged, so that
//! a cycle of thousands of jobs needs only a few dozen.

use std::collections::BTreeMap;

use wire::v1::board::Span;

/// Bars of one agent and kind of work in one cycle.
const BARS_MAX: usize = 24;
/// Agents and kinds of work in one cycle; further lanes are not drawn.
const LANES_MAX: usize = 2048;
/// Bars of all lanes together; with many lanes, each has fewer bars.
const SPANS_MAX: usize = 4096;
/// Gaps up to this size are not visible and are closed.
const VISIBLE_GAP_S: f64 = 0.5;

/// Bars of one cycle, by agent and kind of work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Timeline(BTreeMap<(String, &'static str), Vec<TimelineBar>>);

/// The bars of a lane are ordered and do not touch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TimelineBar {
    /// Since the run was submitted.
    begin_s: f64,
    /// Since the run was submitted.
    end_s: f64,
    /// Jobs merged into the bar.
    count: u32,
    /// The first and the last outer step, of a training on several boxes.
    outer_steps: Option<(u32, u32)>,
}

impl Timeline {
    /// Adds work that took `wall_s` seconds and ended at `end_s`. Ignores results without an agent,
    /// such as the checkpoint with which a run begins.
    pub(crate) fn add_work(&mut self, agent: &str, work: &'static str, wall_s: f64, end_s: f64) {
        self.add_part(agent, work, None, (wall_s, end_s));
    }

    /// Adds work, of an outer step if it is part of a training on several boxes.
    pub(crate) fn add_part(
        &mut self,
        agent: &str,
        work: &'static str,
        outer: Option<u32>,
        (wall_s, end_s): (f64, f64),
    ) {
        if agent.is_empty() {
            return;
        }
        // Agents report this value; it may be anything.
        let wall_s = if wall_s.is_finite() { wall_s.clamp(0.0, end_s.max(0.0)) } else { 0.0 };
        let lane = (agent.to_owned(), work);
        if self.0.len() >= LANES_MAX && !self.0.contains_key(&lane) {
            return;
        }
        let bars = self.0.entry(lane).or_default();
        let outer_steps = outer.map(|outer| (outer, outer));
        insert_bar(bars, TimelineBar { begin_s: end_s - wall_s, end_s, count: 1, outer_steps });
        if bars.len() > BARS_MAX {
            close_smallest_gap(bars);
        }
    }

    /// Merges further if there are more than 4096 bars in all.
    pub(crate) fn to_spans(&self) -> Vec<Span> {
        let most = (SPANS_MAX / self.0.len().max(1)).max(1);
        let lanes = self.0.iter().flat_map(|((agent, work), bars)| {
            let mut bars = bars.clone();
            while bars.len() > most {
                close_smallest_gap(&mut bars);
            }
            bars.into_iter().map(move |bar| {
                let (first_outer_step, last_outer_step) = bar.outer_steps.unwrap_or_default();
                Span {
                    agent: agent.clone(),
                    work: (*work).to_owned(),
                    begin_s: bar.begin_s,
                    end_s: bar.end_s,
                    count: bar.count,
                    first_outer_step,
                    last_outer_step,
                }
            })
        });
        lanes.collect()
    }
}

impl TimelineBar {
    /// Returns one bar for both, without a gap.
    fn join(self, other: Self) -> Self {
        let outer_steps = match (self.outer_steps, other.outer_steps) {
            (Some((first, last)), Some((from, to))) => Some((first.min(from), last.max(to))),
            (one, none) => one.or(none),
        };
        Self {
            begin_s: self.begin_s.min(other.begin_s),
            end_s: self.end_s.max(other.end_s),
            count: self.count.saturating_add(other.count),
            outer_steps,
        }
    }
}

/// Merges the bar with those it touches.
fn insert_bar(bars: &mut Vec<TimelineBar>, mut bar: TimelineBar) {
    let first = bars.partition_point(|other| other.end_s + VISIBLE_GAP_S < bar.begin_s);
    let touched =
        bars[first..].iter().take_while(|other| other.begin_s <= bar.end_s + VISIBLE_GAP_S);
    let last = first + touched.count();
    for other in bars.drain(first..last) {
        bar = bar.join(other);
    }
    bars.insert(first, bar);
}

/// Merges the two neighbouring bars with the smallest gap.
fn close_smallest_gap(bars: &mut Vec<TimelineBar>) {
    let gaps = bars.windows(2).enumerate().map(|(at, two)| (at, two[1].begin_s - two[0].end_s));
    let Some((at, _)) = gaps.min_by(|a, b| a.1.total_cmp(&b.1)) else { return };
    let next = bars.remove(at + 1);
    bars[at] = bars[at].join(next);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_without_a_gap_is_one_bar_in_whatever_order_it_is_told() {
        let mut lanes = Timeline::default();
        for (wall, end) in [(1.0, 10.0), (1.0, 12.0), (2.0, 11.5), (1.0, 20.0)] {
            lanes.add_work("box", "generate", wall, end);
        }
        lanes.add_work("box", "verify", 1.0, 11.0);
        let shown = lanes.to_spans();
        let bars: Vec<(f64, f64, u32)> =
            shown.iter().map(|span| (span.begin_s, span.end_s, span.count)).collect();
        assert_eq!(bars, [(9.0, 12.0, 3), (19.0, 20.0, 1), (10.0, 11.0, 1)]);
    }

    #[test]
    fn a_lane_has_a_bound_and_counts_every_job() {
        let mut lanes = Timeline::default();
        // Odd times first, so that bars come between others as well.
        let ends = (0..1000).step_by(2).chain((1..1000).step_by(2));
        ends.for_each(|end| lanes.add_work("box", "generate", 1.0, f64::from(end) * 10.0));
        let shown = lanes.to_spans();
        assert!(shown.len() <= BARS_MAX);
        assert_eq!(shown.iter().map(|span| span.count).sum::<u32>(), 1000);
        assert!(shown.windows(2).all(|two| two[0].end_s < two[1].begin_s));
    }

    #[test]
    fn times_that_cannot_be_are_drawn_as_moments() {
        let mut lanes = Timeline::default();
        for wall in [f64::NAN, f64::INFINITY, -5.0] {
            lanes.add_work("box", "train", wall, 3.0);
        }
        lanes.add_work("box", "train", 1e9, 3.0);
        lanes.add_work("", "train", 1.0, 3.0);
        assert_eq!(lanes.to_spans().len(), 1);
        assert_eq!(lanes.to_spans()[0].begin_s, 0.0, "nothing began before the run");
    }
}
