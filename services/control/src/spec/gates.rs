//! How a spec says what becomes of a run whose figures get worse.

use serde::Deserialize;
use wire::v1;

use super::Measured;
use crate::check::{Checked, count, ensure, within};

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatesSpec {
    pub perplexity: Vec<PerplexitySpec>,
    pub pass_rate: Option<PassRatesSpec>,
    pub diversity: Option<LeastSpec>,
    pub entropy: Option<LeastSpec>,
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

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected {suite: NAME, margin: SHARE, then: …}, or a list of them")]
pub enum PassRatesSpec {
    One(PassRateSpec),
    Several(Vec<PassRateSpec>),
}

/// A held-out pass rate below the best by more than this.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassRateSpec {
    /// One of the run's evals that have prompts. Left away: `raft.heldout`, or without that the
    /// only one there is.
    pub suite: Option<String>,
    pub margin: f64,
    #[serde(default)]
    pub then: ThenSpec,
}

/// Fewer distinct completions a sample than this, or fewer nats a token.
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

/// More than the entropy of any vocabulary.
const NATS_MAX: f64 = 20.0;

impl PassRateSpec {
    /// Whose pass rate it is about; the empty name is that of `raft.heldout`. `None`: nobody's.
    fn suite_of<'a>(&'a self, measured: &Measured<'a>) -> Option<&'a str> {
        match (&self.suite, &measured.prompt_suites[..]) {
            (Some(name), all) => all.contains(&name.as_str()).then_some(name),
            (None, _) if measured.heldout => Some(""),
            (None, [only]) => Some(only),
            (None, _) => None,
        }
    }
}

impl GatesSpec {
    pub(crate) fn resolve(&self, measured: &Measured<'_>) -> v1::Gates {
        let first = measured.texts.first().copied().unwrap_or_default();
        let perplexity = |spec: &PerplexitySpec| {
            gate(spec.suite.as_deref().unwrap_or(first), spec.margin, spec.then)
        };
        let rate = |spec: &PassRateSpec| {
            gate(spec.suite_of(measured).unwrap_or_default(), spec.margin, spec.then)
        };
        let (own, of_suites): (Vec<_>, Vec<_>) =
            self.pass_rates().iter().map(rate).partition(|gate| gate.suite.is_empty());
        let mut own = own.into_iter();
        v1::Gates {
            perplexity: self.perplexity.iter().map(perplexity).collect(),
            pass_rate: own.next(),
            pass_rates: own.chain(of_suites).collect(),
            diversity: self.diversity.map(|spec| gate("", spec.least, spec.then)),
            entropy: self.entropy.map(|spec| gate("", spec.least, spec.then)),
            patience: self.patience,
        }
    }

    fn pass_rates(&self) -> &[PassRateSpec] {
        match &self.pass_rate {
            None => &[],
            Some(PassRatesSpec::One(spec)) => std::slice::from_ref(spec),
            Some(PassRatesSpec::Several(specs)) => specs,
        }
    }

