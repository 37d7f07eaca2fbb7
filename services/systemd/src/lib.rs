//! The agent as a systemd service: its unit, and the service manager that installs and starts it.
//! Knows nothing about fleets.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid};
use tokio::process::Command;

pub const SERVICE_NAME: &str = "flotilla-agent";

const SYSTEM_UNIT: &str = include_str!("../../../deploy/systemd/flotilla-agent.service");
const USER_UNIT: &str = include_str!("../../../deploy/systemd/flotilla-agent.user.service");
const VERIFIER_DROP_IN: &str =
    include_str!("../../../deploy/systemd/flotilla-agent.service.d/verifier.conf");

const PACKAGED_PROGRAM: &str = "/usr/bin/flotilla";
const SYSTEM_CREDENTIALS: &str = "/var/lib/flotilla/credentials";
const USER_CREDENTIALS: &str = "%S/flotilla/credentials";

const STATE_DIRECTORY: &str = "/var/lib/flotilla";

/// Maximum time of a `systemctl` call: a start returns when the service is ready, for which its
/// unit allows 300 s.
const SYSTEMCTL_LIMIT: Duration = Duration::from_secs(330);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceScope {
    System,
    User,
}

#[derive(Debug, Clone)]
pub struct ServiceOptions {
    pub program: PathBuf,
    /// Credentials directory of a closed fleet. `None`: the packaged location.
    pub credentials: Option<PathBuf>,
    /// NATS servers of an open fleet. Empty: those of the credentials or of the settings file.
    pub nats: Vec<String>,
    /// Name of the agent. `None`: that of the settings file, or the box's name.
    pub name: Option<String>,
    /// Roles of the agent. Empty: those of the settings file.
    pub roles: Vec<String>,
    pub scope: ServiceScope,
}

pub fn render_unit(options: &ServiceOptions) -> String {
    let (text, credentials) = match options.scope {
        ServiceScope::System => (SYSTEM_UNIT, SYSTEM_CREDENTIALS),
        ServiceScope::User => (USER_UNIT, USER_CREDENTIALS),
    };
    let started = format!("ExecStart={}", quote_program(&options.program));
    let mut text = text.replace(&format!("ExecStart={PACKAGED_PROGRAM}"), &started);
    let mut settings: Vec<String> = Vec::new();
    settings.extend(options.name.as_ref().map(|name| format!("FLOTILLA_NAME={name}")));
    if !options.nats.is_empty() {
        settings.push(format!("FLOTILLA_NATS={}", options.nats.join(",")));
    }
    if !options.roles.is_empty() {
        settings.push(format!("FLOTILLA_ROLES={}", options.roles.join(",")));
    }
    let mut lines: String =
        settings.iter().map(|one| format!("Environment={}\n", quote_value(one))).collect();
    if let Some(there) = &options.credentials {
        lines +=
            &format!("Environment={}\n", quote_value(&format!("FLOTILLA_DIR={}", there.display())));
        text = text.replace(&format!("Environment=FLOTILLA_DIR={credentials}\n"), "");
    }
    // These lines come before the settings file, which may override them.
    text.replace("EnvironmentFile=", &format!("{lines}EnvironmentFile="))
}

fn quote_program(path: &Path) -> String {
    quote_value(&path.display().to_string()).replace('$', "$$")
}

/// Quotes a value for a unit file: `%` starts a specifier, and text with blanks needs quotes.
fn quote_value(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    if escaped.contains([' ', '\t', '\'', '"', ';']) { format!("\"{escaped}\"") } else { escaped }
}

#[derive(Debug, Clone)]
pub struct ServiceManager {
    pub systemctl: PathBuf,
    pub units: PathBuf,
    pub scope: ServiceScope,
}

impl ServiceManager {
    pub fn for_scope(scope: ServiceScope) -> anyhow::Result<Self> {
        let units = match scope {
            ServiceScope::System => PathBuf::from("/etc/systemd/system"),
            ServiceScope::User => user_config_directory()?.join("systemd/user"),
        };
        Ok(Self { systemctl: "systemctl".into(), units, scope })
    }

    pub async fn install_unit(&self, options: &ServiceOptions) -> anyhow::Result<PathBuf> {
        check_options(options)?;
        let path = self.units.join(format!("{SERVICE_NAME}.service"));
        write_unit_file(&path, &render_unit(options))?;
        if options.scope == ServiceScope::System
            && options.roles.iter().any(|role| role == "verifier")
        {
            write_unit_file(
                &self.units.join(format!("{SERVICE_NAME}.service.d/verifier.conf")),
                VERIFIER_DROP_IN,
            )?;
        }
        self.run_systemctl(&["daemon-reload"]).await?;
        Ok(path)
    }

    pub async fn enable_service(&self, service: &str) -> anyhow::Result<()> {
        self.run_systemctl(&["enable", service]).await?;
        // The service may already run with an older unit or older credentials.
        self.restart_service(service).await
    }

