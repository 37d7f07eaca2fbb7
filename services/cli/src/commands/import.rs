//! `flotilla run import`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use config_import::ImportOptions;

use crate::{args::ImportArgs, output, run_submission::write_spec};

/// Writes the spec also if fields are missing, and fails then.
pub(super) fn import_config(args: &ImportArgs, json: bool) -> anyhow::Result<()> {
    let what = || format!("import {}", args.config.display());
    let text = read_text(&args.config).with_context(what)?;
    let stem = args.config.file_stem().unwrap_or_default().to_string_lossy();
    let name = wire::make_slug(&stem).unwrap_or_else(|| "run".into());
    let directory = args.config.parent().unwrap_or(Path::new(""));
    // Programs name files from where they are started, which is often above their configurations.
    let read_file = |path: &str| {
        let places = [PathBuf::from(path), directory.join(path)];
        places.iter().find_map(|place| read_text(place).ok())
    };
    let options = ImportOptions {
        name: &name,
        program: args.from,
        task: args.task,
        data: args.data.as_deref(),
        verifier: args.verifier.as_deref(),
        read_file: &read_file,
    };
    let imported = config_import::import_config(&text, &options).with_context(what)?;
    if let Some(path) = &args.out {
        write_spec(path, &spec::add_schema_line(&imported.spec))?;
    }
    output::print_json_or(json, &imported, || {
        imported.report_lines().iter().for_each(|line| output::print_message(line));
        if args.out.is_none() {
            output::print_text(imported.spec.trim_end());
        }
    })?;
    imported.check_complete().with_context(what)
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let bytes = control::read_named_file(path)?;
    String::from_utf8(bytes.to_vec()).context("it is not UTF-8 (R102)")
}
