//! A counting allocator that measures the memory use of an input.

#![allow(unsafe_code, reason = "an allocator is unsafe to write; this one only counts")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// The memory limit of an input: a number of bytes per input byte, plus a constant. The worst case
/// of JSON is `[{"":0},…]`: a map of 640 bytes for 7 bytes of text. A compiled regular expression
/// may have 10 MiB, and needs more during compilation.
const BYTES_PER_INPUT_BYTE: usize = 128;
const BASE_BYTES: usize = 32 << 20;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count_allocation(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is forwarded to the system allocator; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(place, layout) }
    }
}

/// Returns the memory limit of an input in bytes.
pub fn memory_limit(input: &[u8]) -> usize {
    BASE_BYTES + BYTES_PER_INPUT_BYTE * input.len()
}

/// Runs `work` and returns its peak memory use in bytes and its result. Counts all threads, so two
/// measurements at once disturb each other.
pub fn peak_during<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let done = work();
    (PEAK.load(Relaxed).saturating_sub(before), done)
}
