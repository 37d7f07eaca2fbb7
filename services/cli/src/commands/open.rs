//! `flotilla open`: a link to the web page, which in a closed fleet signs in with a one-time code.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::Context;
use reqwest::Url;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::members::{connect_gateway, read_fleet_file};
use crate::{
    args::{GlobalArgs, OpenArgs},
    fleet::{FleetArgs, FleetFile},
    output,
};

/// The time that a gateway that has just started has to answer.
const LINK_LIMIT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const REDIRECT_FILE: &str = "open.html";

pub(crate) async fn open_page(flags: &GlobalArgs, args: OpenArgs) -> anyhow::Result<()> {
    let link = create_link(&flags.fleet).await?;
    if flags.json {
        return output::print_json(&json!({ "url": link.as_str() }));
    }
    output::print_line(link.as_str());
    let browser = if args.print { None } else { start_browser(&flags.fleet, &link)? };
    if let Some(browser) = browser {
        output::print_message(&format!("opened with {}", browser.display()));
    }
    Ok(())
}

/// Returns the page's address, in a closed fleet with a code that signs in as the user of the
/// fleet's or the credentials' directory.
async fn create_link(fleet: &FleetArgs) -> anyhow::Result<Url> {
    let mut file = read_fleet_file(fleet)?;
    let mut code = String::new();
    if file.identity.is_some() {
        let mut gateway = connect_gateway(fleet).await?;
        code = format!("#code={}", gateway.create_login_code().await?.code);
        file.gateway = gateway.address().to_owned();
    }
    let link = format!("{}{code}", file.page_url());
    link.parse().with_context(|| format!("the gateway's address {} is no URL (A103)", file.gateway))
}

/// Returns a link to the page of a fleet here for people at a terminal. A log gets the address
/// without a code.
pub(crate) async fn describe_page(directory: &Path, file: &FleetFile) -> String {
    if file.identity.is_none() || !output::stderr_is_terminal() {
        return file.describe_page(directory);
    }
    let fleet = FleetArgs::in_directory(directory);
    let linked = timeout(LINK_LIMIT, async {
        loop {
            match create_link(&fleet).await {
                Ok(link) => break link,
                Err(_) => sleep(POLL_INTERVAL).await,
            }
        }
    });
    let Ok(link) = linked.await else { return file.describe_page(directory) };
    let accept = if link.scheme() == "https" { "; accept its certificate" } else { "" };
    format!("\n  {link}\n  (signs in once, within 10 minutes{accept})")
}

/// Opens a link with `$BROWSER`, or on a desktop with xdg-open. Returns the program; `None` if there
/// is no browser.
fn start_browser(fleet: &FleetArgs, link: &Url) -> anyhow::Result<Option<PathBuf>> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_desktop = set("DISPLAY").or_else(|| set("WAYLAND_DISPLAY")).is_some();
    let desktop = is_desktop.then(|| PathBuf::from("xdg-open"));
    let programs: Vec<PathBuf> =
        set("BROWSER").map(PathBuf::from).into_iter().chain(desktop).collect();
    if programs.is_empty() {
        return Ok(None);
    }
    // A file only for this user: all users of a machine can read the arguments of a program.
    let file = fleet.require_directory()?.canonicalize()?.join(REDIRECT_FILE);
    durable_files::replace_file(&file, redirect_page(link).as_bytes(), 0o600)
        .with_context(|| format!("write {}; --print needs no file (A104)", file.display()))?;
    let page = Url::from_file_path(&file).ok().context("find the directory of the fleet (A103)")?;
    let is_started = |program: &PathBuf| {
        let mut command = Command::new(program);
        command.arg(page.as_str()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().is_ok()
    };
    Ok(programs.into_iter().find(is_started))
}

/// Returns a page that leads to a link. The text of a URL needs no escapes in HTML.
fn redirect_page(link: &Url) -> String {
    format!(
        "<!doctype html><meta charset=\"utf-8\"><meta name=\"referrer\" content=\"no-referrer\">\
         <meta http-equiv=\"refresh\" content=\"0; url={link}\"><a href=\"{link}\">Flotilla</a>\n"
    )
}
