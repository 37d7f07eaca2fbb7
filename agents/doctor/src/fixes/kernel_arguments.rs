//! Arguments of the kernel's command line, by the boot loader that a host has. A file is only edited
//! if its form is the usual one; otherwise the person gets the line to write.

use super::{Fix, FixChange, FixEffect, FixInputs, repeat_command};

const GIB: u64 = 1 << 30;
const TTM_PAGE_BYTES: u64 = 4096;
/// The memory that stays the host's.
const HOST_BYTES: u64 = 8 * GIB;

const GRUB_FILE: &str = "/etc/default/grub";
const GRUB_KEY: &str = "GRUB_CMDLINE_LINUX_DEFAULT=";
const KERNEL_FILE: &str = "/etc/kernel/cmdline";

/// The arguments to add and the ones to remove, by name or as they are.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ArgumentChange {
    ids: Vec<&'static str>,
    add: Vec<String>,
    remove: Vec<&'static str>,
}

/// Plans one change for all findings about the command line.
pub(super) fn plan_arguments(inputs: &FixInputs<'_>) -> Option<Fix> {
    let change = wanted_change(inputs);
    if change.ids.is_empty() {
        return None;
    }
    let described = [
        (!change.add.is_empty()).then(|| format!("add {}", change.add.join(" "))),
        (!change.remove.is_empty()).then(|| format!("remove {}", change.remove.join(" "))),
    ];
    let described: Vec<String> = described.into_iter().flatten().collect();
    let described = described.join(", ");
    let changes = change_boot_loader(inputs, &change).unwrap_or_else(|| {
        let line =
            format!("on the kernel's command line, by the boot loader of this box: {described}");
        vec![FixChange::Manual(line)]
    });
    Some(Fix {
        summary: format!("kernel command line: {described}"),
        ids: change.ids,
        changes,
        takes_effect: FixEffect::Reboot,
    })
}

fn wanted_change(inputs: &FixInputs<'_>) -> ArgumentChange {
    let mut change = ArgumentChange::default();
    let line = &inputs.host.kernel.command_line;
    let total = inputs.host.memory.total;
    if (inputs.is_found("C-22") || inputs.is_found("C-23")) && total > 2 * HOST_BYTES {
        change.ids.extend(["C-22", "C-23"].into_iter().filter(|id| inputs.is_found(id)));
        change.add.push(format!("ttm.pages_limit={}", (total - HOST_BYTES) / TTM_PAGE_BYTES));
        if line.split_whitespace().any(|word| word.starts_with("amdgpu.gttsize=")) {
            change.remove.push("amdgpu.gttsize");
        }
    }
    if inputs.is_found("C-24") {
        change.ids.push("C-24");
        change.add.push("iommu=pt".to_owned());
        change.remove.push("amd_iommu=off");
    }
    change
}

/// Returns `None` if no known boot loader can be changed safely.
fn change_boot_loader(inputs: &FixInputs<'_>, change: &ArgumentChange) -> Option<Vec<FixChange>> {
    if inputs.has_program("grubby") {
        return Some(change_with_grubby(change, &inputs.host.kernel.command_line));
    }
    if inputs.has_program("proxmox-boot-tool")
        && let Some(text) = inputs.read_text(KERNEL_FILE)
    {
        let content = edit_kernel_file(&text, change)?;
        return Some(vec![
            FixChange::Write { path: KERNEL_FILE.to_owned(), content },
            repeat_command(&["proxmox-boot-tool", "refresh"]),
        ]);
    }
    let content = edit_grub_file(&inputs.read_text(GRUB_FILE)?, change)?;
    let update: &[&str] = if inputs.has_program("update-grub") {
        &["update-grub"]
    } else if inputs.has_program("grub-mkconfig") {
        &["grub-mkconfig", "-o", "/boot/grub/grub.cfg"]
    } else {
        return None;
    };
    Some(vec![FixChange::Write { path: GRUB_FILE.to_owned(), content }, repeat_command(update)])
}

/// Fedora's tool changes the entries of all installed kernels. To add an argument replaces its other
/// values, so that an undo adds those, and removes only names that were not there.
fn change_with_grubby(change: &ArgumentChange, running: &str) -> Vec<FixChange> {
    let words = || running.split_whitespace();
    let is_removed = |word: &&str| change.remove.iter().any(|name| is_argument(word, name));
    let removed: Vec<&str> = words().filter(is_removed).collect();
    let is_new = |added: &&String| !words().any(|word| is_argument(word, argument_name(added)));
    let new: Vec<&str> = change.add.iter().filter(is_new).map(String::as_str).collect();
    let is_replaced = |word: &&str| {
        change.add.iter().any(|added| is_argument(word, argument_name(added)) && word != added)
    };
    let before: Vec<&str> = words().filter(|word| is_removed(word) || is_replaced(word)).collect();
    let one = |add: &str, remove: &str| {
        if add.is_empty() && remove.is_empty() {
            return Vec::new();
        }
        let mut words = vec!["grubby".to_owned(), "--update-kernel=ALL".to_owned()];
        words.extend((!add.is_empty()).then(|| format!("--args={add}")));
        words.extend((!remove.is_empty()).then(|| format!("--remove-args={remove}")));
        words
    };
    let command = one(&change.add.join(" "), &removed.join(" "));
    vec![FixChange::Run { command, undo: one(&before.join(" "), &new.join(" ")) }]
}

fn argument_name(word: &str) -> &str {
    word.split('=').next().unwrap_or(word)
}

/// Returns true for `name`, and for `name=value`.
fn is_argument(word: &str, name: &str) -> bool {
    word == name || word.strip_prefix(name).is_some_and(|rest| rest.starts_with('='))
}

