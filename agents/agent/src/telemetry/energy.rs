//! The energy of each job: the power measured last, shared equally among the jobs held at each
//! moment.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

/// The energy in joules that one job held from the start would have had by now.
#[derive(Debug)]
struct EnergyIntegrator {
    updated_at: Instant,
    watts: Option<f64>,
    jobs: u32,
    joules_per_job: f64,
}

impl EnergyIntegrator {
    fn new(now: Instant) -> Self {
        Self { updated_at: now, watts: None, jobs: 0, joules_per_job: 0.0 }
    }

    /// Sets the host's power in watts from `now` on.
    fn set_power(&mut self, now: Instant, watts: Option<f64>) {
        self.advance_to(now);
        self.watts = watts;
    }

    /// Returns the joules per job at its start.
    fn start_job(&mut self, now: Instant) -> f64 {
        self.advance_to(now);
        self.jobs += 1;
        self.joules_per_job
    }

    fn end_job(&mut self, now: Instant) {
        self.advance_to(now);
        self.jobs = self.jobs.saturating_sub(1);
    }

    /// Returns the joules per job by `now`; `None` while the power is not measured.
    fn read_joules(&mut self, now: Instant) -> Option<f64> {
        self.advance_to(now);
        self.watts.map(|_| self.joules_per_job)
    }

    /// Adds the energy since the last call, divided among the held jobs.
    fn advance_to(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.updated_at).as_secs_f64();
        self.updated_at = self.updated_at.max(now);
        if self.jobs > 0 {
            self.joules_per_job += self.watts.unwrap_or(0.0) * gap / f64::from(self.jobs);
        }
    }
}

/// The host's energy meter, shared by its jobs. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct EnergyMeter(Arc<Mutex<EnergyIntegrator>>);

impl EnergyMeter {
    pub(super) fn start_now() -> Self {
        Self(Arc::new(Mutex::new(EnergyIntegrator::new(Instant::now()))))
    }

    /// Sets the host's power in watts from now on; `None` if it is not measured.
    pub(super) fn record_power(&self, watts: Option<f64>) {
        if let Ok(mut energy) = self.0.lock() {
            energy.set_power(Instant::now(), watts);
        }
    }

    pub(super) fn start_share(&self) -> EnergyShare {
        let from = self.0.lock().map_or(0.0, |mut energy| energy.start_job(Instant::now()));
        EnergyShare(Arc::new(OpenShare { meter: self.clone(), joules_at_start: from }))
    }
}

/// The energy share of one job, counted while the last clone lives.
#[derive(Debug, Clone)]
pub(crate) struct EnergyShare(Arc<OpenShare>);

#[derive(Debug)]
struct OpenShare {
    meter: EnergyMeter,
    joules_at_start: f64,
}

impl EnergyShare {
    /// Returns the job's energy so far in joules; `None` if the power is not measured.
    pub(crate) fn energy_joules(&self) -> Option<f64> {
        let each = self.0.meter.0.lock().ok()?.read_joules(Instant::now())?;
        Some((each - self.0.joules_at_start).max(0.0))
    }
}

impl Drop for OpenShare {
    fn drop(&mut self) {
        if let Ok(mut energy) = self.meter.0.lock() {
            energy.end_job(Instant::now());
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
        let mut energy = EnergyIntegrator::new(start);
        assert_eq!(energy.read_joules(at(0)), None);
        energy.set_power(at(0), Some(100.0));
        let first = energy.start_job(at(10));
        let second = energy.start_job(at(20));
        energy.set_power(at(30), Some(200.0));
        let second = energy.read_joules(at(40)).unwrap() - second;
        energy.end_job(at(40));
        let first = energy.read_joules(at(50)).unwrap() - first;
        assert_eq!(second, 50.0 * 10.0 + 100.0 * 10.0);
        assert_eq!(first, 100.0 * 10.0 + second + 200.0 * 10.0);
        assert_eq!(
            first + second,
            100.0 * 20.0 + 200.0 * 20.0,
            "what the box took since the first"
        );
    }
}
