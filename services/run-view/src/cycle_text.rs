//! The results of cycles as lines of text.

use wire::v1;

/// Returns lines about what has no table column: pass@k rates, suites and gate findings.
pub fn cycle_findings(done: &v1::CycleDone) -> Vec<String> {
    let cycle = done.cycle;
    let mut lines = Vec::new();
    if !done.pass_at.is_empty() {
        lines.push(format!("cycle {cycle}: {}", pass_at_text(&done.pass_at)));
    }
    for suite in &done.suites {
        let at = if suite.pass_at.is_empty() { "" } else { ", " };
        let (name, rate) = (&suite.suite, rate_text(suite.rate.as_ref()));
        lines.push(format!("cycle {cycle}: {name} {rate}{at}{}", pass_at_text(&suite.pass_at)));
    }
    if done.sampled > 0 && done.kept == 0 {
        lines.push(format!("cycle {cycle}: no sample was kept, so nothing was trained"));
    }
    for finding in &done.findings {
        let v1::cycle_done::Finding { gate, value, limit, .. } = finding;
        let then = match finding.then() {
            v1::gates::Then::RollBack => format!("rolled back to cycle {}", done.best),
            v1::gates::Then::Stop => format!("the run ends; cycle {} was the best", done.best),
            v1::gates::Then::Tell | v1::gates::Then::Unspecified => "the run continues".into(),
        };
        lines.push(match gate.as_str() {
            "patience" => format!("cycle {cycle}: {value} cycles without improvement; {then}"),
            _ => format!("cycle {cycle}: {gate} {value:.4} exceeds limit {limit:.4}; {then}"),
        });
    }
    lines
}

fn pass_at_text(all: &[v1::cycle_done::PassAt]) -> String {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let each = all.iter().map(|at| {
        let [mean, low, high] = [at.mean, at.low, at.high].map(percent);
        format!("pass@{} {mean} % ({low} to {high})", at.k)
    });
    each.collect::<Vec<String>>().join(", ")
}

/// Returns a pass rate in percent with its standard error, or `-`.
pub fn rate_text(rate: Option<&v1::cycle_done::Rate>) -> String {
    rate.map_or("-".into(), |rate| {
        format!("{:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    })
}

/// Returns a line with the energy per kept sample in joules; `None` if no agent could measure it.
pub fn energy_line(done: &v1::CycleDone) -> Option<String> {
    let v1::CycleDone { cycle, sampled, kept, joules, metered, .. } = *done;
    if metered == 0 || kept == 0 {
        return None;
    }
    let each = joules / f64::from(metered) * f64::from(sampled) / f64::from(kept);
    let of = if metered < sampled {
        format!(", measured on {metered} of {sampled} samples")
    } else {
        String::new()
    };
    Some(format!("cycle {cycle}: {each:.1} J per kept sample{of}"))
}

/// Returns the weights that an objective gave to tokens, in words.
pub fn weighting_text(found: &v1::checkpoint::Weighting) -> String {
    let mut text = format!("{:.1} % of tokens dropped", 100.0 * found.dropped_share());
    if let (Some(ratio), Some(drift)) = (found.ratio, found.drift) {
        text.push_str(&format!(", mean ratio {ratio:.3}, drift {drift:.4} nats per token"));
    }
    if let Some(divergence) = found.divergence {
        text.push_str(&format!(", {divergence:.4} nats per token from the reference"));
    }
    if found.clipped > 0 {
        text.push_str(&format!(", {} weights cut to the largest", found.clipped));
    }
    text
}

/// Returns what a cycle kept of its samples, and how much they differ. Objectives other than RAFT
/// keep samples of any reward. A trial drew none.
pub fn selection_text(selected: &v1::Selected, training: Option<&v1::Training>) -> String {
    let v1::Selected { kept, considered, min_reward, diversity, entropy, .. } = selected;
    let diversity = match *diversity {
        0.0 => String::new(),
        share => {
            format!("; {:.0} % of a prompt's samples differ from each other", share * 100.0)
        }
    };
    let entropy = entropy.map_or(String::new(), |nats| {
        format!("; entropy {nats:.3} nats per token (lower: surer of the next token)")
    });
    let dropped: Vec<String> =
        selected.dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let dropped = match dropped.len() {
        0 => String::new(),
        _ => format!("; {}", dropped.join(", ")),
    };
    let why = match training.and_then(|training| training.objective.as_ref()) {
        Some(objective) => format!("for {}", objective.name),
        None => format!("that reached {min_reward}"),
    };
    format!("{kept} of {considered} {why}{dropped}{diversity}{entropy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_much_samples_differ_is_said_in_words() {
        let selected = v1::Selected {
            kept: 3,
            considered: 8,
            min_reward: 0.5,
            diversity: 0.14,
            entropy: Some(0.1586),
            dropped: [("failed".to_owned(), 5)].into(),
            ..v1::Selected::default()
        };
        let said = selection_text(&selected, None);
        assert_eq!(
            said,
            "3 of 8 that reached 0.5; 5 failed; 14 % of a prompt's samples differ from each other; \
             entropy 0.159 nats per token (lower: surer of the next token)"
        );
    }

    #[test]
    fn a_kept_sample_s_energy_is_that_of_all_that_were_drawn_for_it() {
        let done = v1::CycleDone {
            cycle: 1,
            sampled: 64,
            kept: 16,
            joules: 320.0,
            metered: 64,
            ..v1::CycleDone::default()
        };
        assert_eq!(energy_line(&done).unwrap(), "cycle 1: 20.0 J per kept sample");
        let some = v1::CycleDone { joules: 160.0, metered: 32, ..done.clone() };
        let said = energy_line(&some).unwrap();
        assert_eq!(said, "cycle 1: 20.0 J per kept sample, measured on 32 of 64 samples");
        assert_eq!(energy_line(&v1::CycleDone { metered: 0, ..done.clone() }), None);
        assert_eq!(energy_line(&v1::CycleDone { kept: 0, ..done }), None);
    }
}
