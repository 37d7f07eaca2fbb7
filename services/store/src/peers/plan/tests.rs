use super::*;

const MS: Duration = Duration::from_millis(1);
const PART: u64 = 128 << 10;

/// A simulation: agents and a store whose links carry `rate` bytes a millisecond each way, shared
/// evenly by their transfers. An announcement takes a millisecond.
struct Fleet {
    boxes: Vec<Box_>,
    parts: usize,
    rate: u64,
    store_sent: u64,
    /// Bytes sent by each agent.
    sent: Vec<u64>,
    now: Duration,
}

struct Box_ {
    plan: DownloadPlan,
    under_way: Vec<(PartRequest, u64)>,
    starts: Duration,
    done: Option<Duration>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Good,
    /// Claims all parts and has none.
    Boasts,
    /// Announces all parts and never answers.
    Hangs,
    /// Has all parts from the start, as the publisher.
    Has,
    DiesAt(Duration),
}

impl Fleet {
    fn new(kinds: &[Kind], parts: usize, rate: u64) -> Self {
        let count = kinds.len();
        let boxes = kinds.iter().enumerate().map(|(place, kind)| {
            let mut plan = DownloadPlan::new(parts, PART, (place, count));
            (0..count).filter(|peer| *peer != place).for_each(|peer| {
                plan.add_peer(peer, Duration::ZERO);
            });
            let starts = MS * u32::try_from(place).unwrap();
            Box_ { plan, under_way: Vec::new(), starts, done: None, kind: *kind }
        });
        let (boxes, store_sent, now) = (boxes.collect(), 0, Duration::ZERO);
        Self { boxes, parts, rate, store_sent, sent: vec![0; count], now }
    }

    fn speaks(&self, who: usize) -> Option<(PartBitmap, PartBitmap)> {
        let one = &self.boxes[who];
        match one.kind {
            _ if self.now < one.starts => None,
            Kind::Boasts => Some((vec![false; self.parts], vec![true; self.parts])),
            Kind::Hangs | Kind::Has => Some((vec![true; self.parts], vec![false; self.parts])),
            Kind::DiesAt(at) if self.now >= at => None,
            _ => Some(one.plan.own_availability()),
        }
    }

    fn is_dead(&self, who: usize) -> bool {
        matches!(self.boxes[who].kind, Kind::DiesAt(at) if self.now >= at)
    }

    fn works(&self, who: usize) -> bool {
        let one = &self.boxes[who];
        matches!(one.kind, Kind::Good | Kind::DiesAt(_))
            && !self.is_dead(who)
            && self.now >= one.starts
    }

    fn tick(&mut self) {
        self.now += MS;
        let count = self.boxes.len();
        for who in (0..count).filter(|who| self.works(*who)).collect::<Vec<_>>() {
            for peer in (0..count).filter(|peer| *peer != who) {
                match self.speaks(peer) {
                    Some(parts) => self.boxes[who].plan.update_peer(peer, parts, self.now),
                    None if self.is_dead(peer) => self.boxes[who].plan.remove_peer(peer),
                    None => {}
                }
            }
            let now = self.now;
            let one = &mut self.boxes[who];
            while let Some(take) = one.plan.next(now) {
                let bytes = PART * take.parts.len() as u64;
                one.under_way.push((take, bytes));
            }
        }
        self.carry();
    }

