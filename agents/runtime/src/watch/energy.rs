//! What each job has of the energy its box takes: the power measured last, shared among the jobs
//! held at each moment.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

/// Joules that one job held all along would have had, by now.
#[derive(Debug)]
struct Energy {
    at: Instant,
    watts: Option<f64>,
    jobs: u32,
    each: f64,
}

impl Energy {
    fn new(now: Instant) -> Self {
        Self { at: now, watts: None, jobs: 0, each: 0.0 }
    }

    fn measured(&mut self, now: Instant, watts: Option<f64>) {
        self.advance(now);
        self.watts = watts;
    }

    fn begin(&mut self, now: Instant) -> f64 {
        self.advance(now);
        self.jobs += 1;
        self.each
    }

    fn end(&mut self, now: Instant) {
        self.advance(now);
        self.jobs = self.jobs.saturating_sub(1);
    }

    /// By now; `None` while nobody measures.
    fn each(&mut self, now: Instant) -> Option<f64> {
        self.advance(now);
        self.watts.map(|_| self.each)
    }

    fn advance(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        if self.jobs > 0 {
            self.each += self.watts.unwrap_or(0.0) * gap / f64::from(self.jobs);
        }
    }
}

/// The box's, shared by its jobs.
#[derive(Debug, Clone)]
pub(super) struct Account(Arc<Mutex<Energy>>);

impl Account {
    pub(super) fn open() -> Self {
        Self(Arc::new(Mutex::new(Energy::new(Instant::now()))))
    }

    /// The box takes so much from now on.
    pub(super) fn measured(&self, watts: Option<f64>) {
        if let Ok(mut energy) = self.0.lock() {
            energy.measured(Instant::now(), watts);
        }
    }

    /// A job begins.
    pub(super) fn share(&self) -> Share {
        let from = self.0.lock().map_or(0.0, |mut energy| energy.begin(Instant::now()));
        Share(Arc::new(Open { account: self.clone(), from }))
    }
}

/// A job's part, counted while the last clone lives.
#[derive(Debug, Clone)]
pub(crate) struct Share(Arc<Open>);

#[derive(Debug)]
struct Open {
    account: Account,
    from: f64,
}

impl Share {
    /// So far; `None` where nobody measures.
    pub(crate) fn joules(&self) -> Option<f64> {
        let each = self.0.account.0.lock().ok()?.each(Instant::now())?;
        Some((each - self.0.from).max(0.0))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Ok(mut energy) = self.account.0.lock() {
            energy.end(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn jobs_held_together_share_and_no_joule_is_counted_twice_or_lost() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut energy = Energy::new(start);
        assert_eq!(energy.each(at(0)), None);
        energy.measured(at(0), Some(100.0));
        let first = energy.begin(at(10));
        let second = energy.begin(at(20));
        energy.measured(at(30), Some(200.0));
        let second = energy.each(at(40)).unwrap() - second;
        energy.end(at(40));
        let first = energy.each(at(50)).unwrap() - first;
        assert_eq!(second, 50.0 * 10.0 + 100.0 * 10.0);
        assert_eq!(first, 100.0 * 10.0 + second + 200.0 * 10.0);
        assert_eq!(
            first + second,
            100.0 * 20.0 + 200.0 * 20.0,
            "what the box took since the first"
        );
    }
}
