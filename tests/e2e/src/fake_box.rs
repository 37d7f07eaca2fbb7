//! A host that consists of files, for agents with `FLOTILLA_SYSROOT`.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The interval between two updates of its counters.
const TICK: Duration = Duration::from_millis(5);

/// A host with a busy R9700 GPU and a second, suspended GPU.
pub struct FakeBox {
    root: PathBuf,
    /// TLB shootdowns per second.
    rate: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
    clock: Option<JoinHandle<()>>,
}

impl FakeBox {
    pub fn create(root: PathBuf) -> Self {
        let (rate, stopped) = (Arc::new(AtomicU64::new(110)), Arc::new(AtomicBool::new(false)));
        let mut fake = Self { root, rate, stopped, clock: None };
        let node = |n: u32| format!("/sys/class/kfd/kfd/topology/nodes/{n}/properties");
        let properties = |minor: u32| {
            format!(
                "simd_count 128\ngfx_target_version 120001\nvendor_id 4098\ndrm_render_minor {minor}\n"
            )
        };
        let card = "/sys/class/drm/renderD128/device";
        let asleep = "/sys/class/drm/renderD129/device";
        let files = [
            (node(0), "simd_count 0\ngfx_target_version 0\n".to_owned()),
            (node(1), properties(128)),
            (node(2), properties(129)),
            (format!("{card}/power/runtime_status"), "active".into()),
            (format!("{card}/drm/card1/dev"), "226:1".into()),
            (format!("{card}/gpu_busy_percent"), "97".into()),
            (format!("{card}/mem_info_vram_total"), "34208743424".into()),
            (format!("{card}/mem_info_vram_used"), "30000000000".into()),
            (format!("{card}/hwmon/hwmon3/name"), "amdgpu".into()),
            (format!("{card}/hwmon/hwmon3/power1_average"), "212000000".into()),
            (format!("{card}/hwmon/hwmon3/temp1_input"), "71000".into()),
            (format!("{card}/hwmon/hwmon3/temp1_label"), "edge".into()),
            (format!("{asleep}/power/runtime_status"), "suspended".into()),
            (format!("{asleep}/drm/card2/dev"), "226:2".into()),
            (format!("{asleep}/gpu_busy_percent"), "not to be read".into()),
            ("/proc/meminfo".into(), "MemTotal: 32882008 kB\nMemAvailable: 16441004 kB\n".into()),
        ];
        for (path, text) in &files {
            fake.write(path, text);
        }
        fake.clock = Some(fake.spawn_counters());
        fake
    }

    /// Changes it to a host with one GPU and unified memory.
    pub fn become_strix_halo(&self) {
        let nodes = "/sys/class/kfd/kfd/topology/nodes";
        self.remove(&format!("{nodes}/2"));
        let properties = "simd_count 80\ngfx_target_version 110501\nvendor_id 4098\n";
        let minor = "drm_render_minor 128\n";
        self.write(&format!("{nodes}/1/properties"), &format!("{properties}{minor}"));
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn set_shootdown_rate(&self, per_s: u64) {
        self.rate.store(per_s, Ordering::Relaxed);
    }

    pub fn write(&self, path: &str, text: &str) {
        write(&self.root, path, text);
    }

    pub fn remove(&self, directory: &str) {
        let target = self.root.join(directory.trim_start_matches('/'));
        std::fs::remove_dir_all(target).expect("it was there");
    }

    fn spawn_counters(&self) -> JoinHandle<()> {
        let (root, rate, stopped) = (self.root.clone(), self.rate.clone(), self.stopped.clone());
        std::thread::spawn(move || {
            let (mut count, mut ticks, mut at) = (1e6_f64, 1000_u64, Instant::now());
            while !stopped.load(Ordering::Relaxed) {
                let gap = at.elapsed();
                at += gap;
                count += gap.as_secs_f64() * rate.load(Ordering::Relaxed) as f64;
                ticks += 10;
                let interrupts = format!(" TLB:  {}  0   TLB shootdowns\n", count.round());
                write(&root, "/proc/interrupts", &interrupts);
                write(&root, "/proc/stat", &format!("cpu  0 0 {ticks} 50 0 0 0 0 0 0\n"));
                std::thread::sleep(TICK);
            }
        })
    }
}

/// Replaces the file atomically.
fn write(root: &Path, path: &str, text: &str) {
    let target = root.join(path.trim_start_matches('/'));
    std::fs::create_dir_all(target.parent().expect("a directory")).expect("a directory");
    let temporary = target.with_extension("new");
    std::fs::write(&temporary, text)
        .and_then(|()| std::fs::rename(temporary, target))
        .expect("a file");
}

impl Drop for FakeBox {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(clock) = self.clock.take() {
            // A panic of the thread has been printed.
            let _ = clock.join();
        }
    }
}