fn change_words(words: &str, change: &ArgumentChange) -> String {
    let replaced =
        |word: &str| change.add.iter().any(|added| is_argument(word, argument_name(added)));
    let kept = words.split_whitespace().filter(|word| {
        !replaced(word) && !change.remove.iter().any(|name| is_argument(word, name))
    });
    kept.chain(change.add.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
}

/// Edits a file with one line, the whole command line.
fn edit_kernel_file(text: &str, change: &ArgumentChange) -> Option<String> {
    let line = text.trim_end_matches('\n');
    (!line.is_empty() && !line.contains('\n')).then(|| change_words(line, change) + "\n")
}

/// Edits the one line `GRUB_CMDLINE_LINUX_DEFAULT="…"` of a file. Returns `None` for a file without
/// it or with several, and for a line that a shell would read in another way.
pub(super) fn edit_grub_file(text: &str, change: &ArgumentChange) -> Option<String> {
    let (mut offset, mut found) = (0, None);
    for line in text.split_inclusive('\n') {
        if line.starts_with(GRUB_KEY)
            && found.replace((offset, line.trim_end_matches('\n'))).is_some()
        {
            return None;
        }
        offset += line.len();
    }
    let (start, line) = found?;
    let quoted = line.strip_prefix(GRUB_KEY)?.strip_prefix('"')?.strip_suffix('"')?;
    if quoted.contains(['"', '\'', '$', '`', '\\']) {
        return None;
    }
    let edited = format!("{GRUB_KEY}\"{}\"", change_words(quoted, change));
    let mut changed = text.to_owned();
    changed.replace_range(start..start + line.len(), &edited);
    Some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> ArgumentChange {
        ArgumentChange {
            ids: vec!["C-22"],
            add: vec!["ttm.pages_limit=30408704".into(), "iommu=pt".into()],
            remove: vec!["amdgpu.gttsize", "amd_iommu=off"],
        }
    }

    #[test]
    fn the_line_of_grub_is_edited_and_every_other_byte_kept() {
        let text = "# GRUB_CMDLINE_LINUX_DEFAULT=\"old\"\nGRUB_DEFAULT=0\n\
                    GRUB_CMDLINE_LINUX_DEFAULT=\"quiet amdgpu.gttsize=1 amd_iommu=off ttm.pages_limit=5\"\n\
                    GRUB_CMDLINE_LINUX=\"\"";
        let edited = edit_grub_file(text, &change()).unwrap();
        let expected = text.replace(
            "quiet amdgpu.gttsize=1 amd_iommu=off ttm.pages_limit=5",
            "quiet ttm.pages_limit=30408704 iommu=pt",
        );
        assert_eq!(edited, expected);
        assert_eq!(edit_grub_file(&edited, &change()).unwrap(), edited, "a second time");
    }

    #[test]
    fn a_comment_with_the_same_text_stays() {
        let line = "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet\"\n";
        let edited = edit_grub_file(&format!("# was: {line}{line}"), &change()).unwrap();
        let changed = line.replace("quiet", "quiet ttm.pages_limit=30408704 iommu=pt");
        assert_eq!(edited, format!("# was: {line}{changed}"));
    }

    #[test]
    fn an_unusual_line_of_grub_is_left_to_the_person() {
        for text in [
            "GRUB_DEFAULT=0\n",
            "GRUB_CMDLINE_LINUX_DEFAULT=quiet\n",
            "GRUB_CMDLINE_LINUX_DEFAULT='quiet'\n",
            "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet $MORE\"\n",
            "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet\" # why\n",
            "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet\"\nGRUB_CMDLINE_LINUX_DEFAULT=\"splash\"\n",
        ] {
            assert_eq!(edit_grub_file(text, &change()), None, "{text}");
        }
    }

    #[test]
    fn a_file_with_the_whole_line_keeps_its_other_words() {
        let edited = edit_kernel_file("root=ZFS=rpool/ROOT quiet amd_iommu=off\n", &change());
        let expected = "root=ZFS=rpool/ROOT quiet ttm.pages_limit=30408704 iommu=pt\n";
        assert_eq!(edited.unwrap(), expected);
        assert_eq!(edit_kernel_file("a\nb\n", &change()), None);
        assert_eq!(edit_kernel_file("\n", &change()), None);
    }

    #[test]
    fn grubby_takes_back_what_it_changed() {
        let changes = change_with_grubby(&change(), "quiet amdgpu.gttsize=131072 amd_iommu=off");
        let [FixChange::Run { command, undo }] = &changes[..] else { panic!("{changes:?}") };
        let added = "ttm.pages_limit=30408704 iommu=pt";
        let removed = "amdgpu.gttsize=131072 amd_iommu=off";
        assert_eq!(command[2..], [format!("--args={added}"), format!("--remove-args={removed}")]);
        assert_eq!(undo[2..], [format!("--args={removed}"), format!("--remove-args={added}")]);
    }

    #[test]
    fn grubby_gives_back_what_was_replaced_and_leaves_what_was_there() {
        let changes = change_with_grubby(&change(), "quiet ttm.pages_limit=5 iommu=pt");
        let [FixChange::Run { command, undo }] = &changes[..] else { panic!("{changes:?}") };
        assert_eq!(command[2..], ["--args=ttm.pages_limit=30408704 iommu=pt"]);
        assert_eq!(undo[2..], ["--args=ttm.pages_limit=5"]);
        let wanted = ArgumentChange { add: vec!["iommu=pt".into()], ..ArgumentChange::default() };
        let changes = change_with_grubby(&wanted, "quiet iommu=pt");
        let [FixChange::Run { undo, .. }] = &changes[..] else { panic!("{changes:?}") };
        assert_eq!(*undo, [""; 0], "there is nothing to take back");
    }
}
