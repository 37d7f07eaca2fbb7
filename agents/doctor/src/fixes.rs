//! Mechanical remedies of findings: the files to write and the commands to run, and what undoes
//! them. Plans only; nothing is changed here.

mod kernel_arguments;
mod stored_variables;

use std::collections::BTreeSet;

use hardware::{
    HardwareProfile,
    host_files::HostFiles,
    host_snapshot::{DeviceAccess, HostSnapshot},
};

use crate::DoctorFinding;

/// A mechanical remedy of one or more findings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fix {
    /// The findings that it removes, such as `C-22`.
    pub ids: Vec<&'static str>,
    pub summary: String,
    /// In their order.
    pub changes: Vec<FixChange>,
    pub takes_effect: FixEffect,
}

/// One change of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FixChange {
    /// Writes a text file. A new one gets mode 644; an existing one keeps its mode.
    Write { path: String, content: String },
    /// Runs a program with its arguments. `undo` is run to take it back, once the files are as they
    /// were; empty if there is nothing to take back.
    Run { command: Vec<String>, undo: Vec<String> },
    /// A line for the person, because the change cannot be made safely.
    Manual(String),
}

/// The time at which a change takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FixEffect {
    Now,
    /// After the user's next login.
    Login,
    Reboot,
}

/// The input of a plan.
pub struct FixInputs<'a> {
    pub host: &'a HostSnapshot,
    pub findings: &'a [DoctorFinding],
    pub profile: &'a HardwareProfile,
    /// The files of the host; the user's home is at its virtual path.
    pub files: &'a dyn HostFiles,
    /// The user who is to use the GPU.
    pub user: &'a str,
    /// The user's home directory, if it is known.
    pub home: Option<&'a str>,
}

/// The virtual path of the user's home.
const VIRTUAL_HOME: &str = "/@home";

/// The name of our own program in commands.
const PROGRAM: &str = "flotilla";

/// The findings about a Python environment that another torch removes.
const TORCH_IDS: [&str; 7] = ["C-21", "C-41", "C-43", "C-44", "C-55", "C-56", "C-67"];

/// Our file of kernel settings.
const SYSCTL_FILE: &str = "/etc/sysctl.d/90-flotilla.conf";
const UDEV_FILE: &str = "/etc/udev/rules.d/70-flotilla-gpu.rules";

/// Gives the GPU's devices to the group, as systemd's own rules do.
const UDEV_RULES: &str = "\
# Written by `flotilla doctor --fix`; `flotilla doctor --undo` removes it.
SUBSYSTEM==\"kfd\", KERNEL==\"kfd\", GROUP=\"render\", MODE=\"0660\"
SUBSYSTEM==\"drm\", KERNEL==\"renderD*\", GROUP=\"render\", MODE=\"0660\"
";

/// The most that C-31 accepts.
const SWAPPINESS: u64 = 10;
/// Kept free for atomic allocations.
const FREE_KBYTES_MIN: u64 = 1 << 20;

/// The memory from which a GiB is kept free for atomic allocations.
const LARGE_MEMORY_BYTES: u64 = 64 << 30;

impl Fix {
    /// Returns true if only root can apply it: it changes files outside of the user's home, or runs
    /// a command.
    pub fn needs_root(&self, home: Option<&str>) -> bool {
        self.changes.iter().any(|change| match change {
            FixChange::Write { path, .. } => {
                !home.is_some_and(|home| path.starts_with(&format!("{home}/")))
            }
            // Our own program changes only files of its user.
            FixChange::Run { command, .. } => command.first().is_none_or(|it| it != PROGRAM),
            FixChange::Manual(_) => false,
        })
    }

    /// Returns true if there is something to apply.
    pub fn is_mechanical(&self) -> bool {
        self.changes.iter().any(|change| !matches!(change, FixChange::Manual(_)))
    }
}

