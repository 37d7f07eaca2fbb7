use std::collections::BTreeMap;

use hardware::{
    HardwareProfile,
    host_files::{CapturedEntry, HostCapture},
    host_snapshot::{GpuInfo, StoredVariable},
    torch_environment::{TorchBuild, TorchEnvironment},
};

use super::*;
use crate::check_host;

const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nanna:x:1000:1000::/home/anna:/bin/bash\n";
const GRUB: &str = "GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT=\"quiet\"\n";

/// A Strix Halo with the kernel's default of mapped memory, and a user without the GPU's groups.
fn untreated_box() -> HostSnapshot {
    let gpu = GpuInfo {
        gfx: "gfx1151".into(),
        device_id: 0x1586,
        unified_memory: true,
        render: DeviceAccess::Usable,
        saves_wave_state: true,
        vram_total: 512 << 20,
        gtt_total: 62 << 30,
        ..GpuInfo::default()
    };
    let mut host =
        HostSnapshot { gpus: vec![gpu], kfd: DeviceAccess::Usable, ..HostSnapshot::default() };
    host.kernel.release = "6.18.9".into();
    host.kernel.swappiness = Some(60);
    host.memory.total = 124 << 30;
    host.memory.swap_total = 8 << 30;
    host.memory.swap_free = 8 << 30;
    host
}

fn capture(texts: &[(&str, &str)], programs: &[&str]) -> HostCapture {
    let files = texts
        .iter()
        .map(|(path, text)| ((*path).to_owned(), CapturedEntry::File(text.as_bytes().to_vec())));
    let names = programs.iter().map(|name| (*name).to_owned()).collect();
    let mut entries: BTreeMap<String, CapturedEntry> = files.collect();
    entries.insert("/usr/sbin".into(), CapturedEntry::Names(names));
    HostCapture { entries }
}

fn planned(host: &HostSnapshot, files: &HostCapture, user: &str) -> Vec<Fix> {
    let profile = HardwareProfile::for_host(host).unwrap();
    let findings = check_host(host, &profile);
    let (findings, profile, home) = (&findings[..], &profile, Some("/home/anna"));
    plan_fixes(&FixInputs { host, findings, profile, files, user, home })
}

fn ids(fixes: &[Fix]) -> Vec<Vec<&'static str>> {
    fixes.iter().map(|fix| fix.ids.clone()).collect()
}

#[test]
fn each_mechanical_remedy_is_planned_once_with_its_effect() {
    let group = "render:x:105:\nvideo:x:44:anna\n";
    let files = [("/etc/group", group), ("/etc/passwd", PASSWD), ("/etc/default/grub", GRUB)];
    let files = capture(&files, &["update-grub"]);
    let fixes = planned(&untreated_box(), &files, "anna");
    assert_eq!(ids(&fixes), [vec!["C-07", "C-08"], vec!["C-22"], vec!["C-31"]]);
    let effects: Vec<FixEffect> = fixes.iter().map(|fix| fix.takes_effect).collect();
    assert_eq!(effects, [FixEffect::Login, FixEffect::Reboot, FixEffect::Now]);
    assert!(fixes.iter().all(|fix| fix.needs_root(Some("/home/anna")) && fix.is_mechanical()));
    let joins =
        run_command(&["usermod", "-aG", "render", "anna"], &["gpasswd", "-d", "anna", "render"]);
    assert_eq!(fixes[0].changes, [joins]);
    let content = GRUB.replace("quiet", "quiet ttm.pages_limit=30408704");
    let written = FixChange::Write { path: "/etc/default/grub".into(), content };
    assert_eq!(fixes[1].changes, [written, repeat_command(&["update-grub"])]);
    let FixChange::Write { path, content } = &fixes[2].changes[0] else { panic!("{fixes:?}") };
    assert_eq!(path, SYSCTL_FILE);
    assert!(content.contains("vm.swappiness = 10\n"), "{content}");
    assert!(content.contains("vm.min_free_kbytes = 1048576\n"), "{content}");
    let swaps =
        run_command(&["sysctl", "-w", "vm.swappiness=10"], &["sysctl", "-w", "vm.swappiness=60"]);
    assert_eq!(fixes[2].changes[1], swaps);
}