    pub async fn restart_service(&self, service: &str) -> anyhow::Result<()> {
        self.run_systemctl(&["restart", service]).await
    }

    async fn run_systemctl(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let scope: &[&str] = if self.scope == ServiceScope::User { &["--user"] } else { &[] };
        let call =
            format!("{} {}", self.systemctl.display(), [scope, arguments].concat().join(" "));
        let mut command = Command::new(&self.systemctl);
        command.args(scope).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let ended = tokio::time::timeout(SYSTEMCTL_LIMIT, command.output()).await;
        let output = ended
            .with_context(|| format!("{call}: not finished within {SYSTEMCTL_LIMIT:?}"))?
            .with_context(|| format!("run {call}; this needs systemd"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{call}: {} ({}) (A111)", said.trim(), output.status);
        }
        Ok(())
    }
}

fn user_config_directory() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("XDG_CONFIG_HOME").filter(|name| !name.is_empty());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    named
        .map(PathBuf::from)
        .or_else(home)
        .context("HOME is not set; set it so that user units can be found")
}

fn check_options(options: &ServiceOptions) -> anyhow::Result<()> {
    for path in [Some(&options.program), options.credentials.as_ref()].into_iter().flatten() {
        let usable = |text: &str| path.is_absolute() && !text.contains(char::is_control);
        if !path.to_str().is_some_and(usable) {
            bail!(
                "{path:?} cannot be used in a unit: pass an absolute path of printable characters (A111)"
            );
        }
    }
    let credentials = options.credentials.as_ref();
    if options.scope == ServiceScope::System
        && let Some(credentials) =
            credentials.filter(|credentials| !credentials.starts_with(STATE_DIRECTORY))
    {
        bail!(
            "the service is a user of its own and cannot use {}: put the credentials into {SYSTEM_CREDENTIALS}, or \
             install the service for a user (A111)",
            credentials.display()
        );
    }
    Ok(())
}

fn write_unit_file(path: &Path, text: &str) -> anyhow::Result<()> {
    let partial = path.with_extension("partial");
    let write = || {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&partial, text)?;
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o644))?;
        fs::rename(&partial, path)
    };
    write().with_context(|| format!("write {}", path.display()))
}

/// Changes the owner of a credentials directory below the service's state directory to the
/// service's user.
///
/// If the service never ran, its user does not exist yet; systemd changes the owner at the first
/// start. The service's user may have placed anything in the directory, so only the directory, its
/// direct entries and files without other hard links are changed.
pub fn give_to_service_user(credentials: &Path) -> anyhow::Result<()> {
    change_owner(credentials)
        .with_context(|| format!("give {} to the service's user", credentials.display()))
}

fn change_owner(credentials: &Path) -> io::Result<()> {
    let state = rustix::fs::stat(credentials.parent().unwrap_or(credentials))?;
    let owner = (Uid::from_raw(state.st_uid), Gid::from_raw(state.st_gid));
    let directory = open_no_follow(CWD, credentials)?;
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        let found = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if is_safe_to_give(&found) {
            change_file_owner(&open_no_follow(&directory, name)?, owner)?;
        }
    }
    change_file_owner(&directory, owner)
}

/// An open file cannot be replaced any more, so it is checked again.
fn change_file_owner(file: &OwnedFd, (user, group): (Uid, Gid)) -> io::Result<()> {
    if !is_safe_to_give(&rustix::fs::fstat(file)?) {
        return Err(io::Error::other("a file in it was replaced during the change"));
    }
    Ok(rustix::fs::fchown(file, Some(user), Some(group))?)
}

fn is_safe_to_give(found: &Stat) -> bool {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => true,
        FileType::RegularFile => found.st_nlink == 1,
        _ => false,
    }
}

