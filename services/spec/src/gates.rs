//! The gates of a spec: the action to take when a run's results get worse.

use std::fmt;

use objective::{Objective, Requirement};
use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};
use wire::v1;

use crate::eval_suite::MeasuredSuites;
use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};
use crate::yaml::describe_choice;

/// The actions to take when the results of a run get worse.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GatesSpec {
    /// Gates on the perplexity of texts among the evals.
    pub perplexity: Vec<PerplexitySpec>,
    /// One or several gates on held-out pass rates.
    pub pass_rate: Option<PassRatesSpec>,
    /// A gate on the distinct completions per sample.
    pub diversity: Option<MinimumSpec>,
    /// A gate on the entropy in nats per token.
    pub entropy: Option<MinimumSpec>,
    /// A gate on the share of the training's tokens that the objective drops.
    pub dropped_tokens: Option<MaximumSpec>,
    /// A gate on the divergence from the reference in nats per token.
    pub divergence: Option<MaximumSpec>,
    /// Cycles without improvement after which the run ends. 0: no limit.
    #[schemars(range(min = 0, max = 10_000))]
    pub patience: u32,
}

/// A gate on the perplexity of a suite, relative to the best cycle.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PerplexitySpec {
    /// Name of a text among the evals. May be omitted if there is only one.
    pub suite: Option<String>,
    /// Tolerated increase, as a share of the best perplexity.
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub margin: f64,
    /// The action of the gate.
    #[serde(default)]
    pub then: GateActionSpec,
}

/// One gate on a pass rate, or a list of them.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum PassRatesSpec {
    One(PassRateSpec),
    /// One gate for each of several suites.
    Several(Vec<PassRateSpec>),
}

/// Decides by the shape of the value, so that an error names the field inside it that is wrong.
impl<'de> Deserialize<'de> for PassRatesSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PassRatesVisitor)
    }
}

struct PassRatesVisitor;

impl<'de> Visitor<'de> for PassRatesVisitor {
    type Value = PassRatesSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{suite: NAME, margin: SHARE, then: …}, or a list of them")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        PassRateSpec::deserialize(MapAccessDeserializer::new(map)).map(PassRatesSpec::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(PassRatesSpec::Several)
    }
}

/// A gate on a held-out pass rate, relative to the best cycle.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassRateSpec {
    /// Name of an eval with prompts. Default: `raft.heldout`, or else the only such eval.
    pub suite: Option<String>,
    /// Tolerated decrease of the pass rate.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub margin: f64,
    /// The action of the gate.
    #[serde(default)]
    pub then: GateActionSpec,
}

/// A gate on a least value of diversity or entropy.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MinimumSpec {
    /// Distinct completions per sample, from 0 to 1, or nats per token.
    #[schemars(range(min = 0.0, max = 20.0))]
    pub least: f64,
    /// The action of the gate: `tell` or `stop`.
    #[serde(default = "tell")]
    #[schemars(extend("enum" = ["tell", "stop"]))]
    pub then: GateActionSpec,
}

/// A gate on a largest value of a training.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MaximumSpec {
    /// A share of tokens, from 0 to 1, or nats per token.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub most: f64,
    /// The action of the gate.
    #[serde(default = "tell")]
    pub then: GateActionSpec,
}

/// The action of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GateActionSpec {
    /// Log a warning and continue.
    Tell,
    /// Continue from the best cycle's checkpoint.
    #[default]
    RollBack,
    /// End the run successfully.
    Stop,
}

fn tell() -> GateActionSpec {
    GateActionSpec::Tell
}

impl From<GateActionSpec> for v1::gates::Then {
    fn from(then: GateActionSpec) -> Self {
        match then {
            GateActionSpec::Tell => Self::Tell,
            GateActionSpec::RollBack => Self::RollBack,
            GateActionSpec::Stop => Self::Stop,
        }
    }
}

fn gate_to_proto(suite: &str, margin: f64, then: GateActionSpec) -> v1::gates::Gate {
    let then = v1::gates::Then::from(then).into();
    v1::gates::Gate { margin, then, suite: suite.to_owned() }
}

/// More than the entropy of any vocabulary.
const ENTROPY_NATS_MAX: f64 = 20.0;

/// A model that diverges by more is another model.
const DIVERGENCE_NATS_MAX: f64 = 100.0;

impl PassRateSpec {
    /// The empty name is that of `raft.heldout`. Returns `None` if the suite does not exist or the
    /// choice is ambiguous.
    fn suite_name<'a>(&'a self, measured: &MeasuredSuites<'a>) -> Option<&'a str> {
        match (&self.suite, &measured.prompt_suites[..]) {
            (Some(name), all) => all.contains(&name.as_str()).then_some(name),
            (None, _) if measured.has_heldout => Some(""),
            (None, [only]) => Some(only),
            (None, _) => None,
        }
    }
}

