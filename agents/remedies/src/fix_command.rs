//! `flotilla doctor --fix` and `--undo`, at a terminal or with `--yes`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, bail};
use doctor::{Fix, FixChange, FixEffect, FixInputs, plan_fixes};
use hardware::{
    HardwareProfile,
    host_files::{HostFiles, LiveFiles},
    host_snapshot::{DeviceAccess, HostSnapshot},
};
use process::{RunLimits, run_program};
use terminal_output::{
    Question, is_interactive_terminal, print_line, print_message, print_wrapped,
};

use crate::apply::{HostRoot, apply_fixes, undo_fixes};

/// Limits of the command that checks the permissions of devices.
const ACCESS_LIMITS: RunLimits = RunLimits {
    time: Duration::from_secs(10),
    poll: Duration::from_millis(10),
    ..RunLimits::INSTALLATION
};

/// Shell script that prints the arguments that its user may not read and write. It opens none of
/// them, because that would wake a card.
const ACCESS_SCRIPT: &str = r#"for it; do test -r "$it" && test -w "$it" || echo "$it"; done"#;

/// The directory of root's journal. No service may write in it: an undo runs the commands there.
const ROOT_STATE: &str = "/var/lib/flotilla-doctor";

/// The options of `flotilla doctor --fix`.
#[derive(Debug, Clone, Default)]
pub struct FixOptions {
    /// The name or file of a hardware profile; `None` for the box's.
    pub profile: Option<String>,
    /// The Python interpreter that trains, whose environment is checked, too.
    pub python: Option<PathBuf>,
    /// True to apply the fixes without asking.
    pub yes: bool,
}

/// The user who gets access to the GPU: the caller of sudo, or else the user of this process.
struct GpuUser {
    name: String,
    home: Option<String>,
}

/// Shows the fixes of this box, asks, and applies them.
///
/// # Errors
/// When neither `yes` is set nor a terminal can ask, root is needed, or a change fails.
pub fn fix_box(options: &FixOptions) -> anyhow::Result<()> {
    let root = Path::new("/");
    let user = GpuUser::find_user(&LiveFiles::new(root));
    let (files, host) = user.take_snapshot(root, options.python.as_deref());
    let profile = match options.profile.as_deref() {
        Some(name) => HardwareProfile::load_named(name)?,
        None => HardwareProfile::for_host(&host)?,
    };
    let findings = doctor::check_host(&host, &profile);
    let home = user.home.as_deref();
    let inputs = FixInputs {
        host: &host,
        findings: &findings,
        profile: &profile,
        files: &files,
        user: &user.name,
        home,
    };
    let fixes = plan_fixes(&inputs);
    if fixes.is_empty() {
        print_line("nothing to fix: no finding of this box has a mechanical remedy");
        return Ok(());
    }
    print_plan(&fixes);
    let needs_root = fixes.iter().any(|fix| fix.is_mechanical() && fix.needs_root(home));
    if needs_root && !is_root() {
        bail!("these changes need root: run `sudo flotilla doctor --fix` (A118)");
    }
    if !fixes.iter().any(Fix::is_mechanical) {
        print_message("nothing was changed");
        return Ok(());
    }
    let state = state_directory(&user)?;
    let mut run = |words: &[String]| run_as_child(words, &user);
    let mut host = HostRoot { root, state: &state, run: &mut run };
    let confirm = || is_confirmed(options.yes, is_interactive_terminal(), ask_consent);
    if change_if_confirmed(&mut host, confirm, |host| apply_fixes(host, &fixes))?.is_none() {
        return Ok(());
    }
    let effects = fixes.iter().map(|fix| fix.takes_effect);
    let ends = match effects.max_by_key(|effect| *effect as u8) {
        Some(FixEffect::Reboot) => "reboot for them to take effect; ",
        Some(FixEffect::Login) => "log in again for them to take effect; ",
        Some(FixEffect::Now) | None => "",
    };
    print_message(&format!(
        "the changes were made; {ends}`flotilla doctor --undo` takes them back"
    ));
    Ok(())
}

