//! How a spec says what becomes of a run whose figures get worse.

use serde::Deserialize;
use wire::v1;

use crate::check::{Checked, count, ensure, within};

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatesSpec {
    pub perplexity: Vec<PerplexitySpec>,
    pub pass_rate: Option<MarginSpec>,
    pub diversity: Option<LeastSpec>,
    /// So many cycles without a better figure end the run; 0: none do.
    pub patience: u32,
}

/// A held-out perplexity above the best by more than a share of it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerplexitySpec {
    /// One of the run's evals. May be left away where there is one.
    pub suite: Option<String>,
    pub margin: f64,
    #[serde(default)]
    pub then: ThenSpec,
}

/// A held-out pass rate below the best by more than this.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MarginSpec {
    pub margin: f64,
    #[serde(default)]
    pub then: ThenSpec,
}

/// Fewer distinct completions a sample than this.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeastSpec {
    pub least: f64,
    #[serde(default = "tell")]
    pub then: ThenSpec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThenSpec {
    Tell,
    #[default]
    RollBack,
    Stop,
}

fn tell() -> ThenSpec {
    ThenSpec::Tell
}

impl From<ThenSpec> for v1::gates::Then {
    fn from(then: ThenSpec) -> Self {
        match then {
            ThenSpec::Tell => Self::Tell,
            ThenSpec::RollBack => Self::RollBack,
            ThenSpec::Stop => Self::Stop,
        }
    }
}

fn gate(suite: &str, margin: f64, then: ThenSpec) -> v1::gates::Gate {
    let then = v1::gates::Then::from(then).into();
    v1::gates::Gate { margin, then, suite: suite.to_owned() }
}

impl GatesSpec {
    /// `suites`: the names of the run's evals.
    pub(crate) fn resolve(&self, suites: &[&str]) -> v1::Gates {
        let first = suites.first().copied().unwrap_or_default();
        let perplexity = |spec: &PerplexitySpec| {
            gate(spec.suite.as_deref().unwrap_or(first), spec.margin, spec.then)
        };
        v1::Gates {
            perplexity: self.perplexity.iter().map(perplexity).collect(),
            pass_rate: self.pass_rate.map(|spec| gate("", spec.margin, spec.then)),
            diversity: self.diversity.map(|spec| gate("", spec.least, spec.then)),
            patience: self.patience,
        }
    }

    pub(crate) fn check(&self, section: &str, suites: &[&str], heldout: bool) -> Checked {
        for (index, spec) in self.perplexity.iter().enumerate() {
            let field = |name: &str| format!("{section}.perplexity[{index}].{name}");
            let known = match &spec.suite {
                Some(name) => suites.contains(&name.as_str()),
                None => suites.len() == 1,
            };
            let remedy = match suites {
                [] => "the run measures no perplexity; give it evals".to_owned(),
                some => format!("name one of the run's evals: {}", some.join(", ")),
            };
            ensure(known, &field("suite"), remedy)?;
            within(&field("margin"), spec.margin, 0.0, 1000.0)?;
        }
        let field = |name: &str| format!("{section}.{name}");
        if let Some(spec) = &self.pass_rate {
            let remedy = "needs prompts that are never trained on; name them in raft.heldout";
            ensure(heldout, &field("pass_rate"), remedy)?;
            within(&field("pass_rate.margin"), spec.margin, 0.0, 1.0)?;
        }
        if let Some(spec) = &self.diversity {
            within(&field("diversity.least"), spec.least, 0.0, 1.0)?;
            let remedy =
                "is tell or stop: it is about what drew the samples, which is there already";
            ensure(spec.then != ThenSpec::RollBack, &field("diversity.then"), remedy)?;
        }
        let measured = heldout || !suites.is_empty();
        let remedy = "needs a figure to get better; name raft.heldout, or evals";
        ensure(measured || self.patience == 0, &field("patience"), remedy)?;
        count(&field("patience"), self.patience, 0, 10_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(yaml: &str) -> GatesSpec {
        serde_saphyr::from_str(yaml).unwrap()
    }

    #[test]
    fn a_gate_rolls_back_unless_it_says_otherwise() {
        let gates = parse("{perplexity: [{margin: 0.1}], pass_rate: {margin: 0.05, then: stop}}");
        assert_eq!(gates.check("g", &["text"], true), Ok(()));
        let gates = gates.resolve(&["text"]);
        assert_eq!(gates.perplexity[0].suite, "text");
        assert_eq!(gates.perplexity[0].then(), v1::gates::Then::RollBack);
        assert_eq!(gates.pass_rate.unwrap().then(), v1::gates::Then::Stop);
    }

    #[test]
    fn a_gate_on_what_is_not_measured_is_refused() {
        let refused = |yaml: &str, suites: &[&str], heldout| {
            parse(yaml).check("g", suites, heldout).unwrap_err().field
        };
        let perplexity = "perplexity: [{margin: 0.1}]";
        assert_eq!(refused(perplexity, &[], true), "g.perplexity[0].suite");
        assert_eq!(refused(perplexity, &["a", "b"], true), "g.perplexity[0].suite");
        assert_eq!(refused("pass_rate: {margin: 0.1}", &["a"], false), "g.pass_rate");
        assert_eq!(refused("patience: 2", &[], false), "g.patience");
        assert_eq!(refused("diversity: {least: 2}", &[], false), "g.diversity.least");
        let back = "diversity: {least: 0.2, then: roll_back}";
        assert_eq!(refused(back, &[], false), "g.diversity.then");
    }
}
