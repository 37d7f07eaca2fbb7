//! `flotilla doctor`: problems of this box, or of a captured one.

mod burn_in;
mod estimate;
mod speed;
mod training_plan;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use doctor::{DoctorFinding, Severity};
use hardware::{
    HardwareProfile, capture_file,
    host_files::{LiveFiles, RecordingFiles},
    host_snapshot::HostSnapshot,
};
use remedies::FixOptions;
use serde_json::json;

use self::training_plan::SettingsFile;
pub(super) use self::{burn_in::burn_in_box, estimate::read_model_shape};

use crate::{
    args::{DoctorArgs, DoctorCommand, ROLE_NAMES},
    exit_codes,
    fleet::FleetArgs,
    local_models, output,
    python_runner::check_interpreter,
};

pub(crate) async fn run_doctor(
    fleet: &FleetArgs,
    args: &DoctorArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match &args.command {
        Some(DoctorCommand::Estimate(args)) => {
            let model = local_models::find_model_config(&args.model).await?;
            estimate::run_estimate(args, &model, json)?;
        }
        Some(DoctorCommand::BurnIn { burn_in, stacks }) => {
            let in_use = stacks.current_stack()?.map(|stack| stack.programs).unwrap_or_default();
            return Ok(exit_codes::findings_code(!burn_in_box(burn_in, in_use, json).await?));
        }
        Some(DoctorCommand::Speed(args)) => speed::measure_speed(args, json).await?,
        Some(DoctorCommand::Profile { name }) => print_profile(name.as_deref())?,
        None if args.fix || args.undo => {
            let python = args.python.as_deref().map(check_interpreter).transpose()?;
            let options = FixOptions { profile: args.profile.clone(), python, yes: args.yes };
            if args.fix { remedies::fix_box(&options)? } else { remedies::undo_box(&options)? }
        }
        None => {
            let model = match &args.model {
                Some(model) => Some(local_models::find_model_config(model).await?),
                None => None,
            };
            let settings = args.run.as_deref().map(SettingsFile::read).transpose()?;
            if let Some(settings) = &settings {
                training_plan::require_base(settings, fleet).await?;
            }
            return check_box(args, settings.as_ref().zip(Some(model.as_deref())), json);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check_box(
    args: &DoctorArgs,
    training: Option<(&SettingsFile, Option<&Path>)>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let seen = take_snapshot(args)?;
    let profile = match args.profile.as_deref() {
        Some(name) => HardwareProfile::load_named(name)?,
        None => HardwareProfile::for_host(&seen)?,
    };
    let mut findings = doctor::check_host(&seen, &profile);
    if let Some(role) = &args.role {
        findings = doctor::filter_by_role(findings, role);
    }
    let mut planned = None;
    if let Some((settings, model)) = training {
        let plan = training_plan::read_plan((settings, model), args, &seen, &profile)?;
        planned = Some(plan.describe_plan(&settings.path));
        findings.extend(doctor::check_plan(&seen, &profile, &plan));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    }
    if json {
        let roles: serde_json::Map<_, _> = ROLE_NAMES
            .iter()
            .map(|role| ((*role).to_owned(), json!(blocking_findings(&seen, role))))
            .collect();
        output::print_json(&json!({
            "profile": profile.name, "findings": findings, "withheld_by": roles, "snapshot": seen,
            "training": planned,
        }))?;
    } else {
        print_box(&seen, &profile);
        planned.iter().for_each(|line| output::print_line(line));
        print_findings(&seen, &findings);
    }
    let failed = doctor::worst_severity(&findings) == Some(Severity::Fail);
    Ok(exit_codes::findings_code(failed))
}

fn print_profile(name: Option<&str>) -> anyhow::Result<()> {
    let own = match name {
        Some(name) => name.to_owned(),
        None => HardwareProfile::choose_profile(None)?.name,
    };
    output::print_text(HardwareProfile::built_in_text(&own)?.trim_end());
    Ok(())
}

fn take_snapshot(args: &DoctorArgs) -> anyhow::Result<HostSnapshot> {
    if let Some(path) = &args.from {
        return read_captured_box(path);
    }
    let live = live_files(args.python.as_deref())?;
    let recording = RecordingFiles::new(&live);
    let mut seen = HostSnapshot::take_snapshot(&recording);
    if let Some(path) = &args.capture {
        capture_file::write_capture(&recording.into_capture(), path)
            .with_context(|| format!("write {}", path.display()))?;
        output::print_message(&format!("captured to {}", path.display()));
    }
    if let (Some(python), Some(interpreter)) = (&mut seen.python, &args.python) {
        python.interpreter.clone_from(interpreter);
    }
    Ok(seen)
}

fn read_captured_box(path: &Path) -> anyhow::Result<HostSnapshot> {
    let named = || format!("read {}", path.display());
    control::require_named_file(path).with_context(named)?;
    Ok(HostSnapshot::take_snapshot(&capture_file::read_capture(path).with_context(named)?))
}

fn live_files(python: Option<&Path>) -> anyhow::Result<LiveFiles> {
    let mut live = LiveFiles::new("/");
    if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
        live = live.with_home(&home).with_data(&home.join(".flotilla"));
    }
    if let Some(python) = python {
        live = live.with_python(&check_interpreter(python)?);
    }
    Ok(live)
}

fn print_findings(seen: &HostSnapshot, findings: &[DoctorFinding]) {
    for DoctorFinding { id, severity, seen, why, remedy, source } in findings {
        output::print_line("");
        output::print_line(&format!("{} {id}: {seen}", severity_word(*severity)));
        output::print_line(&format!("     why: {why}"));
        output::print_line(&format!("  remedy: {remedy}"));
        output::print_line(&format!("  source: {source}"));
    }
    let roles = ROLE_NAMES.map(|role| match blocking_findings(seen, role).as_slice() {
        [] => format!("{role} yes"),
        ids => format!("{role} NO ({})", ids.join(", ")),
    });
    let count = |severity| findings.iter().filter(|one| one.severity == severity).count();
    let counts = [Severity::Fail, Severity::Warn, Severity::Info]
        .map(|severity| format!("{} {}", count(severity), severity_word(severity)));
    output::print_line("");
    output::print_line(&format!("{}: {}", counts.join(", "), roles.join(", ")));
}

fn print_box(seen: &HostSnapshot, profile: &HardwareProfile) {
    output::print_line(&format!("{}: {}", profile.name, profile.summary));
    let kernel = &seen.kernel;
    output::print_line(&format!("{}, kernel {}", kernel.distribution, kernel.release));
    output::print_line(&format!(
        "{}, {} cores, {} of memory",
        seen.cpu.model,
        seen.cpu.logical,
        output::format_bytes(seen.memory.total)
    ));
    for gpu in &seen.gpus {
        let memory = if gpu.unified_memory { gpu.gtt_total } else { gpu.vram_total };
        output::print_line(&format!(
            "{} at {}, HIP device {}, {}{}",
            gpu.gfx,
            gpu.pci,
            gpu.ordinal,
            output::format_bytes(memory),
            if gpu.suspended { ", asleep" } else { "" }
        ));
    }
    for (directory, version) in &seen.rocm {
        output::print_line(&format!("ROCm {version} in {directory}"));
    }
    if let Some(torch) = seen.python.as_ref().and_then(|python| python.torch.as_ref()) {
        output::print_line(&format!("torch {}", torch.version));
    }
}

fn blocking_findings(seen: &HostSnapshot, role: &str) -> Vec<&'static str> {
    let mut ids: Vec<_> = doctor::findings_for_role(seen, role)
        .iter()
        .filter(|finding| finding.severity == Severity::Fail)
        .map(|finding| finding.id)
        .collect();
    ids.dedup();
    ids
}

fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Fail => "FAIL",
        Severity::Warn => "WARN",
        Severity::Info => "info",
    }
}