impl GatesSpec {
    /// Converts the section to its form in the `spec` fact. A gate without a suite name gets its
    /// default suite from `measured`.
    pub fn to_proto(&self, measured: &MeasuredSuites<'_>) -> v1::Gates {
        let first = measured.texts.first().copied().unwrap_or_default();
        let perplexity = |spec: &PerplexitySpec| {
            gate_to_proto(spec.suite.as_deref().unwrap_or(first), spec.margin, spec.then)
        };
        let rate = |spec: &PassRateSpec| {
            gate_to_proto(spec.suite_name(measured).unwrap_or_default(), spec.margin, spec.then)
        };
        let (own, of_suites): (Vec<_>, Vec<_>) =
            self.pass_rate_gates().iter().map(rate).partition(|gate| gate.suite.is_empty());
        let mut own = own.into_iter();
        v1::Gates {
            perplexity: self.perplexity.iter().map(perplexity).collect(),
            pass_rate: own.next(),
            pass_rates: own.chain(of_suites).collect(),
            diversity: self.diversity.map(|spec| gate_to_proto("", spec.least, spec.then)),
            entropy: self.entropy.map(|spec| gate_to_proto("", spec.least, spec.then)),
            dropped_tokens: self.dropped_tokens.map(|spec| gate_to_proto("", spec.most, spec.then)),
            divergence: self.divergence.map(|spec| gate_to_proto("", spec.most, spec.then)),
            patience: self.patience,
        }
    }

    /// Checks that the objective measures what the gates limit.
    pub(crate) fn check_objective(&self, section: &str, objective: &Objective) -> FieldResult {
        let needs = objective.requirements();
        let name = objective.name().as_str();
        let measured = [
            (
                "dropped_tokens",
                &self.dropped_tokens,
                Requirement::BehaviourLogprobs,
                "drops no tokens; leave it out, or choose an objective with a ratio, such as grpo",
            ),
            (
                "divergence",
                &self.divergence,
                Requirement::ReferenceLogprobs,
                "has no reference; leave it out, or set the objective's kl",
            ),
        ];
        for (gate, spec, requirement, remedy) in measured {
            let holds = spec.is_none() || needs.contains(&requirement);
            ensure_field(
                holds,
                &format!("{section}.{gate}"),
                format!("objective {name} {remedy}"),
            )?;
        }
        Ok(())
    }

    fn pass_rate_gates(&self) -> &[PassRateSpec] {
        match &self.pass_rate {
            None => &[],
            Some(PassRatesSpec::One(spec)) => std::slice::from_ref(spec),
            Some(PassRatesSpec::Several(specs)) => specs,
        }
    }

    pub(crate) fn check_fields(&self, section: &str, measured: &MeasuredSuites<'_>) -> FieldResult {
        let suites = &measured.texts[..];
        for (index, spec) in self.perplexity.iter().enumerate() {
            let field = |name: &str| format!("{section}.perplexity[{index}].{name}");
            let known = match &spec.suite {
                Some(name) => suites.contains(&name.as_str()),
                None => suites.len() == 1,
            };
            let remedy = match (suites, &spec.suite) {
                ([], _) => "the run measures no perplexity; give it evals".to_owned(),
                (some, None) => format!("name one of the run's texts: {}", some.join(", ")),
                (some, Some(name)) => describe_choice(name, some),
            };
            ensure_field(known, &field("suite"), remedy)?;
            check_range(&field("margin"), spec.margin, 0.0, 1000.0)?;
        }
        let field = |name: &str| format!("{section}.{name}");
        for spec in self.pass_rate_gates() {
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
            ensure_field(spec.suite_name(measured).is_some(), &field(at), remedy)?;
            check_range(&field("pass_rate.margin"), spec.margin, 0.0, 1.0)?;
        }
        let least =
            [("diversity", &self.diversity, 1.0), ("entropy", &self.entropy, ENTROPY_NATS_MAX)];
        for (name, spec, most) in least {
            let Some(spec) = spec else { continue };
            check_range(&field(&format!("{name}.least")), spec.least, 0.0, most)?;
            let remedy =
                "is tell or stop: it is about what drew the samples, which is there already";
            ensure_field(
                spec.then != GateActionSpec::RollBack,
                &field(&format!("{name}.then")),
                remedy,
            )?;
        }
        let most = [
            ("dropped_tokens", &self.dropped_tokens, 1.0),
            ("divergence", &self.divergence, DIVERGENCE_NATS_MAX),
        ];
        for (name, spec, limit) in most {
            let Some(spec) = spec else { continue };
            check_range(&field(&format!("{name}.most")), spec.most, 0.0, limit)?;
        }
        let improves = measured.has_heldout || !suites.is_empty();
        let remedy = "needs a metric that can improve; name raft.heldout, or a text among evals";
        ensure_field(improves || self.patience == 0, &field("patience"), remedy)?;
        check_count(&field("patience"), self.patience, 0, 10_000)
    }
}