    fn carry(&mut self) {
        let mut sent = vec![0; self.boxes.len()];
        let mut of_store = 0;
        for (_, one) in self.boxes.iter().enumerate().filter(|(who, _)| self.works(*who)) {
            for (take, _) in &one.under_way {
                match take.source {
                    PartSource::Store => of_store += 1,
                    PartSource::Peer(peer) => sent[peer] += 1,
                }
            }
        }
        for who in 0..self.boxes.len() {
            if !self.works(who) {
                continue;
            }
            let came = self.boxes[who].under_way.len() as u64;
            let kinds: Vec<Kind> = self.boxes.iter().map(|one| one.kind).collect();
            let one = &mut self.boxes[who];
            for (take, left) in &mut one.under_way {
                let sharing = match take.source {
                    PartSource::Store => of_store,
                    PartSource::Peer(peer) if kinds[peer] == Kind::Hangs => continue,
                    PartSource::Peer(peer) => sent[peer],
                };
                let bytes = (self.rate / sharing.max(came)).min(*left);
                let before = left.div_ceil(PART);
                *left -= bytes;
                match take.source {
                    PartSource::Store => self.store_sent += bytes,
                    PartSource::Peer(peer) => self.sent[peer] += bytes,
                }
                for gone in left.div_ceil(PART)..before {
                    let index = take.parts.end - 1 - usize::try_from(gone).unwrap();
                    one.plan.mark_received(index);
                }
            }
            let over: Vec<PartRequest> = one
                .under_way
                .extract_if(.., |(_, left)| *left == 0)
                .map(|(take, _)| take)
                .collect();
            over.iter().for_each(|take| one.plan.end_request(take));
            if one.plan.is_done() && one.done.is_none() {
                one.done = Some(self.now);
            }
        }
    }

    /// Returns the time when the last good agent has all parts, in ideal times, and how often the
    /// store sent the file.
    fn run(&mut self) -> (f64, f64) {
        let bytes = PART * self.parts as u64;
        let limit = Duration::from_millis(100 * bytes / self.rate + 60_000);
        let good = |one: &Box_| one.kind == Kind::Good;
        while self.boxes.iter().any(|one| good(one) && one.done.is_none()) {
            assert!(self.now < limit, "somebody never got it");
            self.tick();
        }
        let last = self.boxes.iter().filter(|one| good(one)).filter_map(|one| one.done).max();
        let ideal = bytes as f64 / self.rate as f64;
        (last.unwrap().as_secs_f64() * 1e3 / ideal, self.store_sent as f64 / bytes as f64)
    }
}

#[test]
fn the_last_of_many_is_hardly_later_than_one_alone_would_be() {
    for boxes in [1, 2, 4, 8] {
        let (times, copies) = Fleet::new(&vec![Kind::Good; boxes], 160, 25_000).run();
        assert!(times < 1.15, "{boxes} boxes took {times:.3} times as long as the bytes do");
        assert!(copies < 1.25, "the store sent {copies:.3} copies to {boxes} boxes");
    }
}

#[test]
fn a_lying_or_hanging_peer_costs_only_a_moment() {
    for kind in [Kind::Boasts, Kind::Hangs] {
        let mut kinds = vec![Kind::Good; 4];
        kinds.push(kind);
        let mut fleet = Fleet::new(&kinds, 80, 12_500);
        let ideal_ms = (80 * PART / 12_500) as f64;
        let late_ms = (fleet.run().0 - 1.0) * ideal_ms;
        assert!(late_ms < 4_500.0, "{late_ms} ms late");
    }
}

#[test]
fn a_publisher_sends_its_file_little_more_than_once() {
    let mut kinds = vec![Kind::Good; 8];
    kinds.push(Kind::Has);
    let mut fleet = Fleet::new(&kinds, 320, 12_500);
    let (times, copies) = fleet.run();
    let sent = fleet.sent[8] as f64 / (320 * PART) as f64;
    assert!(times < 1.4, "the last took {times:.3} times as long as the bytes do");
    assert!(
        copies < 1.15 && sent < 1.3,
        "the store sent {copies:.3} copies, its publisher {sent:.3}"
    );
}

#[test]
fn parts_of_a_dead_peer_come_from_other_sources() {
    let mut kinds = vec![Kind::Good; 4];
    kinds.push(Kind::DiesAt(MS * 150));
    let (times, copies) = Fleet::new(&kinds, 320, 12_500).run();
    assert!(times < 1.5 && copies < 1.5, "{times:.3} times, {copies:.3} copies");
}

#[test]
fn a_failed_part_is_requested_again() {
    let mut plan = DownloadPlan::new(4, PART, (0, 1));
    let take = plan.next(MS).unwrap();
    assert_eq!(take, PartRequest { source: PartSource::Store, parts: 0..4 });
    assert_eq!(plan.next(MS), None);
    plan.mark_received(0);
    plan.end_request(&take);
    assert_eq!(plan.next(MS), Some(PartRequest { source: PartSource::Store, parts: 1..4 }));
}
