//! The duration of a phase as a function of its work: a constant and a rate, by Bayesian linear
//! regression on the durations of earlier phases.

use std::f64::consts::TAU;

/// Assumed relative deviation of one phase from its model, before any phase is observed.
const NOISE_PRIOR: f64 = 0.06;
/// The weight of [`NOISE_PRIOR`], as a number of observed phases.
const NOISE_PRIOR_PHASES: f64 = 4.0;

/// Relative change of durations from one run to the next, which the facts of one run cannot show:
/// other temperatures, other guests on the box. The facts and the forecast run each differ by it.
const RUN_DRIFT: f64 = 0.06;

/// Rounds in which the noise and the coefficients are estimated from each other.
const FIT_ROUNDS: usize = 4;

/// Shortest duration whose relative error is meaningful, in seconds.
const SECONDS_MIN: f64 = 0.05;

/// A rate is drawn at least as high as this share of its mean.
const RATE_SHARE_MIN: f64 = 0.1;

/// A number that is not known exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UncertainValue {
    pub(crate) mean: f64,
    pub(crate) deviation: f64,
}

/// The work and the duration of one phase.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PhaseObservation {
    pub(crate) work: f64,
    pub(crate) seconds: f64,
    /// Seconds by which the phase may deviate from the model besides its noise.
    pub(crate) deviation_s: f64,
}

impl PhaseObservation {
    pub(crate) fn new(work: f64, seconds: f64) -> Self {
        Self { work, seconds, deviation_s: 0.0 }
    }
}

/// The seconds of a phase: a constant, plus a number of seconds for each unit of its work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DurationModel {
    constant: f64,
    per_unit: f64,
    /// The lower triangle of the Cholesky root of their covariance.
    root: [f64; 3],
    /// Relative deviation of a single phase.
    noise: f64,
}

/// A model whose coefficients are drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrawnDuration {
    constant: f64,
    per_unit: f64,
    noise: f64,
}

impl DurationModel {
    /// Fits the model to observed phases. Without any it is the prior.
    pub(crate) fn fit(
        constant: UncertainValue,
        per_unit: UncertainValue,
        observed: &[PhaseObservation],
    ) -> Self {
        let precision = |value: UncertainValue| value.deviation.max(1e-9).powi(-2);
        let (of_constant, of_unit) = (precision(constant), precision(per_unit));
        let mut model = Self {
            constant: constant.mean,
            per_unit: per_unit.mean,
            root: [constant.deviation, 0.0, per_unit.deviation],
            noise: NOISE_PRIOR,
        };
        for _ in 0..FIT_ROUNDS {
            let mut information = [of_constant, 0.0, of_unit];
            let mut weighted = [of_constant * constant.mean, of_unit * per_unit.mean];
            for PhaseObservation { work, seconds, deviation_s } in observed {
                let noise_s = model.noise * seconds.max(SECONDS_MIN);
                let weight = noise_s.hypot(*deviation_s).powi(-2);
                information[0] += weight;
                information[1] += weight * work;
                information[2] += weight * work * work;
                weighted[0] += weight * seconds;
                weighted[1] += weight * work * seconds;
            }
            let [a, b, c] = information;
            let determinant = a * c - b * b;
            let covariance = [c / determinant, -b / determinant, a / determinant];
            model.constant = covariance[0] * weighted[0] + covariance[1] * weighted[1];
            model.per_unit = covariance[1] * weighted[0] + covariance[2] * weighted[1];
            model.root = cholesky_root(covariance);
            model.noise = model.residual_deviation(observed);
        }
        model
    }

    fn residual_deviation(&self, observed: &[PhaseObservation]) -> f64 {
        let squares = observed.iter().map(|phase| {
            let expected = self.constant + self.per_unit * phase.work;
            let excess = (phase.seconds - expected).abs() - phase.deviation_s;
            (excess.max(0.0) / phase.seconds.max(SECONDS_MIN)).powi(2)
        });
        let count = observed.len() as f64;
        let sum = squares.sum::<f64>() + NOISE_PRIOR_PHASES * NOISE_PRIOR.powi(2);
        (sum / (NOISE_PRIOR_PHASES + count)).sqrt()
    }

