use super::*;
use crate::host_files::{CapturedEntry, LiveFiles, NameFilter, RecordingFiles};

/// Creates a root directory with these files.
fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let place = root.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(place, content).unwrap();
    }
    root
}

const CPU_NODE: &str = "cpu_cores_count 12\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\n";

fn gpu_node(version: u32, minor: u32) -> String {
    format!(
        "cpu_cores_count 0\nsimd_count 64\ngfx_target_version {version}\nvendor_id 4098\n\
         device_id 5510\nlocal_mem_size 0\nunique_id 7607916237085355008\n\
         drm_render_minor {minor}\n"
    )
}

#[test]
fn ordinals_count_gpus_in_the_order_of_their_nodes() {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let (second, first) = (gpu_node(90_012, 129), gpu_node(90_006, 128));
    let root = root(&[
        (&format!("{nodes}/0/properties"), CPU_NODE),
        (&format!("{nodes}/10/properties"), &second),
        (&format!("{nodes}/2/properties"), &first),
        ("/sys/class/drm/renderD128/device/mem_info_vram_total", "34342961152\n"),
        ("/sys/class/drm/renderD129/device/power/runtime_status", "suspended\n"),
        ("/sys/class/drm/renderD129/device/mem_info_vram_total", "536870912\n"),
    ]);
    let seen = HostSnapshot::take_snapshot(&LiveFiles::new(root.path()));
    let gpus: Vec<_> = seen.gpus.iter().map(|gpu| (gpu.gfx.as_str(), gpu.ordinal)).collect();
    assert_eq!(gpus, [("gfx906", 0), ("gfx90c", 1)]);
    assert_eq!(seen.gpus[0].vram_total, 34_342_961_152);
    assert!(seen.gpus[1].suspended && seen.gpus[1].vram_total == 0, "a sleeping card is let be");
    assert_eq!(seen.main_gpu().unwrap().gfx, "gfx906");
}

#[test]
fn a_capture_gives_the_same_snapshot_and_holds_only_what_was_read() {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let node = gpu_node(110_501, 128);
    let root = root(&[
        (&format!("{nodes}/1/properties"), &node),
        ("/proc/meminfo", "MemTotal:       130000000 kB\nMemAvailable: 120000000 kB\n"),
        ("/proc/cpuinfo", "processor\t: 0\nmodel name\t: X\nflags\t\t: fpu wbnoinvd invpcid\n"),
        ("/proc/self/environ", "SECRET=1\0HSA_OVERRIDE_GFX_VERSION=11.5.1\0"),
        ("/etc/os-release", "ID=ubuntu\nVERSION_ID=\"24.04\"\n"),
        ("/proc/cmdline", "root=UUID=secret-disk amd_iommu=off ttm.pages_limit=5 quiet\n"),
        ("/etc/group", "root:x:0:\nrender:x:105:secret-user\nsecret-group:x:9:\n"),
        ("/home/me/secret", "private"),
        ("/sys/class/kfd/kfd/proc/7/vram_51887", "21474836480\n"),
        ("/proc/7/comm", "python3\n"),
        (
            "/proc/7/maps",
            "7f10-7f20 r-xp 0 08:01 5 /opt/rocm-7.12.0/lib/libhsa-runtime64.so.1.18\n\
             7f20-7f30 r-xp 0 08:01 6 /home/secret/venv/torch/lib/libamdhip64.so\n\
             7f30-7f40 r-xp 0 08:01 7 /home/secret/other.so\n",
        ),
    ]);
    let live = LiveFiles::new(root.path());
    let recording = RecordingFiles::new(&live);
    let seen = HostSnapshot::take_snapshot(&recording);
    let capture = recording.into_capture();
    assert_eq!(HostSnapshot::take_snapshot(&capture), seen);
    assert_eq!(seen.kernel.distribution, "ubuntu 24.04");
    assert!(!seen.cpu.invlpgb, "wbnoinvd and invpcid are other instructions");
    assert_eq!(seen.memory.total, 130_000_000 * 1024);
    assert_eq!(seen.environment.len(), 1);
    let process = &seen.gpu_processes[0];
    assert_eq!((process.pid, process.vram_bytes), (7, 20 << 30));
    assert_eq!(process.runtimes, ["/opt/rocm-7.12.0", "elsewhere"].map(str::to_owned).into());
    assert_eq!(seen.kernel.command_line, "amd_iommu=off ttm.pages_limit=5");
    assert_eq!(seen.gpu_groups, [("render".to_owned(), 105)].into());
    for (path, seen) in &capture.entries {
        let CapturedEntry::File(bytes) = seen else { continue };
        let text = String::from_utf8_lossy(bytes).to_lowercase();
        assert!(
            !text.contains("secret") && !text.contains("unique_id") && !path.contains("/home/"),
            "{path}: {text}"
        );
    }
}

