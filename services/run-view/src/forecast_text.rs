//! Forecasts of runs as text.

use wire::v1::{self, forecast::Range};

use crate::end_text::duration_text;

/// Returns a forecast as lines for people.
pub fn forecast_lines(forecast: &v1::Forecast) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(seconds) = &forecast.seconds {
        let phases = [
            ("sampling", forecast.sampling_s),
            ("training", forecast.training_s),
            ("evaluation", forecast.evaluation_s),
        ];
        let phases = phases.iter().filter(|(_, seconds)| *seconds > 0.0);
        let phases = phases.map(|(name, seconds)| format!("{name} {}", time_text(*seconds)));
        let phases: Vec<String> = phases.collect();
        lines.push(format!("takes {}: {}", range_text(seconds, time_text), phases.join(", ")));
    }
    if let Some(share) = forecast.probability {
        lines.push(format!("ends in time with a probability of {:.0} %", share * 100.0));
    }
    match &forecast.watt_hours {
        Some(energy) => lines.push(format!("energy {}", range_text(energy, energy_text))),
        None => lines.push("energy unknown: no box measures its power".to_owned()),
    }
    let amount = |value| format!("{value:.2}");
    lines.extend(forecast.price.as_ref().map(|it| format!("price {}", range_text(it, amount))));
    lines.extend(forecast.memory.iter().map(memory_line));
    if !forecast.runs.is_empty() {
        lines.push(format!("measured in {}", forecast.runs.join(", ")));
    }
    lines.extend(forecast.assumed.iter().map(|text| format!("assumed: {text}")));
    lines
}

/// Returns the forecast of a submitted run as lines of a report, with the actual duration, energy
/// and price beside it, as far as they are known.
pub fn comparison_lines(
    forecast: &v1::Forecast,
    actual_s: Option<f64>,
    actual_watt_hours: Option<f64>,
    actual_price: Option<f64>,
) -> Vec<String> {
    let actual = compare_figures(forecast, actual_s, actual_watt_hours, actual_price);
    let lines = forecast_lines(forecast).into_iter().chain(actual);
    let heading = ["", "forecast from the log before the submission"].map(str::to_owned);
    heading.into_iter().chain(lines.map(|line| format!("  {line}"))).collect()
}

fn compare_figures(
    forecast: &v1::Forecast,
    actual_s: Option<f64>,
    actual_watt_hours: Option<f64>,
    actual_price: Option<f64>,
) -> Vec<String> {
    let v1::Forecast { seconds, watt_hours, price, .. } = forecast;
    let took = actual_s.map(|it| compare_figure("took", &time_text(it), it, seconds.as_ref()));
    let needed = actual_watt_hours
        .map(|it| compare_figure("needed", &energy_text(it), it, watt_hours.as_ref()));
    let cost =
        actual_price.map(|it| compare_figure("cost", &format!("{it:.2}"), it, price.as_ref()));
    [took, needed, cost].into_iter().flatten().collect()
}

/// Returns a line with an actual figure, and with its place in the range that was forecast.
fn compare_figure(verb: &str, text: &str, actual: f64, range: Option<&Range>) -> String {
    let Some(range) = range.filter(|range| range.median > 0.0) else {
        return format!("{verb} {text}");
    };
    let is_within = (range.low..=range.high).contains(&actual);
    let place = if is_within { "within" } else { "outside" };
    let error = 100.0 * (actual / range.median - 1.0);
    format!("{verb} {text}: {error:+.0} % of the median, {place} the interval")
}

/// Returns the time that a run will still take with its 90 % interval: `about 25 min left [15,
/// 40]`.
pub fn remaining_text(left: &Range) -> String {
    let (unit, seconds, decimals) = match left.median {
        ..100.0 => ("s", 1.0, 0),
        ..6000.0 => ("min", 60.0, 0),
        _ => ("h", 3600.0, 1),
    };
    let [low, median, high] =
        [left.low, left.median, left.high].map(|it| format!("{:.decimals$}", it / seconds));
    format!("about {median} {unit} left [{low}, {high}]")
}

/// Formats a duration, with a decimal for a few minutes.
fn time_text(seconds: f64) -> String {
    match seconds {
        100.0..600.0 => format!("{:.1} min", seconds / 60.0),
        _ => duration_text(seconds),
    }
}

fn range_text(range: &Range, format: impl Fn(f64) -> String) -> String {
    let [low, median, high] = [range.low, range.median, range.high].map(format);
    format!("{median} (90 % interval {low} to {high})")
}