#[test]
fn settings_that_go_further_than_the_remedy_stay() {
    let mut host = untreated_box();
    host.kernel.swappiness = Some(1);
    host.memory.swap_free = 0;
    let free = [("/proc/sys/vm/min_free_kbytes", "2097152\n")];
    let fixes = planned(&host, &capture(&free, &[]), "root");
    let settings = fixes.iter().find(|fix| fix.ids == ["C-32"]).unwrap();
    let FixChange::Write { content, .. } = &settings.changes[0] else { panic!("{settings:?}") };
    let expected = "# Written by `flotilla doctor --fix`.\nvm.compaction_proactiveness = 20\n";
    assert_eq!(content, expected);
    assert_eq!(settings.changes.len(), 2, "{settings:?}");
}

#[test]
fn a_box_without_a_known_boot_loader_gets_the_line_to_write() {
    let files = capture(&[("/etc/default/grub", GRUB)], &[]);
    let fixes = planned(&untreated_box(), &files, "root");
    let arguments = fixes.iter().find(|fix| fix.ids == ["C-22"]).unwrap();
    assert!(!arguments.is_mechanical(), "{arguments:?}");
    let [FixChange::Manual(line)] = &arguments.changes[..] else { panic!("{arguments:?}") };
    assert!(line.contains("add ttm.pages_limit=30408704"), "{line}");
}

#[test]
fn a_denied_user_with_the_groups_gets_a_udev_rule() {
    let host = HostSnapshot { kfd: DeviceAccess::Denied, ..untreated_box() };
    let group = "render:x:105:bob,anna\nvideo:x:1000:\n";
    let files = capture(&[("/etc/group", group), ("/etc/passwd", PASSWD)], &[]);
    let fixes = planned(&host, &files, "anna");
    let FixChange::Write { path, content } = &fixes[0].changes[0] else { panic!("{fixes:?}") };
    assert_eq!((path.as_str(), content.as_str()), (UDEV_FILE, UDEV_RULES));
    assert_eq!(fixes[0].changes.len(), 3);
}

#[test]
fn open_rules_lose_their_open_lines_alone() {
    let rule = "/etc/udev/rules.d/99-kfd.rules";
    let text = "# mine\nKERNEL==\"kfd\", MODE=\"0666\"\nKERNEL==\"fuse\", MODE=\"0666\"\n";
    let host = HostSnapshot { open_udev_rules: vec![rule.into()], ..untreated_box() };
    let files = capture(&[(rule, text)], &[]);
    let fixes = planned(&host, &files, "root");
    let closed = fixes.iter().find(|fix| fix.ids == ["C-09"]).unwrap();
    let content = "# mine\nKERNEL==\"fuse\", MODE=\"0666\"\n".to_owned();
    assert_eq!(closed.changes[0], FixChange::Write { path: rule.into(), content });
}

#[test]
fn a_stored_override_is_no_longer_set_in_the_user_s_own_file() {
    let stored = StoredVariable {
        file: "~/.bashrc".into(),
        name: "HSA_OVERRIDE_GFX_VERSION".into(),
        value: "11.0.0".into(),
    };
    let host = HostSnapshot { settings: vec![stored], ..untreated_box() };
    let files = capture(&[("/@home/.bashrc", "export HSA_OVERRIDE_GFX_VERSION=11.0.0\n")], &[]);
    let fixes = planned(&host, &files, "anna");
    let comment = fixes.iter().find(|fix| fix.ids == ["C-45"]).unwrap();
    assert!(!comment.needs_root(Some("/home/anna")), "{comment:?}");
    let [FixChange::Write { path, content }] = &comment.changes[..] else { panic!("{comment:?}") };
    assert_eq!(path, "/home/anna/.bashrc");
    assert!(content.starts_with(": # flotilla doctor --fix: export"), "{content}");
}