/// Plans a fix for each finding that has a mechanical remedy. A container gets no fixes, because its
/// host has to be changed.
pub fn plan_fixes(inputs: &FixInputs<'_>) -> Vec<Fix> {
    if inputs.host.kernel.container.is_some() || inputs.host.gpus.is_empty() {
        return Vec::new();
    }
    let mut fixes = Vec::new();
    fixes.extend(plan_access(inputs));
    fixes.extend(plan_closed_rules(inputs));
    fixes.extend(kernel_arguments::plan_arguments(inputs));
    fixes.extend(plan_sysctl(inputs));
    fixes.extend(stored_variables::plan_variables(inputs));
    fixes.extend(plan_stack(inputs));
    fixes
}

impl FixInputs<'_> {
    fn is_found(&self, id: &str) -> bool {
        self.findings.iter().any(|finding| finding.id == id)
    }

    fn read_text(&self, path: &str) -> Option<String> {
        String::from_utf8(self.files.read(path).ok()?).ok()
    }

    fn has_program(&self, name: &str) -> bool {
        let mut directories = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].into_iter();
        directories.any(|place| self.files.list_names(place).iter().any(|it| it == name))
    }
}

pub(crate) fn run_command(command: &[&str], undo: &[&str]) -> FixChange {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    FixChange::Run { command: words(command), undo: words(undo) }
}

/// Returns a command that a later change of the same files needs, too.
pub(crate) fn repeat_command(command: &[&str]) -> FixChange {
    run_command(command, command)
}

fn reload_udev() -> [FixChange; 2] {
    let trigger = ["udevadm", "trigger", "--subsystem-match=kfd", "--subsystem-match=drm"];
    [repeat_command(&["udevadm", "control", "--reload-rules"]), repeat_command(&trigger)]
}

/// Adds the user to the groups of the GPU's devices; one who is in them gets a udev rule that gives
/// the devices to the group.
fn plan_access(inputs: &FixInputs<'_>) -> Option<Fix> {
    let FixInputs { host, user, .. } = inputs;
    let denied = host.kfd == DeviceAccess::Denied
        || host.gpus.iter().any(|gpu| gpu.render == DeviceAccess::Denied);
    // Root may open everything, so only the lists of groups show what its user may not.
    let missing = missing_groups(inputs);
    let ids = vec!["C-07", "C-08"];
    if !missing.is_empty() && *user != "root" {
        let changes = missing.iter().map(|group| {
            run_command(&["usermod", "-aG", group, user], &["gpasswd", "-d", user, group])
        });
        return Some(Fix {
            ids,
            summary: format!("let {user} use the GPU: add it to {}", missing.join(" and ")),
            changes: changes.collect(),
            takes_effect: FixEffect::Login,
        });
    }
    denied.then(|| Fix {
        ids,
        summary: "give the GPU's devices to the group render by a udev rule".to_owned(),
        changes: [FixChange::Write { path: UDEV_FILE.to_owned(), content: UDEV_RULES.to_owned() }]
            .into_iter()
            .chain(reload_udev())
            .collect(),
        takes_effect: FixEffect::Now,
    })
}

/// Returns those of `render` and `video` that exist and lack the user.
fn missing_groups(inputs: &FixInputs<'_>) -> Vec<String> {
    let (groups, users) = (inputs.read_text("/etc/group"), inputs.read_text("/etc/passwd"));
    let (groups, users) = (groups.unwrap_or_default(), users.unwrap_or_default());
    let own = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let primary = own.filter(|fields| fields.first() == Some(&inputs.user));
    let primary: BTreeSet<&str> = primary.filter_map(|fields| fields.get(3).copied()).collect();
    let is_missing = |line: &&str| {
        let fields: Vec<&str> = line.split(':').collect();
        let ["render" | "video", _, number, members] = fields[..] else { return false };
        let listed = members.split(',').any(|member| member == inputs.user);
        !listed && !primary.contains(number)
    };
    let lines = groups.lines().filter(is_missing);
    lines.filter_map(|line| line.split(':').next()).map(str::to_owned).collect()
}

