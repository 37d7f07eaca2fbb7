//! `flotilla run check --forecast` and `flotilla run explain --forecast`.

use anyhow::Context;
use control::{FleetControl, ForecastComparison, RunReport, SubmitError};
use run_view::{comparison_lines, forecast_lines};
use serde_json::json;
use spec::RunSpec;
use wire::{RunId, v1};

use super::{data, explain};
use crate::{
    args::{CheckArgs, GlobalArgs},
    output,
    run_submission::read_spec,
};

/// Checks a spec. Mistakes in its text are found without the fleet.
pub(super) async fn check_spec(flags: &GlobalArgs, args: &CheckArgs) -> anyhow::Result<()> {
    let (yaml, files) = read_spec(&args.spec).await?;
    let (json, what) = (flags.json, || format!("check {}", args.spec.display()));
    RunSpec::parse_runs(&yaml).map_err(SubmitError::from).with_context(what)?;
    let only_read = || format!("{} was read, its files were not", args.spec.display());
    let control = flags.fleet.connect_control().await.with_context(only_read)?;
    if !args.forecast {
        let report = control.check_spec(&yaml, &files).await.with_context(what)?;
        return output::print_json_or(json, &report, || print_verdict(&report));
    }
    let by = args.by.as_deref().map(control::parse_end_time).transpose().context("--by")?;
    let request = v1::ForecastRequest { by, price_per_kwh: args.price };
    if args.probe {
        let probe = control.probe_spec(&yaml, &files).await.with_context(what)?;
        output::print_message(&format!("measured the fleet in run {probe}"));
    }
    let checked = control.forecast_spec(&yaml, &files, &request).await;
    let (report, forecast) = checked.with_context(what)?;
    output::print_json_or(json, &json!({ "data": report, "forecast": forecast }), || {
        print_verdict(&report);
        forecast_lines(&forecast).iter().for_each(|line| output::print_wrapped(line));
    })
}

fn print_verdict(report: &v1::DataReport) {
    data::verdict_lines(report).iter().for_each(|line| output::print_line(line));
}

/// Prints the report on a run, and the forecast from before its submission beside the facts.
pub(super) async fn print_explained(
    control: &FleetControl,
    (run, story): (&RunId, &RunReport),
    price: Option<f64>,
    json: bool,
) -> anyhow::Result<()> {
    let comparison = control.forecast_submitted_run(run, price).await?;
    if json {
        let mut document = serde_json::to_value(story)?;
        document["forecast"] = serde_json::to_value(&comparison)?;
        return output::print_json(&document);
    }
    explain::print_run_report(story);
    let ForecastComparison { forecast, actual_s, actual_watt_hours, actual_price } = comparison;
    let lines = comparison_lines(&forecast, actual_s, actual_watt_hours, actual_price);
    lines.iter().for_each(|line| output::print_wrapped(line));
    Ok(())
}
