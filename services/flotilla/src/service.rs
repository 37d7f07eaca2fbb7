//! This box's agent as a systemd service: its unit, and what installs and starts it. Knows nothing
//! of fleets.

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

pub(crate) const NAME: &str = "flotilla-agent";

const SYSTEM_UNIT: &str = include_str!("../../../deploy/systemd/flotilla-agent.service");
const USER_UNIT: &str = include_str!("../../../deploy/systemd/flotilla-agent.user.service");
const VERIFIER: &str =
    include_str!("../../../deploy/systemd/flotilla-agent.service.d/verifier.conf");

/// What the units say of a package's installation.
const PACKAGED: &str = "/usr/bin/flotilla";
const SYSTEM_KIT: &str = "/var/lib/flotilla/kit";
const USER_KIT: &str = "%S/flotilla/kit";

/// Where a service of the system keeps what is its own.
const STATE: &str = "/var/lib/flotilla";

/// A service is started when it says that it is ready, for which its unit gives it 300 s.
const SYSTEMCTL_LIMIT: Duration = Duration::from_secs(330);

/// Whose service manager runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    System,
    User,
}

#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The program, where it stays.
    pub program: PathBuf,
    /// A closed fleet's kit. None: where a package would have it.
    pub kit: Option<PathBuf>,
    /// An open fleet's NATS servers. Empty: the kit's, or what the file of settings says.
    pub nats: Vec<String>,
    /// The agent's name. None: the box's, or what the file of settings says.
    pub name: Option<String>,
    /// What it does. Empty: what the file of settings says.
    pub roles: Vec<String>,
    pub scope: Scope,
}

/// The unit's text.
pub(crate) fn unit(options: &Options) -> String {
    let (text, kit) = match options.scope {
        Scope::System => (SYSTEM_UNIT, SYSTEM_KIT),
        Scope::User => (USER_UNIT, USER_KIT),
    };
    let started = format!("ExecStart={}", argument(&options.program));
    let mut text = text.replace(&format!("ExecStart={PACKAGED}"), &started);
    let mut settings: Vec<String> = Vec::new();
    settings.extend(options.name.as_ref().map(|name| format!("FLOTILLA_NAME={name}")));
    if !options.nats.is_empty() {
        settings.push(format!("FLOTILLA_NATS={}", options.nats.join(",")));
    }
    if !options.roles.is_empty() {
        settings.push(format!("FLOTILLA_ROLES={}", options.roles.join(",")));
    }
    let mut lines: String =
        settings.iter().map(|one| format!("Environment={}\n", quoted(one))).collect();
    if let Some(there) = &options.kit {
        lines += &format!("Environment={}\n", quoted(&format!("FLOTILLA_DIR={}", there.display())));
        text = text.replace(&format!("Environment=FLOTILLA_DIR={kit}\n"), "");
    }
    // Before the file of settings, which may overrule them.
    text.replace("EnvironmentFile=", &format!("{lines}EnvironmentFile="))
}

/// A path as a command's first word.
fn argument(path: &Path) -> String {
    quoted(&path.display().to_string()).replace('$', "$$")
}

/// As a unit's file wants it: `%` begins a specifier, and quotes hold what has blanks.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    if escaped.contains([' ', '\t', '\'', '"', ';']) { format!("\"{escaped}\"") } else { escaped }
}

/// The service manager of a scope, and where its units are.
#[derive(Debug, Clone)]
pub(crate) struct Manager {
    pub systemctl: PathBuf,
    pub units: PathBuf,
    pub scope: Scope,
}

impl Manager {
    /// # Errors
    /// When a user's units have no place.
    pub(crate) fn of(scope: Scope) -> anyhow::Result<Self> {
        let units = match scope {
            Scope::System => PathBuf::from("/etc/systemd/system"),
            Scope::User => user_config()?.join("systemd/user"),
        };
        Ok(Self { systemctl: "systemctl".into(), units, scope })
    }

    /// Writes the unit and what its roles need beside it, and has it read. Returns its path.
    ///
    /// # Errors
    /// When it cannot be written, or the service manager refuses it.
    pub(crate) async fn install(&self, options: &Options) -> anyhow::Result<PathBuf> {
        check(options)?;
        let path = self.units.join(format!("{NAME}.service"));
        write(&path, &unit(options))?;
        if options.scope == Scope::System && options.roles.iter().any(|role| role == "verifier") {
            write(&self.units.join(format!("{NAME}.service.d/verifier.conf")), VERIFIER)?;
        }
        self.systemctl(&["daemon-reload"]).await?;
        Ok(path)
    }

