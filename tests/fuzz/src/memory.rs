//! How much memory an input takes, measured where it is taken.

#![allow(unsafe_code, reason = "an allocator is unsafe to write; this one only counts")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// What an input may take: so much for each of its bytes, and so much in any case. JSON's
/// worst is `[{"":0},…]`: a map of 640 bytes for 7 bytes of text. A regular expression may be
/// 10 MiB when compiled, and takes more on the way.
const PER_BYTE: usize = 128;
const IN_ANY_CASE: usize = 32 << 20;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn took(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is the system allocator's; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as our own caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as our own caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        took(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as our own caller promised.
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as our own caller promised.
        unsafe { System.dealloc(place, layout) }
    }
}

/// What an input may take.
pub fn limit(input: &[u8]) -> usize {
    IN_ANY_CASE + PER_BYTE * input.len()
}

/// The most memory held at a time during `work`, beyond what was held before. Counts all
/// threads: two measurements at once disturb each other.
pub fn peak_during<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let done = work();
    (PEAK.load(Relaxed).saturating_sub(before), done)
}