#[cfg(test)]
mod tests {
    use objective::ObjectiveName;

    use super::*;
    use crate::parse_yaml;

    fn parse(yaml: &str) -> GatesSpec {
        serde_saphyr::from_str(yaml).unwrap()
    }

    fn measured<'a>(
        texts: &[&'a str],
        prompt_suites: &[&'a str],
        heldout: bool,
    ) -> MeasuredSuites<'a> {
        MeasuredSuites {
            texts: texts.into(),
            prompt_suites: prompt_suites.into(),
            has_heldout: heldout,
        }
    }

    #[test]
    fn a_gate_rolls_back_unless_it_says_otherwise() {
        let gates = parse("{perplexity: [{margin: 0.1}], pass_rate: {margin: 0.05, then: stop}}");
        let there = measured(&["text"], &[], true);
        assert_eq!(gates.check_fields("g", &there), Ok(()));
        let gates = gates.to_proto(&there);
        assert_eq!(gates.perplexity[0].suite, "text");
        assert_eq!(gates.perplexity[0].then(), v1::gates::Then::RollBack);
        assert_eq!(gates.pass_rate.unwrap().then(), v1::gates::Then::Stop);
        assert_eq!(gates.pass_rates, []);
    }

    #[test]
    fn a_pass_rate_is_a_suite_s_where_one_is_named_or_there_is_no_other() {
        let gates = parse("pass_rate: [{margin: 0.1}, {suite: b, margin: 0.2, then: tell}]");
        let there = measured(&[], &["a", "b"], true);
        assert_eq!(gates.check_fields("g", &there), Ok(()));
        let resolved = gates.to_proto(&there);
        assert_eq!(resolved.pass_rate.unwrap().suite, "");
        assert_eq!(resolved.pass_rates.len(), 1);
        assert_eq!((&*resolved.pass_rates[0].suite, resolved.pass_rates[0].margin), ("b", 0.2));
        let one = parse("{pass_rate: {margin: 0.1}, entropy: {least: 0.1}}");
        let there = measured(&[], &["a"], false);
        assert_eq!(one.check_fields("g", &there), Ok(()));
        let resolved = one.to_proto(&there);
        assert_eq!((resolved.pass_rate, &*resolved.pass_rates[0].suite), (None, "a"));
        assert_eq!(resolved.entropy.unwrap().then(), v1::gates::Then::Tell);
        let unknown = serde_saphyr::from_str::<GatesSpec>("pass_rate: [{margn: 0.1}]");
        let error = unknown.unwrap_err().to_string();
        assert!(error.contains("margn") && error.contains("suite, margin"), "{error}");
    }

    #[test]
    fn a_wrong_field_of_a_pass_rate_is_named_and_not_the_whole_gate() {
        let refused = |yaml: &str| parse_yaml::<GatesSpec>(yaml).unwrap_err().to_string();
        let allowed =
            "then: must be one of tell, roll_back, stop, not rollback; did you mean roll_back?";
        for (yaml, said) in [
            ("pass_rate: {margin: 0.1, then: rollback}", allowed),
            ("pass_rate: [{margin: 0.1, then: rollback}]", allowed),
            ("pass_rate: [{margn: 0.1}]", "did you mean margin?"),
            ("pass_rate: 0.1", "or a list of them"),
        ] {
            let error = refused(yaml);
            assert!(error.contains(said), "{yaml}: {error}");
        }
    }

    #[test]
    fn a_gate_on_what_is_not_measured_is_refused() {
        let refused = |yaml: &str, texts: &[&str], prompts: &[&str], heldout| {
            parse(yaml).check_fields("g", &measured(texts, prompts, heldout)).unwrap_err().field
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
        assert_eq!(refused("divergence: {most: -1}", &[], &[], false), "g.divergence.most");
        assert_eq!(refused("dropped_tokens: {most: 2}", &[], &[], false), "g.dropped_tokens.most");
    }

    #[test]
    fn gates_on_training_need_an_objective_that_measures_it() {
        let gates = parse("{dropped_tokens: {most: 0.2}, divergence: {most: 0.1}}");
        let check = |name, kl| {
            let mut objective = Objective::new(name);
            objective.set("kl", kl).unwrap();
            gates.check_objective("g", &objective)
        };
        assert_eq!(check(ObjectiveName::Grpo, 0.01), Ok(()));
        assert_eq!(check(ObjectiveName::Grpo, 0.0).unwrap_err().field, "g.divergence");
        assert_eq!(check(ObjectiveName::Raft, 0.01).unwrap_err().field, "g.dropped_tokens");
        let then = gates.to_proto(&measured(&[], &[], true)).divergence.unwrap().then();
        assert_eq!(then, v1::gates::Then::Tell);
    }
}