    /// Starts it now and whenever the box does (or its user logs in).
    ///
    /// # Errors
    /// When it does not start.
    pub(crate) async fn enable(&self, service: &str) -> anyhow::Result<()> {
        self.systemctl(&["enable", service]).await?;
        // It may run already, with another unit or kit.
        self.restart(service).await
    }

    /// Starts it anew, and returns when it says that it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub(crate) async fn restart(&self, service: &str) -> anyhow::Result<()> {
        self.systemctl(&["restart", service]).await
    }

    async fn systemctl(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let scope: &[&str] = if self.scope == Scope::User { &["--user"] } else { &[] };
        let told =
            format!("{} {}", self.systemctl.display(), [scope, arguments].concat().join(" "));
        let mut command = Command::new(&self.systemctl);
        command.args(scope).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let ended = tokio::time::timeout(SYSTEMCTL_LIMIT, command.output()).await;
        let output = ended
            .with_context(|| format!("{told}: not done within {SYSTEMCTL_LIMIT:?}"))?
            .with_context(|| format!("run {told}; is this a box with systemd?"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{told}: {} ({}) (A111)", said.trim(), output.status);
        }
        Ok(())
    }
}

fn user_config() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("XDG_CONFIG_HOME").filter(|name| !name.is_empty());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    named.map(PathBuf::from).or_else(home).context("HOME is not set: where are your units?")
}

/// What a unit cannot have, or a service could not use.
fn check(options: &Options) -> anyhow::Result<()> {
    for path in [Some(&options.program), options.kit.as_ref()].into_iter().flatten() {
        let usable = |text: &str| path.is_absolute() && !text.contains(char::is_control);
        if !path.to_str().is_some_and(usable) {
            bail!(
                "{path:?} cannot stand in a unit: give an absolute path of printable characters (A111)"
            );
        }
    }
    let kit = options.kit.as_ref();
    if options.scope == Scope::System
        && let Some(kit) = kit.filter(|kit| !kit.starts_with(STATE))
    {
        bail!(
            "the service is a user of its own and cannot use {}: put the kit into {SYSTEM_KIT}, or \
             install the service for a user (A111)",
            kit.display()
        );
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
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

/// Gives a kit that root put below the service's directory to the service's user. One that never
/// ran has none yet, and takes over all there is when it starts. That user may have put anything
/// there: only what lies in the kit itself is given, and nothing that has another name elsewhere.
///
/// # Errors
/// When a file cannot be given away.
pub(crate) fn adopt(kit: &Path) -> anyhow::Result<()> {
    give(kit).with_context(|| format!("give {} to the service's user", kit.display()))
}

fn give(kit: &Path) -> io::Result<()> {
    let state = rustix::fs::stat(kit.parent().unwrap_or(kit))?;
    let owner = (Uid::from_raw(state.st_uid), Gid::from_raw(state.st_gid));
    let directory = open_itself(CWD, kit)?;
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        let found = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if is_ours(&found) {
            give_one(&open_itself(&directory, name)?, owner)?;
        }
    }
    give_one(&directory, owner)
}

/// Looked at once more when it is open: nobody can put another in its place then.
fn give_one(file: &OwnedFd, (user, group): (Uid, Gid)) -> io::Result<()> {
    if !is_ours(&rustix::fs::fstat(file)?) {
        return Err(io::Error::other("something in it was replaced meanwhile"));
    }
    Ok(rustix::fs::fchown(file, Some(user), Some(group))?)
}

/// A directory, or a file that is nowhere else.
fn is_ours(found: &Stat) -> bool {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => true,
        FileType::RegularFile => found.st_nlink == 1,
        _ => false,
    }
}