#[test]
fn each_stored_variable_that_harms_is_no_longer_set() {
    let zeros = "expandable_segments:True,max_split_size_mb:512";
    let plan = |name: &str, value: &str, line: &str, environment: &[(&str, &str)]| {
        let (file, name, value) = ("/etc/environment".to_owned(), name.into(), value.into());
        let settings = vec![StoredVariable { file, name, value }];
        let set = environment.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        let host = HostSnapshot { settings, environment: set.collect(), ..untreated_box() };
        let fixes = planned(&host, &capture(&[("/etc/environment", line)], &[]), "anna");
        fixes.into_iter().find(|fix| fix.summary.starts_with("leave "))
    };
    for (id, name, value) in [
        ("C-46", "PYTORCH_HIP_ALLOC_CONF", zeros),
        ("C-47", "HSA_DISABLE_CACHE", "1"),
        ("C-66", "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1"),
    ] {
        let line = format!("A=1\n{name}={value}\n");
        let fix = plan(name, value, &line, &[]).unwrap();
        assert_eq!(fix.ids, [id]);
        assert_eq!(fix.summary, format!("leave {name} unset in /etc/environment"));
        let content = format!("A=1\n# flotilla doctor --fix: {name}={value}\n");
        assert_eq!(fix.changes, [FixChange::Write { path: "/etc/environment".into(), content }]);
        // The snapshot has no values in quotes.
        let quoted = format!("{name}=\"{value}\"\n");
        assert_eq!(plan(name, "", &quoted, &[(name, value)]).unwrap().ids, [id]);
    }
    assert_eq!(plan("HSA_DISABLE_CACHE", "0", "HSA_DISABLE_CACHE=0\n", &[]), None);
    let (harmless, line) = ("max_split_size_mb:512", "PYTORCH_ALLOC_CONF=max_split_size_mb:512\n");
    assert_eq!(plan("PYTORCH_ALLOC_CONF", harmless, line, &[]), None);
}

#[test]
fn a_container_and_a_box_without_a_gpu_are_left_alone() {
    let files = capture(&[("/etc/default/grub", GRUB)], &["update-grub"]);
    let mut host = untreated_box();
    host.kernel.container = Some("podman".into());
    assert_eq!(planned(&host, &files, "anna"), []);
    assert_eq!(planned(&HostSnapshot::default(), &files, "anna"), []);
}

/// Returns a box whose environment has a torch that is not known to work.
fn box_with_another_torch() -> HostSnapshot {
    let torch = TorchBuild { version: "2.9.1+rocm6.4".into(), ..TorchBuild::default() };
    let python = TorchEnvironment { torch: Some(torch), ..TorchEnvironment::default() };
    HostSnapshot { python: Some(python), ..untreated_box() }
}

#[test]
fn a_stack_that_is_installed_is_only_used() {
    let manifest = "/@home/.flotilla/stacks/torch-2.11.0+rocm7.13.0/stack.json";
    let fixes = planned(&box_with_another_torch(), &capture(&[(manifest, "{}")], &[]), "anna");
    let stack = fixes.last().unwrap();
    let [FixChange::Run { command, .. }] = &stack.changes[..] else { panic!("{stack:?}") };
    assert!(command.join(" ").starts_with("flotilla stack use torch-"), "{stack:?}");
}

#[test]
fn an_environment_with_another_torch_gets_the_stack_of_the_profile() {
    let fixes = planned(&box_with_another_torch(), &capture(&[], &[]), "anna");
    let stack = fixes.last().unwrap();
    assert!(stack.ids.contains(&"C-67"), "{stack:?}");
    assert!(!stack.needs_root(None), "{stack:?}");
    let FixChange::Run { command, undo } = &stack.changes[1] else { panic!("{stack:?}") };
    let used = "flotilla stack use torch-2.11.0+rocm7.13.0 --out /home/anna/.flotilla/burn-in.json";
    assert_eq!(command.join(" "), used);
    assert_eq!(undo.join(" "), "flotilla stack roll-back --from torch-2.11.0+rocm7.13.0");
}
