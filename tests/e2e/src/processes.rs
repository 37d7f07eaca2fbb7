//! The processes of this machine, as `/proc` tells them.

use rustix::process::Pid;

/// A process. Its number alone may be another's by now, so its arguments count too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub id: u32,
    pub parent: u32,
    pub arguments: Vec<String>,
}

impl Process {
    pub fn all() -> Vec<Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let describe = |entry: std::fs::DirEntry| {
            let id = entry.file_name().into_string().ok()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?;
            let command = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let arguments = command.split_terminator('\0').map(str::to_owned).collect();
            Some(Self { id, parent, arguments })
        };
        entries.filter_map(describe).collect()
    }

    /// A process, its children, and theirs.
    pub fn family(root: u32) -> Vec<Self> {
        let all = Self::all();
        let mut family: Vec<Self> = all.iter().filter(|one| one.id == root).cloned().collect();
        let mut next = 0;
        while let Some(parent) = family.get(next).map(|one| one.id) {
            family.extend(all.iter().filter(|one| one.parent == parent).cloned());
            next += 1;
        }
        family
    }

    /// Whether it still runs, whoever its parent is by now.
    pub fn is_alive(&self) -> bool {
        Self::all().iter().any(|one| one.id == self.id && one.arguments == self.arguments)
    }

    /// What `flotilla up` calls it: an agent's name, or the first word it was given.
    pub fn member(&self) -> Option<&str> {
        let named = self.arguments.windows(2).find(|pair| pair[0] == "--name");
        named.map(|pair| &*pair[1]).or_else(|| self.arguments.get(1).map(String::as_str))
    }

    pub fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.id).ok()?)
    }
}