/// Not what a link of that name leads to.
fn open_itself(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scope: Scope) -> Options {
        Options {
            program: "/opt/my tools/100%/flotilla".into(),
            kit: None,
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
        let unit = unit(&options(Scope::System));
        let started = ["ExecStart=\"/opt/my tools/100%%/flotilla\" agent"];
        assert_eq!(line(&unit, "ExecStart"), started);
        let environment = line(&unit, "Environment=FLOTILLA");
        assert!(environment.contains(&"Environment=FLOTILLA_NAME=box-3"), "{environment:?}");
        assert!(environment.contains(&"Environment=FLOTILLA_ROLES=generator,verifier"));
        assert!(environment.contains(&"Environment=FLOTILLA_DIR=/var/lib/flotilla/kit"));
        // The file of settings has the last word.
        assert!(unit.find("FLOTILLA_ROLES") < unit.find("EnvironmentFile="), "{unit}");
    }

    #[test]
    fn a_user_s_unit_asks_for_nothing_that_needs_root() {
        let kit = Some("/home/ada/kit".into());
        let unit = unit(&Options { kit, ..options(Scope::User) });
        assert_eq!(line(&unit, "DynamicUser"), [""; 0]);
        assert_eq!(
            line(&unit, "Environment=FLOTILLA_DIR"),
            ["Environment=FLOTILLA_DIR=/home/ada/kit"]
        );
        assert_eq!(line(&unit, "WantedBy"), ["WantedBy=default.target"]);
    }

    /// A manager that writes down what it is told; `fails` makes it refuse that.
    fn manager(directory: &Path, scope: Scope, fails: &str) -> Manager {
        let systemctl = directory.join("systemctl");
        let told = directory.join("told").display().to_string();
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> {told}\ncase \"$*\" in {fails}) echo no such unit >&2; exit 5;; esac\n"
        );
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        Manager { systemctl, units: directory.join("units"), scope }
    }

    #[tokio::test]
    async fn a_service_is_written_read_enabled_and_started() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), Scope::System, "never");
        let path = manager.install(&options(Scope::System)).await.unwrap();
        manager.enable(NAME).await.unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), unit(&options(Scope::System)));
        let beside = manager.units.join("flotilla-agent.service.d/verifier.conf");
        assert!(fs::read_to_string(beside).unwrap().contains("RestrictNamespaces=no"));
        let told = fs::read_to_string(directory.path().join("told")).unwrap();
        assert_eq!(told, "daemon-reload\nenable flotilla-agent\nrestart flotilla-agent\n");
    }

    #[tokio::test]
    async fn what_the_service_manager_says_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), Scope::User, "'--user restart'*");
        let error = format!("{:#}", manager.restart(NAME).await.unwrap_err());
        assert!(error.contains("--user restart flotilla-agent: no such unit"), "{error}");
    }

    #[tokio::test]
    async fn a_kit_that_the_service_cannot_read_is_refused_before_anything_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path(), Scope::System, "never");
        for kit in ["/root/kit", "kit", "/var/lib/flotilla/a\nb"] {
            let options = Options { kit: Some(kit.into()), ..options(Scope::System) };
            let error = manager.install(&options).await.unwrap_err().to_string();
            assert!(error.contains("kit") || error.contains("cannot stand"), "{error}");
        }
        assert!(!manager.units.exists());
    }

    #[test]
    fn a_kit_belongs_to_whoever_has_the_directory_it_is_in() {
        use std::os::unix::fs::{MetadataExt, chown};
        let directory = tempfile::tempdir().unwrap();
        let kit = directory.path().join("kit");
        fs::create_dir(&kit).unwrap();
        fs::write(kit.join("key.nk"), "seed").unwrap();
        let to_another = chown(directory.path(), Some(61_234), Some(61_234));
        let owner = directory.path().metadata().unwrap().uid();
        assert_eq!(owner == 61_234, to_another.is_ok(), "only root can give it away");
        adopt(&kit).unwrap();
        assert_eq!(kit.join("key.nk").metadata().unwrap().uid(), owner);
        assert_eq!(kit.metadata().unwrap().uid(), owner);
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
        let kit = directory.path().join("kit");
        fs::create_dir(&kit).unwrap();
        fs::write(kit.join("key.nk"), "seed").unwrap();
        symlink(&shadow, kit.join("fleet.json")).unwrap();
        symlink(directory.path().join("nowhere"), kit.join("dangling")).unwrap();
        fs::hard_link(&twin, kit.join("twin")).unwrap();
        let before = shadow.metadata().unwrap().uid();
        // Only root can give anything away; others see that links are no errors.
        let _ = chown(directory.path(), Some(61_234), Some(61_234));
        adopt(&kit).unwrap();
        let owner = directory.path().metadata().unwrap().uid();
        assert_eq!(kit.join("key.nk").metadata().unwrap().uid(), owner);
        for path in [&shadow, &twin] {
            assert_eq!(path.metadata().unwrap().uid(), before, "{}", path.display());
        }
        let link = directory.path().join("link");
        symlink(elsewhere.path(), &link).unwrap();
        adopt(&link).unwrap_err();
        assert_eq!(elsewhere.path().metadata().unwrap().uid(), before);
    }
}
