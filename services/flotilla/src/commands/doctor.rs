//! `flotilla doctor`: what is wrong with this box, or with one that was captured.

mod capture;
mod estimate;
mod job;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use hardware::{
    Profile,
    doctor::{self, Finding, Severity},
    files::{Live, Recording},
    snapshot::Snapshot,
};
use serde_json::json;

use super::agent::ROLES;
use crate::{
    cli::{DoctorArgs, DoctorCommand},
    commands::FINDINGS,
    output,
};

pub(crate) fn doctor(args: &DoctorArgs, json: bool) -> anyhow::Result<ExitCode> {
    match &args.command {
        Some(DoctorCommand::Estimate(args)) => return estimate::estimate(args, json),
        Some(DoctorCommand::Profile { name }) => return profile(name.as_deref()),
        None => {}
    }
    let seen = look(args)?;
    let profile = match args.profile.as_deref() {
        Some(name) => Profile::named(name)?,
        None => Profile::of(&seen)?,
    };
    let mut findings = doctor::check(&seen, &profile);
    if let Some(role) = &args.role {
        findings = doctor::of_role(findings, role);
    }
    if let Some(file) = &args.run {
        let plan = job::plan(file, args, &seen, &profile)?;
        findings.extend(doctor::for_plan(&seen, &profile, &plan));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    }
    if json {
        let roles: serde_json::Map<_, _> =
            ROLES.iter().map(|role| ((*role).to_owned(), json!(obstacles(&seen, role)))).collect();
        output::print_json(&json!({
            "profile": profile.name, "findings": findings, "withheld_by": roles, "snapshot": seen,
        }))?;
    } else {
        print(&seen, &profile, &findings);
    }
    let failed = doctor::worst(&findings) == Some(Severity::Fail);
    Ok(if failed { ExitCode::from(FINDINGS) } else { ExitCode::SUCCESS })
}

fn profile(name: Option<&str>) -> anyhow::Result<ExitCode> {
    let own = match name {
        Some(name) => name.to_owned(),
        None => Profile::choose(None)?.name,
    };
    output::print(Profile::text(&own)?.trim_end());
    Ok(ExitCode::SUCCESS)
}

fn look(args: &DoctorArgs) -> anyhow::Result<Snapshot> {
    if let Some(path) = &args.from {
        let capture = capture::read(path).with_context(|| format!("read {}", path.display()))?;
        return Ok(Snapshot::take(&capture));
    }
    let live = live(args)?;
    let recording = Recording::new(&live);
    let mut seen = Snapshot::take(&recording);
    if let Some(path) = &args.capture {
        capture::write(&recording.finish(), path)
            .with_context(|| format!("write {}", path.display()))?;
        output::say(&format!("what was read is in {}", path.display()));
    }
    if let (Some(python), Some(interpreter)) = (&mut seen.python, &args.python) {
        python.interpreter.clone_from(interpreter);
    }
    Ok(seen)
}

/// This box, and what of it lies where the user says.
fn live(args: &DoctorArgs) -> anyhow::Result<Live> {
    let mut live = Live::new("/");
    if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
        live = live.with_home(&home).with_data(&home.join(".flotilla"));
    }
    if let Some(python) = &args.python {
        if !python.is_file() {
            bail!(
                "--python {}: there is no such file; give an interpreter such as VENV/bin/python (A104)",
                python.display()
            );
        }
        live = live.with_python(&std::path::absolute(python)?);
    }
    Ok(live)
}

fn print(seen: &Snapshot, profile: &Profile, findings: &[Finding]) {
    print_box(seen, profile);
    for Finding { id, severity, seen, why, remedy, source } in findings {
        output::print(&format!("\n{} {id}: {seen}", word(*severity)));
        output::print(&format!("     why: {why}"));
        output::print(&format!("  remedy: {remedy}"));
        output::print(&format!("  source: {source}"));
    }
    let roles = ROLES.map(|role| match obstacles(seen, role).as_slice() {
        [] => format!("{role} yes"),
        ids => format!("{role} NO ({})", ids.join(", ")),
    });
    let count = |severity| findings.iter().filter(|one| one.severity == severity).count();
    let counts = [Severity::Fail, Severity::Warn, Severity::Info]
        .map(|severity| format!("{} {}", count(severity), word(severity)));
    output::print(&format!("\n{}: {}", counts.join(", "), roles.join(", ")));
}

fn print_box(seen: &Snapshot, profile: &Profile) {
    output::print(&format!("{}: {}", profile.name, profile.summary));
    let kernel = &seen.kernel;
    output::print(&format!("{}, kernel {}", kernel.distribution, kernel.release));
    output::print(&format!(
        "{}, {} cores, {} of memory",
        seen.cpu.model,
        seen.cpu.logical,
        output::bytes(seen.memory.total)
    ));
    for gpu in &seen.gpus {
        let memory = if gpu.unified_memory { gpu.gtt_total } else { gpu.vram_total };
        output::print(&format!(
            "{} at {}, HIP device {}, {}{}",
            gpu.gfx,
            gpu.pci,
            gpu.ordinal,
            output::bytes(memory),
            if gpu.suspended { ", asleep" } else { "" }
        ));
    }
    for (directory, version) in &seen.rocm {
        output::print(&format!("ROCm {version} in {directory}"));
    }
    if let Some(torch) = seen.python.as_ref().and_then(|python| python.torch.as_ref()) {
        output::print(&format!("torch {}", torch.version));
    }
}

/// The failures that keep a role from its work.
fn obstacles(seen: &Snapshot, role: &str) -> Vec<&'static str> {
    let mut ids: Vec<_> = doctor::for_role(seen, role)
        .iter()
        .filter(|finding| finding.severity == Severity::Fail)
        .map(|finding| finding.id)
        .collect();
    ids.dedup();
    ids
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Fail => "FAIL",
        Severity::Warn => "WARN",
        Severity::Info => "info",
    }
}