/// Undoes the changes of earlier fixes on this box.
///
/// # Errors
/// When neither `yes` is set nor a terminal can ask, or a change cannot be undone.
pub fn undo_box(options: &FixOptions) -> anyhow::Result<()> {
    let root = Path::new("/");
    let user = GpuUser::find_user(&LiveFiles::new(root));
    let state = state_directory(&user)?;
    let journal = crate::FixJournal::read(&state)?;
    if journal.records.is_empty() {
        print_line(&format!("nothing to undo: no fix is recorded in {}", state.display()));
        if !is_root() && Path::new(ROOT_STATE).exists() {
            print_message("fixes that root made are undone by `sudo flotilla doctor --undo`");
        }
        return Ok(());
    }
    for record in journal.records.iter().rev() {
        print_wrapped(&format!("undo {}: {}", record.ids.join(", "), record.summary));
    }
    let mut run = |words: &[String]| run_as_child(words, &user);
    let mut host = HostRoot { root, state: &state, run: &mut run };
    let confirm = || is_confirmed(options.yes, is_interactive_terminal(), ask_consent);
    if let Some(undone) = change_if_confirmed(&mut host, confirm, undo_fixes)? {
        print_message(&format!("{} fixes were undone", undone.len()));
    }
    Ok(())
}

/// Changes a host after a confirmation. Returns `None` without one.
fn change_if_confirmed<T>(
    host: &mut HostRoot<'_>,
    confirm: impl FnOnce() -> anyhow::Result<bool>,
    change: impl FnOnce(&mut HostRoot<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<Option<T>> {
    if !confirm()? {
        print_message("nothing was changed");
        return Ok(None);
    }
    change(host).map(Some)
}

fn print_plan(fixes: &[Fix]) {
    for fix in fixes {
        print_line("");
        print_wrapped(&format!("{}: {}", fix.ids.join(", "), fix.summary));
        for change in &fix.changes {
            match change {
                FixChange::Write { path, content } => {
                    print_line(&format!("  write {path}, {} lines:", content.lines().count()));
                    content.lines().for_each(|line| print_line(&format!("    {line}")));
                }
                FixChange::Run { command, undo } => {
                    print_line(&format!("  run {}", command.join(" ")));
                    if !undo.is_empty() {
                        print_line(&format!("    to undo: {}", undo.join(" ")));
                    }
                }
                FixChange::Manual(text) => print_line(&format!("  by hand: {text}")),
            }
        }
        let when = match fix.takes_effect {
            FixEffect::Now => "at once",
            FixEffect::Login => "after the next login",
            FixEffect::Reboot => "after a reboot",
        };
        print_line(&format!("  takes effect {when}"));
    }
    print_line("");
}

/// Returns true with `--yes`, or if the person at the terminal answers `yes`.
fn is_confirmed(
    yes: bool,
    has_terminal: bool,
    ask: impl FnOnce() -> anyhow::Result<String>,
) -> anyhow::Result<bool> {
    if yes {
        return Ok(true);
    }
    if !has_terminal {
        bail!("no terminal to ask at: pass --yes to make these changes (A118)");
    }
    Ok(ask()? == "yes")
}

fn ask_consent() -> anyhow::Result<String> {
    let question = Question {
        text: "Make these changes? (yes or no)",
        default: Some("no"),
        remedy: "pass --yes",
    };
    question.ask(|answer| match answer {
        "yes" | "no" => Ok(()),
        _ => bail!("answer yes or no (A102)"),
    })
}

/// Returns the devices that the user of a command, which is `sudo` or a shell, may not read and
/// write.
///
/// # Errors
/// When the command cannot be run.
fn find_denied(mut command: Command, devices: &[String]) -> anyhow::Result<Vec<String>> {
    command.args(["-c", ACCESS_SCRIPT, "sh"]).args(devices);
    match run_program(&mut command, Vec::new(), ACCESS_LIMITS, |_| ()) {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            Ok(text.lines().map(str::to_owned).collect())
        }
        Err(error) => bail!("{}: {}", error.problem, error.stderr.trim()),
    }
}

/// Marks the devices that the user of a command may not use.
fn deny_devices(host: &mut HostSnapshot, command: Command) -> anyhow::Result<()> {
    let usable = list_devices(host).into_iter().filter(|(_, it)| **it == DeviceAccess::Usable);
    let usable: Vec<(String, &mut DeviceAccess)> = usable.collect();
    let names: Vec<String> = usable.iter().map(|(name, _)| name.clone()).collect();
    let denied = find_denied(command, &names)?;
    for (name, access) in usable {
        if denied.contains(&name) {
            *access = DeviceAccess::Denied;
        }
    }
    Ok(())
}

/// Lists the devices of the GPUs, each with its access.
fn list_devices(host: &mut HostSnapshot) -> Vec<(String, &mut DeviceAccess)> {
    let cards = host.gpus.iter_mut();
    let cards = cards.map(|gpu| (format!("/dev/dri/renderD{}", gpu.render_minor), &mut gpu.render));
    [("/dev/kfd".to_owned(), &mut host.kfd)].into_iter().chain(cards).collect()
}

/// Runs this program as the user of the GPU, whose stacks it changes.
fn run_as_child(words: &[String], user: &GpuUser) -> anyhow::Result<()> {
    let Some((program, arguments)) = words.split_first() else { return Ok(()) };
    let own = std::env::current_exe().context("find this program")?;
    let mut command = match program.as_str() {
        "flotilla" if is_root() && user.name != "root" => {
            let mut command = Command::new("sudo");
            command.args(["-H", "-u", user.name.as_str()]).arg(own);
            command
        }
        "flotilla" => Command::new(own),
        _ => Command::new(program),
    };
    command.args(arguments);
    match run_program(&mut command, Vec::new(), RunLimits::INSTALLATION, |_| ()) {
        Ok(_) => Ok(()),
        Err(error) => {
            let (problem, stderr) = (error.problem, error.stderr);
            bail!("{}: {problem}: {} (A118)", words.join(" "), stderr.trim())
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the directory of the journal: root's, or the user's own.
fn state_directory(user: &GpuUser) -> anyhow::Result<PathBuf> {
    if is_root() {
        return Ok(ROOT_STATE.into());
    }
    let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let named = named.filter(|path| path.is_absolute());
    let own = || Some(Path::new(user.home.as_deref()?).join(".local/state"));
    let state = named.or_else(own).context("HOME is not set; set it (A102)")?;
    Ok(state.join("flotilla"))
}

impl GpuUser {
    fn find_user(files: &dyn HostFiles) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let caller = variable("SUDO_USER").filter(|_| is_root());
        match caller {
            Some(name) => {
                let users = files.read("/etc/passwd").unwrap_or_default();
                let home = find_home(&String::from_utf8_lossy(&users), &name);
                Self { name, home }
            }
            None => {
                let own = if is_root() { Some("root".to_owned()) } else { variable("USER") };
                Self { name: own.unwrap_or_default(), home: variable("HOME") }
            }
        }
    }

    /// Takes a snapshot of the host with this user's permissions, because root may open every
    /// device.
    fn take_snapshot(&self, root: &Path, python: Option<&Path>) -> (LiveFiles, HostSnapshot) {
        let mut files = LiveFiles::new(root);
        if let Some(home) = &self.home {
            files = files.with_home(Path::new(home));
        }
        if let Some(python) = python {
            files = files.with_python(python);
        }
        let mut host = HostSnapshot::take_snapshot(&files);
        if is_root() && self.name != "root" {
            let mut command = Command::new("sudo");
            command.args(["-n", "-u", self.name.as_str(), "sh"]);
            if let Err(error) = deny_devices(&mut host, command) {
                let name = &self.name;
                print_message(&format!("it is not known whether {name} may use the GPU: {error}"));
            }
        }
        (files, host)
    }
}

/// Finds a user's home in the text of `/etc/passwd`.
fn find_home(users: &str, name: &str) -> Option<String> {
    let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split(':').nth(5).filter(|home| home.starts_with('/')).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use hardware::host_snapshot::GpuInfo;

    use super::*;

    /// Edits a file of a host, if that is confirmed. Returns the result and the text of the file.
    fn edit_if(
        confirm: impl FnOnce() -> anyhow::Result<bool>,
    ) -> (anyhow::Result<Option<()>>, String) {
        let directory = tempfile::tempdir().unwrap();
        let (root, state) = (directory.path().join("root"), directory.path().join("state"));
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join("grub"), "old").unwrap();
        let fixes = [Fix {
            ids: vec!["C-22"],
            summary: "edit grub".into(),
            changes: vec![FixChange::Write { path: "/grub".into(), content: "new".into() }],
            takes_effect: FixEffect::Now,
        }];
        let mut run = |_: &[String]| anyhow::Ok(());
        let mut host = HostRoot { root: &root, state: &state, run: &mut run };
        let edited = change_if_confirmed(&mut host, confirm, |host| apply_fixes(host, &fixes));
        let text = std::fs::read_to_string(root.join("grub")).unwrap();
        assert_eq!(state.exists(), text == "new", "nothing is recorded without a change");
        (edited, text)
    }

    #[test]
    fn nothing_is_changed_without_a_yes() {
        let (refused, text) = edit_if(|| is_confirmed(false, false, || panic!("nobody is there")));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("pass --yes") && refused.contains("(A118)"), "{refused}");
        assert_eq!(text, "old");
        for answer in ["no", ""] {
            let (declined, text) = edit_if(|| is_confirmed(false, true, || Ok(answer.to_owned())));
            assert_eq!((declined.unwrap(), text.as_str()), (None, "old"));
        }
        let (failed, text) = edit_if(|| is_confirmed(false, true, || bail!("no answer (A102)")));
        failed.unwrap_err();
        assert_eq!(text, "old");
        let (agreed, text) = edit_if(|| is_confirmed(false, true, || Ok("yes".to_owned())));
        assert_eq!((agreed.unwrap(), text.as_str()), (Some(()), "new"));
        let (told, text) = edit_if(|| is_confirmed(true, false, || panic!("it is not asked")));
        assert_eq!((told.unwrap(), text.as_str()), (Some(()), "new"));
    }

    #[test]
    fn the_home_of_a_user_is_that_of_its_line() {
        let users = "root:x:0:0::/root:/bin/sh\nanna:x:1000:1000:Anna:/home/anna:/bin/bash\nx:y\n";
        assert_eq!(find_home(users, "anna").as_deref(), Some("/home/anna"));
        assert_eq!(find_home(users, "ann"), None);
        assert_eq!(find_home(users, "x"), None);
    }

    #[test]
    fn devices_that_the_user_may_not_use_are_found_and_denied() {
        let directory = tempfile::tempdir().unwrap();
        let (own, absent) = (directory.path().join("own"), directory.path().join("absent"));
        std::fs::write(&own, "").unwrap();
        let devices = [&own, &absent].map(|path| path.display().to_string());
        assert_eq!(find_denied(Command::new("sh"), &devices).unwrap(), devices[1..]);
        find_denied(Command::new("no-such-shell"), &devices).unwrap_err();

        // A shell for whose user only one device is closed.
        let mut host = HostSnapshot { kfd: DeviceAccess::Usable, ..HostSnapshot::default() };
        for render in [DeviceAccess::Usable, DeviceAccess::Absent] {
            host.gpus.push(GpuInfo { render, render_minor: 128, ..GpuInfo::default() });
        }
        let script = directory.path().join("closed");
        std::fs::write(&script, "#!/bin/sh\necho /dev/kfd\n").unwrap();
        let mut command = Command::new("sh");
        command.arg(&script);
        deny_devices(&mut host, command).unwrap();
        assert_eq!(host.kfd, DeviceAccess::Denied);
        let access: Vec<DeviceAccess> = host.gpus.into_iter().map(|gpu| gpu.render).collect();
        assert_eq!(access, [DeviceAccess::Usable, DeviceAccess::Absent]);
    }

    #[test]
    fn no_service_may_write_the_journal_of_root() {
        let units = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd");
        let mut directories = Vec::new();
        for entry in std::fs::read_dir(units).unwrap() {
            let Ok(unit) = std::fs::read_to_string(entry.unwrap().path()) else { continue };
            let lines = unit.lines().filter_map(|line| line.strip_prefix("StateDirectory="));
            directories.extend(lines.map(|name| Path::new("/var/lib").join(name)));
        }
        assert!(directories.contains(&"/var/lib/flotilla".into()), "{directories:?}");
        assert!(!directories.iter().any(|it| Path::new(ROOT_STATE).starts_with(it)));
    }

    #[test]
    fn a_command_that_fails_is_named_with_its_output() {
        let words = ["sh", "-c", "echo full >&2; exit 3"].map(str::to_owned);
        let user = GpuUser { name: "anna".to_owned(), home: None };
        let error = run_as_child(&words, &user).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("full (A118)"), "{error}");
        run_as_child(&["true".to_owned()], &user).unwrap();
    }
}