    /// Draws the coefficients, once for a run.
    pub(crate) fn draw_coefficients(&self, random: &mut fastrand::Rng) -> DrawnDuration {
        let (first, second) = (draw_normal(random), draw_normal(random));
        let [down, across, rest] = self.root;
        let rate = self.per_unit + across * first + rest * second;
        let drift = draw_factor(RUN_DRIFT, random);
        DrawnDuration {
            constant: drift * (self.constant + down * first).max(0.0),
            per_unit: drift * rate.max(RATE_SHARE_MIN * self.per_unit).max(0.0),
            noise: self.noise,
        }
    }
}

impl DrawnDuration {
    /// Draws the seconds of one phase.
    pub(crate) fn draw_seconds(&self, work: f64, random: &mut fastrand::Rng) -> f64 {
        (self.constant + self.per_unit * work) * draw_factor(self.noise, random)
    }
}

/// Returns the lower triangle L of the symmetric matrix L Lᵀ.
fn cholesky_root([a, b, c]: [f64; 3]) -> [f64; 3] {
    let first = a.max(0.0).sqrt();
    let across = if first > 0.0 { b / first } else { 0.0 };
    [first, across, (c - across * across).max(0.0).sqrt()]
}

/// Draws a lognormal factor of median 1.
pub(crate) fn draw_factor(deviation: f64, random: &mut fastrand::Rng) -> f64 {
    (deviation * draw_normal(random)).exp()
}

/// Draws from the standard normal distribution (Box and Muller).
fn draw_normal(random: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    radius * (TAU * random.f64()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABOUT_ONE: UncertainValue = UncertainValue { mean: 1.0, deviation: 0.5 };

    fn observe(work: f64, seconds: f64) -> PhaseObservation {
        PhaseObservation::new(work, seconds)
    }

    #[test]
    fn phases_of_two_sizes_tell_the_constant_from_the_rate() {
        let constant = UncertainValue { mean: 2.0, deviation: 5.0 };
        let observed = [(10.0, 13.0), (40.0, 28.0), (10.0, 13.0), (40.0, 28.0)];
        let observed = observed.map(|(work, seconds)| observe(work, seconds));
        let model = DurationModel::fit(constant, ABOUT_ONE, &observed);
        assert!((model.constant - 8.0).abs() < 0.5, "{model:?}");
        assert!((model.per_unit - 0.5).abs() < 0.05, "{model:?}");
    }

    #[test]
    fn a_rate_is_less_certain_far_from_what_was_observed() {
        let constant = UncertainValue { mean: 1.0, deviation: 1.0 };
        let model = DurationModel::fit(constant, ABOUT_ONE, &[observe(10.0, 11.0); 3]);
        let spread = |work: f64| {
            let mut random = fastrand::Rng::with_seed(1);
            let mut drawn: Vec<f64> = (0..2000)
                .map(|_| {
                    let coefficients = model.draw_coefficients(&mut random);
                    coefficients.constant + coefficients.per_unit * work
                })
                .collect();
            drawn.sort_by(f64::total_cmp);
            (drawn[1900] - drawn[100]) / drawn[1000]
        };
        assert!(spread(100.0) > 1.5 * spread(10.0), "{} and {}", spread(100.0), spread(10.0));
    }

    #[test]
    fn without_observations_the_prior_remains() {
        let constant = UncertainValue { mean: 3.0, deviation: 0.5 };
        let model = DurationModel::fit(constant, ABOUT_ONE, &[]);
        assert!((model.constant - 3.0).abs() < 1e-9 && (model.per_unit - 1.0).abs() < 1e-9);
        assert!((model.root[0] - 0.5).abs() < 1e-9 && (model.root[2] - 0.5).abs() < 1e-9);
    }
}
