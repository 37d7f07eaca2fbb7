//! The processes of this machine, from `/proc`.

use std::path::Path;

use rustix::process::Pid;

/// A process. Ids are reused, so a process is compared by its id and its arguments.
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

    /// Returns a process and all of its descendants.
    pub fn tree(root: u32) -> Vec<Self> {
        let all = Self::all();
        let mut tree: Vec<Self> = all.iter().filter(|one| one.id == root).cloned().collect();
        let mut next = 0;
        while let Some(parent) = tree.get(next).map(|one| one.id) {
            tree.extend(all.iter().filter(|one| one.parent == parent).cloned());
            next += 1;
        }
        tree
    }

    /// Returns true if one of its arguments is in the directory, or a file that it has open.
    pub fn uses_directory(&self, directory: &Path) -> bool {
        let name = directory.display().to_string();
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.id)).into_iter().flatten();
        let mut open = open.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        self.arguments.iter().any(|argument| argument.contains(&name))
            || open.any(|file| file.starts_with(directory))
    }

    /// Returns true if the process still runs, also under another parent.
    pub fn is_alive(&self) -> bool {
        Self::all().iter().any(|one| one.id == self.id && one.arguments == self.arguments)
    }

    /// Returns the member name that `flotilla up` uses: the `--name`, or else the first argument.
    pub fn member_name(&self) -> Option<&str> {
        let named = self.arguments.windows(2).find(|pair| pair[0] == "--name");
        named.map(|pair| &*pair[1]).or_else(|| self.arguments.get(1).map(String::as_str))
    }

    pub fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.id).ok()?)
    }
}
