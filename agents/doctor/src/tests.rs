use super::*;
use hardware::host_snapshot::{DeviceAccess, GpuInfo, GpuProcess, KernelModule, StoredVariable};

/// A healthy Strix Halo. Its values are composed from several captured hosts.
fn halo() -> HostSnapshot {
    let mut it = HostSnapshot {
        kfd: DeviceAccess::Usable,
        gpus: vec![GpuInfo {
            gfx: "gfx1151".into(),
            device_id: 0x1586,
            unified_memory: true,
            render_minor: 128,
            render: DeviceAccess::Usable,
            saves_wave_state: true,
            vram_total: 512 << 20,
            gtt_total: 112 << 30,
            mes_firmware: Some(0x88),
            ..GpuInfo::default()
        }],
        ..HostSnapshot::default()
    };
    it.kernel.release = "6.18.9".into();
    it.memory.total = 124 << 30;
    it.memory.available = 118 << 30;
    (it.memory.swap_total, it.memory.swap_free) = (8 << 30, 8 << 30);
    it.cpu.model = "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S".into();
    it
}

fn card(gfx: &str, ordinal: u32, device_id: u32) -> GpuInfo {
    GpuInfo {
        gfx: gfx.into(),
        ordinal,
        device_id,
        render: DeviceAccess::Usable,
        unified_memory: hardware::target::is_integrated_target(gfx),
        vram_total: 32 << 30,
        ..GpuInfo::default()
    }
}

fn all(box_: &HostSnapshot) -> Vec<DoctorFinding> {
    check_host(box_, &HardwareProfile::for_host(box_).unwrap())
}

fn found(box_: &HostSnapshot) -> Vec<(&'static str, Severity)> {
    all(box_).into_iter().map(|finding| (finding.id, finding.severity)).collect()
}

fn changed(change: impl FnOnce(&mut HostSnapshot)) -> Vec<(&'static str, Severity)> {
    let mut box_ = halo();
    change(&mut box_);
    // A healthy Strix Halo has no INVLPGB.
    found(&box_).into_iter().filter(|found| *found != ("C-30", Severity::Info)).collect()
}

#[test]
fn a_healthy_host_has_only_information() {
    assert_eq!(found(&halo()), [("C-30", Severity::Info)]);
    assert_eq!(found(&HostSnapshot::default()), [("C-01", Severity::Info)]);
}

#[test]
fn each_known_trouble_is_found_with_its_severity() {
    use Severity::{Fail, Info, Warn};
    assert_eq!(changed(|it| it.kfd = DeviceAccess::Denied), [("C-07", Fail)]);
    assert_eq!(changed(|it| it.gpus[0].render = DeviceAccess::Absent), [("C-08", Fail)]);
    assert_eq!(changed(|it| it.gpus[0].device_id = 0x7551), [("C-02", Warn)]);
    let unsaved = |release: &str| {
        let release = release.to_owned();
        move |it: &mut HostSnapshot| {
            it.kernel.release = release;
            it.gpus[0].saves_wave_state = false;
        }
    };
    assert_eq!(changed(unsaved("6.17.0-14-generic")), [("C-20", Warn)]);
    assert_eq!(changed(unsaved("6.11.0-29-generic")), [("C-20", Fail)]);
    assert_eq!(changed(|it| it.kernel.release = "6.17.4-2-pve".into()), []);
    assert_eq!(changed(|it| it.gpus[0].mes_firmware = Some(0x83)), [("C-28", Fail)]);
    assert_eq!(changed(|it| it.gpus[0].gtt_total = 62 << 30), [("C-22", Warn)]);
    assert_eq!(changed(|it| it.gpus[0].vram_total = 96 << 30), [("C-25", Warn)]);
    let everything = "amdgpu.gttsize=131072 ttm.pages_limit=33554432 amd_iommu=off";
    assert_eq!(
        changed(|it| it.kernel.command_line = everything.into()),
        [("C-23", Warn), ("C-23", Warn), ("C-24", Info)]
    );
    assert_eq!(changed(|it| it.memory.swap_free = 0), [("C-32", Warn)]);
    assert_eq!(changed(|it| it.memory.swap_zram = 8 << 30), [("C-33", Info)]);
    assert_eq!(changed(|it| it.kernel.swappiness = Some(60)), [("C-31", Info)]);
    assert_eq!(changed(|it| it.disk_free = Some(10 << 30)), [("C-35", Warn)]);
    assert_eq!(changed(|it| it.gpus[0].device_id = 0x1234), [("C-02", Info)]);
    let dkms = KernelModule { version: Some("6.16.13".into()) };
    assert_eq!(changed(|it| it.amdgpu = Some(dkms)), [("C-29", Info)]);
    let forgotten = StoredVariable {
        file: "~/.bashrc".into(),
        name: "HSA_OVERRIDE_GFX_VERSION".into(),
        value: "12.0.1".into(),
    };
    assert_eq!(changed(|it| it.settings.push(forgotten)), [("C-45", Warn)]);
    let two = |it: &mut HostSnapshot| {
        let variables = [("HIP_VISIBLE_DEVICES", "0"), ("ROCR_VISIBLE_DEVICES", "1")];
        it.environment = variables.map(|(name, value)| (name.into(), value.into())).into();
    };
    assert_eq!(changed(two), [("C-05", Warn)]);
    let rootless = |it: &mut HostSnapshot| {
        it.kernel.container = Some("podman".into());
        it.kfd = DeviceAccess::Denied;
    };
    assert_eq!(changed(rootless), [("C-07", Fail), ("C-11", Warn)]);
    let stranger = GpuProcess {
        pid: 4711,
        name: "python3".into(),
        vram_bytes: 20 << 30,
        ..GpuProcess::default()
    };
    let runtimes = ["/opt/rocm-7.12.0", "elsewhere"].map(str::to_owned).into();
    let mixed = GpuProcess { runtimes, ..GpuProcess::default() };
    assert_eq!(changed(|it| it.gpu_processes.push(mixed)), [("C-41", Fail)]);
    assert_eq!(changed(|it| it.gpu_processes.push(stranger)), [("C-34", Warn)]);
    assert_eq!(changed(|it| it.kernel.virtual_machine = Some("QEMU".into())), [("C-12", Warn)]);
}