fn open_no_follow(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scope: ServiceScope) -> ServiceOptions {
        ServiceOptions {
            program: "/opt/my tools/100%/flotilla".into(),
            credentials: None,
            nats: Vec::new(),
            name: Some("box-3".into()),
            roles: vec!["generator".into(), "verifier".into()],
            scope,
        }
    }

    fn line<'a>(unit: &'a str, start: &str) -> Vec<&'a str> {
        unit.lines().filter(|line| line.starts_with(start)).collect()
    }

    #[test]
    fn a_unit_starts_this_program_as_this_agent() {
        let unit = render_unit(&options(ServiceScope::System));
        let started = ["ExecStart=\"/opt/my tools/100%%/flotilla\" agent"];
        assert_eq!(line(&unit, "ExecStart"), started);
        let environment = line(&unit, "Environment=FLOTILLA");
        assert!(environment.contains(&"Environment=FLOTILLA_NAME=box-3"), "{environment:?}");
        assert!(environment.contains(&"Environment=FLOTILLA_ROLES=generator,verifier"));
        assert!(environment.contains(&"Environment=FLOTILLA_DIR=/var/lib/flotilla/credentials"));
        // The file of settings has the last word.
        assert!(unit.find("FLOTILLA_ROLES") < unit.find("EnvironmentFile="), "{unit}");
    }

    #[test]
    fn a_user_s_unit_asks_for_nothing_that_needs_root() {
        let credentials = Some("/home/ada/credentials".into());
        let unit = render_unit(&ServiceOptions { credentials, ..options(ServiceScope::User) });
        assert_eq!(line(&unit, "DynamicUser"), [""; 0]);
        assert_eq!(
            line(&unit, "Environment=FLOTILLA_DIR"),
            ["Environment=FLOTILLA_DIR=/home/ada/credentials"]
        );
        assert_eq!(line(&unit, "WantedBy"), ["WantedBy=default.target"]);
    }

    fn manager(directory: &Path, scope: ServiceScope, fails: &str) -> ServiceManager {
        let systemctl = directory.join("systemctl");
        let told = directory.join("told").display().to_string();
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> {told}\ncase \"$*\" in {fails}) echo no such unit >&2; exit 5;; esac\n"
        );
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        ServiceManager { systemctl, units: directory.join("units"), scope }
    }

    #[tokio::test]
    async fn a_service_is_written_read_enabled_and_started() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), ServiceScope::System, "never");
        let path = manager.install_unit(&options(ServiceScope::System)).await.unwrap();
        manager.enable_service(SERVICE_NAME).await.unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), render_unit(&options(ServiceScope::System)));
        let beside = manager.units.join("flotilla-agent.service.d/verifier.conf");
        assert!(fs::read_to_string(beside).unwrap().contains("RestrictNamespaces=no"));
        let told = fs::read_to_string(directory.path().join("told")).unwrap();
        assert_eq!(told, "daemon-reload\nenable flotilla-agent\nrestart flotilla-agent\n");
    }

    #[tokio::test]
    async fn what_the_service_manager_says_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), ServiceScope::User, "'--user restart'*");
        let error = format!("{:#}", manager.restart_service(SERVICE_NAME).await.unwrap_err());
        assert!(error.contains("--user restart flotilla-agent: no such unit"), "{error}");
    }

    #[tokio::test]
    async fn a_kit_that_the_service_cannot_read_is_refused_before_anything_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), ServiceScope::System, "never");
        for credentials in ["/root/credentials", "credentials", "/var/lib/flotilla/a\nb"] {
            let options = ServiceOptions {
                credentials: Some(credentials.into()),
                ..options(ServiceScope::System)
            };
            let error = manager.install_unit(&options).await.unwrap_err().to_string();
            assert!(
                error.contains("credentials") || error.contains("cannot be used in a unit"),
                "{error}"
            );
        }
        assert!(!manager.units.exists());
    }

    #[test]
    fn a_kit_belongs_to_whoever_has_the_directory_it_is_in() {
        use std::os::unix::fs::{MetadataExt, chown};
        let directory = tempfile::tempdir().unwrap();
        let credentials = directory.path().join("credentials");
        fs::create_dir(&credentials).unwrap();
        fs::write(credentials.join("key.nk"), "seed").unwrap();
        let to_another = chown(directory.path(), Some(61_234), Some(61_234));
        let owner = directory.path().metadata().unwrap().uid();
        assert_eq!(owner == 61_234, to_another.is_ok(), "only root can give it away");
        give_to_service_user(&credentials).unwrap();
        assert_eq!(credentials.join("key.nk").metadata().unwrap().uid(), owner);
        assert_eq!(credentials.metadata().unwrap().uid(), owner);
    }

    #[test]
    fn what_a_link_in_a_kit_leads_to_is_not_given_away() {
        use std::os::unix::fs::{MetadataExt, chown, symlink};
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir_in(directory.path().parent().unwrap()).unwrap();
        let (shadow, twin) = (elsewhere.path().join("shadow"), elsewhere.path().join("twin"));
        for path in [&shadow, &twin] {
            fs::write(path, "root's").unwrap();
        }
        let credentials = directory.path().join("credentials");
        fs::create_dir(&credentials).unwrap();
        fs::write(credentials.join("key.nk"), "seed").unwrap();
        symlink(&shadow, credentials.join("fleet.json")).unwrap();
        symlink(directory.path().join("nowhere"), credentials.join("dangling")).unwrap();
        fs::hard_link(&twin, credentials.join("twin")).unwrap();
        let before = shadow.metadata().unwrap().uid();
        // Only root can give anything away; others see that links are no errors.
        let _ = chown(directory.path(), Some(61_234), Some(61_234));
        give_to_service_user(&credentials).unwrap();
        let owner = directory.path().metadata().unwrap().uid();
        assert_eq!(credentials.join("key.nk").metadata().unwrap().uid(), owner);
        for path in [&shadow, &twin] {
            assert_eq!(path.metadata().unwrap().uid(), before, "{}", path.display());
        }
        let link = directory.path().join("link");
        symlink(elsewhere.path(), &link).unwrap();
        give_to_service_user(&link).unwrap_err();
        assert_eq!(elsewhere.path().metadata().unwrap().uid(), before);
    }
}