#[test]
fn a_sleeping_card_s_size_is_the_driver_s_own_note() {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let node = gpu_node(120_001, 128) + "location_id 49408\ndomain 0\n";
    let root = root(&[
        (&format!("{nodes}/1/properties"), &node),
        (&format!("{nodes}/1/mem_banks/0/properties"), "heap_type 1\nsize_in_bytes 34208743424\n"),
        ("/sys/class/drm/renderD128/device/power/runtime_status", "suspended\n"),
        ("/sys/class/drm/renderD128/device/mem_info_vram_used", "5\n"),
    ]);
    let seen = HostSnapshot::take_snapshot(&LiveFiles::new(root.path()));
    assert_eq!((seen.gpus[0].vram_total, seen.gpus[0].vram_used), (34_208_743_424, 0));
    assert_eq!(seen.gpus[0].pci, "0000:c1:00.0", "where there is no link, the driver's note");
}

#[test]
fn a_named_environment_and_home_are_captured_without_their_owner() {
    let root = root(&[
        ("/home/secret/venv/pyvenv.cfg", "home = /home/secret/.pyenv\nversion = 3.12.4\n"),
        (
            "/home/secret/venv/lib/python3.12/site-packages/torch/version.py",
            "__version__ = '2.4.1+rocm6.0'\n",
        ),
        ("/home/secret/venv/lib/python3.12/site-packages/secret-1.0.dist-info/METADATA", ""),
        ("/etc/profile.d/secret.sh", "export TOKEN=secret\n"),
        ("/etc/ld.so.conf.d/secret.conf", "/opt/secret/lib\n"),
        ("/etc/udev/rules.d/70-secret.rules", "KERNEL==\"secret\"\n"),
        ("/home/secret/.bashrc", "export TOKEN=secret HSA_OVERRIDE_GFX_VERSION=9.0.6\n"),
    ]);
    let home = root.path().join("home/secret");
    let live = LiveFiles::new(root.path())
        .with_python(&home.join("venv/bin/python"))
        .with_home(&home)
        .with_data(&home.join("not/there/yet"));
    let recording = RecordingFiles::new(&live);
    let seen = HostSnapshot::take_snapshot(&recording);
    let capture = recording.into_capture();
    assert_eq!(HostSnapshot::take_snapshot(&capture), seen);
    let python = seen.python.unwrap();
    assert_eq!(
        (python.python.as_deref(), python.torch.unwrap().version.as_str()),
        (Some("3.12"), "2.4.1+rocm6.0")
    );
    assert_eq!(
        (seen.settings[0].file.as_str(), seen.settings[0].value.as_str()),
        ("~/.bashrc", "9.0.6")
    );
    assert!(seen.disk_free.is_some());
    let all = format!("{:?}", capture.entries.keys());
    assert!(!all.contains("secret"), "{all}");
    for seen in capture.entries.values() {
        match seen {
            CapturedEntry::File(bytes) => {
                assert!(!String::from_utf8_lossy(bytes).contains("secret"));
            }
            CapturedEntry::Names(names) => {
                assert!(!names.iter().any(|name| name.contains("secret")));
            }
            _ => {}
        }
    }
}

/// A host on which some paths must not be read or opened.
struct Watched<'a> {
    files: &'a dyn HostFiles,
    touched: std::cell::RefCell<Vec<String>>,
}

impl HostFiles for Watched<'_> {
    fn read(&self, path: &str) -> std::io::Result<Vec<u8>> {
        self.touched.borrow_mut().push(path.to_owned());
        self.files.read(path)
    }

    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String> {
        self.files.list_filtered(path, keep)
    }

    fn open_device(&self, path: &str) -> std::io::Result<()> {
        self.touched.borrow_mut().push(path.to_owned());
        self.files.open_device(path)
    }

    fn check_permission(&self, path: &str) -> std::io::Result<()> {
        self.files.check_permission(path)
    }

    fn read_link(&self, path: &str) -> Option<String> {
        self.files.read_link(path)
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        self.files.free_bytes(path)
    }
}

#[test]
fn nothing_that_wakes_a_sleeping_card_is_touched() {
    let nodes = "/sys/class/kfd/kfd/topology/nodes";
    let device = "/sys/class/drm/renderD128/device";
    let look = |status: &str| {
        let root = root(&[
            (&format!("{nodes}/1/properties"), &gpu_node(120_001, 128)),
            (&format!("{device}/power/runtime_status"), status),
            (&format!("{device}/mem_info_vram_total"), "34208743424\n"),
            ("/dev/dri/renderD128", ""),
        ]);
        let live = LiveFiles::new(root.path());
        let watched = Watched { files: &live, touched: Default::default() };
        assert_eq!(HostSnapshot::take_snapshot(&watched).gpus[0].render, DeviceAccess::Usable);
        let waking = |path: &String| path.contains("mem_info") || path.starts_with("/dev/dri");
        watched.touched.into_inner().iter().filter(|path| waking(path)).count()
    };
    assert_eq!(look("suspended\n"), 0);
    assert!(look("active\n") > 1);
}