    pub(crate) fn check(&self, section: &str, measured: &Measured<'_>) -> Checked {
        let suites = &measured.texts[..];
        for (index, spec) in self.perplexity.iter().enumerate() {
            let field = |name: &str| format!("{section}.perplexity[{index}].{name}");
            let known = match &spec.suite {
                Some(name) => suites.contains(&name.as_str()),
                None => suites.len() == 1,
            };
            let remedy = match suites {
                [] => "the run measures no perplexity; give it evals".to_owned(),
                some => format!("name one of the run's texts: {}", some.join(", ")),
            };
            ensure(known, &field("suite"), remedy)?;
            within(&field("margin"), spec.margin, 0.0, 1000.0)?;
        }
        let field = |name: &str| format!("{section}.{name}");
        for spec in self.pass_rates() {
            let (at, remedy) = match &measured.prompt_suites[..] {
                [] => (
                    "pass_rate",
                    "needs prompts that are never trained on; name them in raft.heldout, or give \
                     the run an eval with prompts"
                        .to_owned(),
                ),
                some => (
                    "pass_rate.suite",
                    format!("name one of the run's evals with prompts: {}", some.join(", ")),
                ),
            };
            ensure(spec.suite_of(measured).is_some(), &field(at), remedy)?;
            within(&field("pass_rate.margin"), spec.margin, 0.0, 1.0)?;
        }
        let least = [("diversity", &self.diversity, 1.0), ("entropy", &self.entropy, NATS_MAX)];
        for (name, spec, most) in least {
            let Some(spec) = spec else { continue };
            within(&field(&format!("{name}.least")), spec.least, 0.0, most)?;
            let remedy =
                "is tell or stop: it is about what drew the samples, which is there already";
            ensure(spec.then != ThenSpec::RollBack, &field(&format!("{name}.then")), remedy)?;
        }
        let improves = measured.heldout || !suites.is_empty();
        let remedy = "needs a figure to get better; name raft.heldout, or a text among evals";
        ensure(improves || self.patience == 0, &field("patience"), remedy)?;
        count(&field("patience"), self.patience, 0, 10_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(yaml: &str) -> GatesSpec {
        serde_saphyr::from_str(yaml).unwrap()
    }

    fn measured<'a>(texts: &[&'a str], prompt_suites: &[&'a str], heldout: bool) -> Measured<'a> {
        Measured { texts: texts.into(), prompt_suites: prompt_suites.into(), heldout }
    }

    #[test]
    fn a_gate_rolls_back_unless_it_says_otherwise() {
        let gates = parse("{perplexity: [{margin: 0.1}], pass_rate: {margin: 0.05, then: stop}}");
        let there = measured(&["text"], &[], true);
        assert_eq!(gates.check("g", &there), Ok(()));
        let gates = gates.resolve(&there);
        assert_eq!(gates.perplexity[0].suite, "text");
        assert_eq!(gates.perplexity[0].then(), v1::gates::Then::RollBack);
        assert_eq!(gates.pass_rate.unwrap().then(), v1::gates::Then::Stop);
        assert_eq!(gates.pass_rates, []);
    }

    #[test]
    fn a_pass_rate_is_a_suite_s_where_one_is_named_or_there_is_no_other() {
        let gates = parse("pass_rate: [{margin: 0.1}, {suite: b, margin: 0.2, then: tell}]");
        let there = measured(&[], &["a", "b"], true);
        assert_eq!(gates.check("g", &there), Ok(()));
        let resolved = gates.resolve(&there);
        assert_eq!(resolved.pass_rate.unwrap().suite, "");
        assert_eq!(resolved.pass_rates.len(), 1);
        assert_eq!((&*resolved.pass_rates[0].suite, resolved.pass_rates[0].margin), ("b", 0.2));
        let one = parse("{pass_rate: {margin: 0.1}, entropy: {least: 0.1}}");
        let there = measured(&[], &["a"], false);
        assert_eq!(one.check("g", &there), Ok(()));
        let resolved = one.resolve(&there);
        assert_eq!((resolved.pass_rate, &*resolved.pass_rates[0].suite), (None, "a"));
        assert_eq!(resolved.entropy.unwrap().then(), v1::gates::Then::Tell);
        let unknown = serde_saphyr::from_str::<GatesSpec>("pass_rate: [{margn: 0.1}]");
        let error = unknown.unwrap_err().to_string();
        assert!(error.contains("suite: NAME, margin"), "{error}");
    }

    #[test]
    fn a_gate_on_what_is_not_measured_is_refused() {
        let refused = |yaml: &str, texts: &[&str], prompts: &[&str], heldout| {
            parse(yaml).check("g", &measured(texts, prompts, heldout)).unwrap_err().field
        };
        let perplexity = "perplexity: [{margin: 0.1}]";
        assert_eq!(refused(perplexity, &[], &["a"], true), "g.perplexity[0].suite");
        assert_eq!(refused(perplexity, &["a", "b"], &[], true), "g.perplexity[0].suite");
        assert_eq!(refused("pass_rate: {margin: 0.1}", &["a"], &[], false), "g.pass_rate");
        let two = ["b", "c"];
        assert_eq!(refused("pass_rate: {margin: 0.1}", &[], &two, false), "g.pass_rate.suite");
        let other = "pass_rate: {suite: a, margin: 0.1}";
        assert_eq!(refused(other, &["a"], &two, true), "g.pass_rate.suite");
        assert_eq!(refused("patience: 2", &[], &["a"], false), "g.patience");
        assert_eq!(refused("diversity: {least: 2}", &[], &[], false), "g.diversity.least");
        let back = "diversity: {least: 0.2, then: roll_back}";
        assert_eq!(refused(back, &[], &[], false), "g.diversity.then");
        assert_eq!(refused("entropy: {least: -1}", &[], &[], false), "g.entropy.least");
    }
}