fn energy_text(watt_hours: f64) -> String {
    match watt_hours {
        ..10.0 => format!("{watt_hours:.2} Wh"),
        ..10_000.0 => format!("{watt_hours:.0} Wh"),
        _ => format!("{:.1} kWh", watt_hours / 1000.0),
    }
}

fn memory_line(memory: &v1::forecast::Memory) -> String {
    let gigabytes = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let needed = gigabytes(memory.needed_bytes);
    if memory.used_bytes > 0 {
        let (agent, used) = (&memory.agent, gigabytes(memory.used_bytes));
        let more = 100.0 * (memory.used_bytes as f64 / memory.needed_bytes.max(1) as f64 - 1.0);
        return match memory.needed_bytes {
            0 => format!("training took {used} at its peak on {agent}"),
            _ => format!(
                "training needs at least {needed} at its peak; it took {used} on {agent}: {more:+.0} %"
            ),
        };
    }
    let available = match memory.available_bytes {
        0 => "an unknown amount of memory".to_owned(),
        bytes if bytes < memory.needed_bytes => format!("NOT enough: {}", gigabytes(bytes)),
        bytes => gigabytes(bytes),
    };
    format!("training needs at least {needed} at its peak; {} has {available}", memory.agent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_is_left_has_one_unit() {
        let text = |low, median, high| remaining_text(&Range { low, median, high });
        assert_eq!(text(900.0, 1500.0, 2400.0), "about 25 min left [15, 40]");
        assert_eq!(text(20.4, 42.0, 130.0), "about 42 s left [20, 130]");
        assert_eq!(text(5400.0, 9000.0, 18_000.0), "about 2.5 h left [1.5, 5.0]");
    }

    #[test]
    fn a_forecast_names_its_interval_and_its_assumptions() {
        let range = |low, median, high| Some(Range { low, median, high });
        let memory = v1::forecast::Memory {
            agent: "mi50".into(),
            needed_bytes: 4_000_000_000,
            available_bytes: 2_000_000_000,
            used_bytes: 0,
        };
        let used = v1::forecast::Memory { used_bytes: 5_000_000_000, ..memory.clone() };
        let took = "training needs at least 4.0 GB at its peak; it took 5.0 GB on mi50: +25 %";
        assert_eq!(memory_line(&used), took);
        let unknown = v1::forecast::Memory { needed_bytes: 0, ..used };
        assert_eq!(memory_line(&unknown), "training took 5.0 GB at its peak on mi50");
        let forecast = v1::Forecast {
            seconds: range(3000.0, 3600.0, 4500.0),
            watt_hours: range(100.0, 200.0, 300.0),
            price: range(0.03, 0.06, 0.09),
            probability: Some(0.954),
            sampling_s: 3000.0,
            training_s: 150.0,
            memory: vec![memory],
            assumed: vec!["20 s to measure a text".into()],
            runs: vec!["raft-1".into()],
            ..v1::Forecast::default()
        };
        let lines = forecast_lines(&forecast);
        let expected = [
            "takes 60 min (90 % interval 50 min to 75 min): sampling 50 min, training 2.5 min",
            "ends in time with a probability of 95 %",
            "energy 200 Wh (90 % interval 100 Wh to 300 Wh)",
            "price 0.06 (90 % interval 0.03 to 0.09)",
            "training needs at least 4.0 GB at its peak; mi50 has NOT enough: 2.0 GB",
            "measured in raft-1",
            "assumed: 20 s to measure a text",
        ];
        assert_eq!(lines, expected);
        assert!(compare_figures(&forecast, None, None, None).is_empty());
        let late = compare_figures(&forecast, Some(5400.0), Some(220.0), Some(0.066));
        let expected = [
            "took 90 min: +50 % of the median, outside the interval",
            "needed 220 Wh: +10 % of the median, within the interval",
            "cost 0.07: +10 % of the median, within the interval",
        ];
        assert_eq!(late, expected);
        let report = comparison_lines(&forecast, Some(5400.0), None, None);
        assert_eq!(report[..2], ["", "forecast from the log before the submission"]);
        assert_eq!(report.last().unwrap(), &format!("  {}", expected[0]));
        assert_eq!(report.len(), lines.len() + 3);
        let unmeasured = v1::Forecast { watt_hours: None, price: None, ..forecast };
        let late = compare_figures(&unmeasured, Some(3600.0), Some(220.0), None);
        let expected = ["took 60 min: +0 % of the median, within the interval", "needed 220 Wh"];
        assert_eq!(late, expected);
    }
}
