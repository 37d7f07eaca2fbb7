//! A box that is only files: what an agent is told with `FLOTILLA_SYSROOT` that its box does.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Between two advances of its counters.
const TICK: Duration = Duration::from_millis(5);

/// A box with an R9700, busy and warm, and a card that sleeps.
pub struct FakeBox {
    root: PathBuf,
    /// TLB shootdowns a second.
    rate: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    clock: Option<JoinHandle<()>>,
}

impl FakeBox {
    /// # Panics
    /// When it cannot be written.
    pub fn create(root: PathBuf) -> Self {
        let (rate, over) = (Arc::new(AtomicU64::new(110)), Arc::new(AtomicBool::new(false)));
        let mut fake = Self { root, rate, over, clock: None };
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
        fake.clock = Some(fake.tick());
        fake
    }

    /// One GPU, in the processor and its memory.
    ///
    /// # Panics
    /// When it cannot be written.
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

    /// So many TLB shootdowns a second from now on.
    pub fn shoot_down(&self, per_s: u64) {
        self.rate.store(per_s, Ordering::Relaxed);
    }

    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, path: &str, text: &str) {
        write(&self.root, path, text);
    }

    /// # Panics
    /// When it is not there.
    pub fn remove(&self, directory: &str) {
        let place = self.root.join(directory.trim_start_matches('/'));
        std::fs::remove_dir_all(place).expect("it was there");
    }

    /// Counts on, most of the time in the kernel.
    fn tick(&self) -> JoinHandle<()> {
        let (root, rate, over) = (self.root.clone(), self.rate.clone(), self.over.clone());
        std::thread::spawn(move || {
            let (mut count, mut ticks, mut at) = (1e6_f64, 1000_u64, Instant::now());
            while !over.load(Ordering::Relaxed) {
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

/// Whole or not at all.
fn write(root: &Path, path: &str, text: &str) {
    let place = root.join(path.trim_start_matches('/'));
    std::fs::create_dir_all(place.parent().expect("a directory")).expect("a directory");
    let passing = place.with_extension("new");
    std::fs::write(&passing, text).and_then(|()| std::fs::rename(passing, place)).expect("a file");
}

impl Drop for FakeBox {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(clock) = self.clock.take() {
            // A panic of its own has been seen.
            let _ = clock.join();
        }
    }
}