/// Removes the lines that open the GPU to all users from udev's rules.
fn plan_closed_rules(inputs: &FixInputs<'_>) -> Option<Fix> {
    if !inputs.is_found("C-09") {
        return None;
    }
    let opens = |line: &str| {
        line.contains("0666") && line.contains("kfd") && !line.trim_start().starts_with('#')
    };
    let mut changes = Vec::new();
    for path in &inputs.host.open_udev_rules {
        let text = inputs.read_text(path)?;
        let kept = text.split_inclusive('\n').filter(|line| !opens(line)).collect();
        changes.push(FixChange::Write { path: path.clone(), content: kept });
    }
    changes.extend(reload_udev());
    Some(Fix {
        ids: vec!["C-09"],
        summary: "close the GPU to users outside of its groups".to_owned(),
        changes,
        takes_effect: FixEffect::Now,
    })
}

/// Makes the kernel swap late, as the pages of a GPU with unified memory need it. Settings that go
/// further stay.
fn plan_sysctl(inputs: &FixInputs<'_>) -> Option<Fix> {
    let ids: Vec<&'static str> =
        ["C-31", "C-32"].into_iter().filter(|id| inputs.is_found(id)).collect();
    if ids.is_empty() {
        return None;
    }
    let kernel = &inputs.host.kernel;
    let mut settings = Vec::new();
    if kernel.swappiness.is_none_or(|before| before > SWAPPINESS) {
        settings.push(("vm.swappiness", SWAPPINESS, kernel.swappiness));
    }
    settings.push(("vm.compaction_proactiveness", 20, kernel.compaction_proactiveness));
    if inputs.host.memory.total >= LARGE_MEMORY_BYTES {
        let before = inputs.read_text("/proc/sys/vm/min_free_kbytes");
        let before: Option<u64> = before.and_then(|text| text.trim().parse().ok());
        if before.is_none_or(|before| before < FREE_KBYTES_MIN) {
            settings.push(("vm.min_free_kbytes", FREE_KBYTES_MIN, before));
        }
    }
    let mut content = "# Written by `flotilla doctor --fix`.\n".to_owned();
    let mut changes = Vec::new();
    for (name, value, before) in settings {
        content.push_str(&format!("{name} = {value}\n"));
        let set = format!("{name}={value}");
        let undo = before.map(|before: u64| format!("{name}={before}"));
        let undo: Vec<&str> =
            undo.iter().flat_map(|undo| ["sysctl", "-w", undo.as_str()]).collect();
        changes.push(run_command(&["sysctl", "-w", &set], &undo));
    }
    changes.insert(0, FixChange::Write { path: SYSCTL_FILE.to_owned(), content });
    let summary = "let the kernel swap late".to_owned();
    Some(Fix { ids, summary, changes, takes_effect: FixEffect::Now })
}

/// Installs the PyTorch that is known to work, unless it is, and burns the box in with it.
fn plan_stack(inputs: &FixInputs<'_>) -> Option<Fix> {
    let stack = inputs.profile.stack.as_ref().filter(|_| inputs.host.python.is_some())?;
    let ids: Vec<&'static str> = TORCH_IDS.into_iter().filter(|id| inputs.is_found(id)).collect();
    let name = format!("torch-{}", stack.torch);
    let mut changes = Vec::new();
    let manifest = format!("{VIRTUAL_HOME}/.flotilla/stacks/{name}/stack.json");
    if inputs.files.read(&manifest).is_err() {
        changes.push(run_command(&[PROGRAM, "stack", "install", &name, "--torch"], &[]));
    }
    // Under sudo, the working directory is the caller's and of any owner.
    let report = inputs.home.map(|home| format!("{home}/.flotilla/burn-in.json"));
    let report = report.iter().flat_map(|report| ["--out", report.as_str()]);
    let tried = [PROGRAM, "stack", "use", name.as_str()].into_iter();
    let tried: Vec<&str> = tried.chain(report).collect();
    let undo = [PROGRAM, "stack", "roll-back", "--from", name.as_str()];
    changes.push(run_command(&tried, &undo));
    let summary = format!("train with torch {}, which is known to work here", stack.torch);
    let is_wanted = !ids.is_empty();
    is_wanted.then_some(Fix { ids, summary, changes, takes_effect: FixEffect::Now })
}

#[cfg(test)]
mod tests;