/// Sets an environment variable of the host.
fn set(name: &str, value: &str) -> impl FnOnce(&mut HostSnapshot) + use<> {
    let (name, value) = (name.to_owned(), value.to_owned());
    move |it| {
        it.environment.insert(name, value);
    }
}

#[test]
fn each_variable_that_harms_is_found_with_its_severity() {
    use Severity::{Fail, Info, Warn};
    assert_eq!(changed(set("HSA_OVERRIDE_GFX_VERSION", "12.0.1")), [("C-45", Fail)]);
    assert_eq!(changed(set("HSA_OVERRIDE_GFX_VERSION", "11.5.1")), [("C-45", Warn)]);
    assert_eq!(changed(set("HSA_OVERRIDE_GFX_VERSION", "garbage")), [("C-45", Fail)]);
    assert_eq!(changed(set("HSA_OVERRIDE_GFX_VERSION_1", "9.0.6")), [("C-45", Fail)]);
    assert_eq!(changed(set("HSA_OVERRIDE_GFX_VERSION", "1151.5.1")), [("C-45", Fail)]);
    let zeros = "expandable_segments:True,max_split_size_mb:512";
    assert_eq!(changed(set("PYTORCH_HIP_ALLOC_CONF", zeros)), [("C-46", Fail)]);
    assert_eq!(changed(set("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")), []);
    let rounded = "roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:512";
    assert_eq!(changed(set("PYTORCH_ALLOC_CONF", rounded)), []);
    assert_eq!(changed(set("PYTORCH_ALLOC_CONF", "max_split_mb:512")), [("C-46", Warn)]);
    assert_eq!(changed(set("HSA_ENABLE_SDMA", "1")), [("C-48", Info)]);
    assert_eq!(changed(set("HSA_ENABLE_SDMA", "0")), []);
    assert_eq!(changed(set("ROCBLAS_USE_HIPBLASLT", "0")), [("C-49", Info)]);
    assert_eq!(changed(set("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1")), [("C-66", Warn)]);
    assert_eq!(changed(set("HSA_DISABLE_CACHE", "1")), [("C-47", Warn)]);
    assert_eq!(changed(set("HIP_VISIBLE_DEVICES", "1")), [("C-05", Warn)]);
    assert_eq!(changed(set("HIP_VISIBLE_DEVICES", "0")), []);
}

#[test]
fn a_container_with_sysfs_but_no_device_gets_the_remedy() {
    let mut box_ = halo();
    box_.kernel.container = Some("lxc".into());
    box_.kfd = DeviceAccess::Absent;
    let findings = all(&box_);
    let finding = findings.iter().find(|finding| finding.id == "C-07").unwrap();
    assert!(finding.seen.contains("not in this container"), "{finding:?}");
    assert!(finding.remedy.contains("--device /dev/kfd"), "{finding:?}");
}

#[test]
fn a_card_beside_an_integrated_gpu_is_the_one_that_is_meant() {
    let box_ = HostSnapshot {
        kfd: DeviceAccess::Usable,
        gpus: vec![card("gfx1036", 0, 0), card("gfx1201", 1, 0x7551)],
        ..HostSnapshot::default()
    };
    let findings = all(&box_);
    let beside = findings.iter().find(|finding| finding.id == "C-05").unwrap();
    assert!(beside.remedy.contains("HIP_VISIBLE_DEVICES=1"), "{findings:?}");
}

#[test]
fn the_missing_groups_are_named() {
    let mut box_ = halo();
    box_.kfd = DeviceAccess::Denied;
    box_.gpu_groups = [("render".to_owned(), 105), ("video".to_owned(), 44)].into();
    box_.groups = [44, 1000].into();
    let findings = all(&box_);
    assert!(findings[0].remedy.contains("usermod -aG render $USER"), "{findings:?}");
}

#[test]
fn the_budget_leaves_the_host_its_memory() {
    let mut box_ = halo();
    assert_eq!(memory::memory_budget(&box_), Some((124_u64 << 30) / 10 * 8));
    box_.memory.available = 20 << 30;
    assert_eq!(memory::memory_budget(&box_), Some(12 << 30));
    box_.memory.limit = Some(16 << 30);
    assert_eq!(memory::memory_budget(&box_), Some(8 << 30), "what a container may use");
    box_.gpus = vec![card("gfx1201", 0, 0x7551)];
    assert_eq!(memory::memory_budget(&box_), Some(31 << 30));
    box_.gpus[0].vram_total = 0;
    assert_eq!(memory::memory_budget(&box_), None, "not known is not nothing");
}

#[test]
fn the_budget_is_that_of_the_gpu_which_the_agent_is_given() {
    let mut box_ = HostSnapshot {
        gpus: vec![card("gfx1201", 0, 0x7551), card("gfx1201", 1, 0x7551)],
        ..HostSnapshot::default()
    };
    box_.gpus[0].vram_used = 20 << 30;
    box_.gpus[1].vram_used = 2 << 30;
    for (gpu, bytes) in [("0", Some(11 << 30)), ("1", Some(29 << 30)), ("2", None)] {
        set("FLOTILLA_GPU", gpu)(&mut box_);
        assert_eq!(memory::memory_budget(&box_), bytes, "{gpu}");
    }
}
